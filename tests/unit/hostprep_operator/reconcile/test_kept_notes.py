"""Events about what regions keep: one for each thing that happened, without any values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hostprep.api.node_resource import GivenUp, KeptStatus, NodeStatus, PoolStatus, RegionStatus
from hostprep_operator.reconcile.changes import EventNote
from hostprep_operator.reconcile.kept import EVERY_S, MOST_GIVEN_UP, KeptNews, kept_notes
from hostprep_operator.records import HostMemoryNodeRecord

pytestmark = pytest.mark.unit


def _status(kept: KeptStatus | None = None, given_up: GivenUp | None = None) -> NodeStatus:
    region = RegionStatus(
        name="node0-0",
        size_bytes=4096,
        backing="Base",
        placement="node:0",
        state="Retained",
        kept=kept,
        given_up=given_up,
    )
    return NodeStatus(pools=(PoolStatus(name="kv", regions=(region,)),))


def _record(status: NodeStatus) -> HostMemoryNodeRecord:
    """As the operator keeps it: without what is no news."""
    document = {"metadata": {"name": "n1"}, "status": status.to_json()}
    return HostMemoryNodeRecord.from_json(document)


def _notes(status: NodeStatus) -> list[EventNote]:
    return [note for _at_s, note in kept_notes(_record(status).status).values()]


@pytest.mark.parametrize(
    ("reason", "said"),
    [("AgeLimit", "retention.maxAgeSeconds"), ("Waiters", "others wait"), ("Claimed", "claim")],
)
def test_what_was_given_up_is_told_with_its_reason(reason: str, said: str) -> None:
    (note,) = _notes(_status(given_up=GivenUp(name="chat", at_s=5.0, reason=reason)))
    assert (note.type, note.reason) == ("Normal", "KeptContentsGivenUp")
    assert 'node0-0 of pool kv no longer keeps "chat"' in note.message
    assert said in note.message


@pytest.mark.parametrize("reason", ["Other", "Removed", "", "of a newer agent"])
def test_what_somebody_did_on_purpose_is_no_event(reason: str) -> None:
    assert _notes(_status(given_up=GivenUp(name="chat", at_s=5.0, reason=reason))) == []


def test_a_refusal_names_the_parts_of_the_identity_and_not_too_many() -> None:
    fields = (
        *("cache", "engine", "groups", "kernel", "layout", "lora.rank", "mamba", "model.dtype"),
        *("model.hf_config.rope", "packages.torch", "weights"),
    )
    (note,) = _notes(_status(KeptStatus(name="chat", reported_s=5.0, refused=fields)))
    assert (note.type, note.reason) == ("Warning", "WarmRestartRefused")
    assert ": cache, " in note.message
    assert "lora, mamba, model and 2 more. " in note.message


def test_no_text_of_an_engines_choice_is_told() -> None:
    fields = ("Call +1 555 0100 now", "weights", "x" * 80)
    (note,) = _notes(_status(KeptStatus(name="chat", reported_s=5.0, refused=fields)))
    assert ": other, weights. " in note.message


def test_what_is_kept_in_order_is_no_event_and_no_news() -> None:
    quiet = _status(KeptStatus(name="chat", since_s=1.0, reported_s=5.0, recovered_blocks=7))
    assert _notes(quiet) == []
    assert _record(quiet) == _record(_status())


def _refused(at_s: float) -> NodeStatus:
    return _status(KeptStatus(name="chat", reported_s=at_s, refused=("weights",)))


def _gone(at_s: float) -> NodeStatus:
    return _status(given_up=GivenUp(name="chat", at_s=at_s, reason="Waiters"))


def _told(*statuses: NodeStatus, every_s: float = EVERY_S) -> list[int]:
    """Return how many events each status leads to, one after the other."""
    news = KeptNews()
    return [
        len(news.take(_record(status).status, now_s=every_s * turn))
        for turn, status in enumerate(statuses)
    ]


@pytest.mark.parametrize("of", [_refused, _gone])
def test_each_thing_is_told_once_and_not_what_was_there_first(
    of: Callable[[float], NodeStatus],
) -> None:
    assert _told(of(5.0), of(5.0), of(6.0), of(6.0), of(7.0)) == [0, 0, 1, 0, 1]
    assert _told(NodeStatus(), of(5.0), of(5.0)) == [0, 1, 0]
    assert _record(of(5.0)) != _record(of(6.0)), "the operator would not look again"


@pytest.mark.parametrize("of", [_refused, _gone])
@pytest.mark.parametrize(
    "unseen", [NodeStatus(), NodeStatus(pools=(PoolStatus(name="kv"),)), _status()]
)
def test_what_is_back_after_a_round_that_did_not_see_it_is_no_news(
    of: Callable[[float], NodeStatus], unseen: NodeStatus
) -> None:
    assert _told(NodeStatus(), of(5.0), unseen, of(5.0), of(6.0)) == [0, 1, 0, 0, 1]
    assert _told(of(5.0), unseen, of(5.0)) == [0, 0, 0]


def test_an_engine_that_refuses_again_and_again_is_told_of_every_ten_minutes() -> None:
    statuses = [NodeStatus(), *(_refused(float(at_s)) for at_s in range(1, 31))]
    told = _told(*statuses, every_s=60.0)
    assert [turn for turn, count in enumerate(told) if count] == [1, 11, 21]
    assert sum(_told(NodeStatus(), *map(_gone, (1.0, 2.0, 3.0)), every_s=1.0)) == 3, "the agent's"


def test_an_engine_that_names_another_owner_each_round_leads_to_few_events() -> None:
    """The agent finds its sidecar changed, and what was kept given up, each time."""

    def renamed(turn: int) -> NodeStatus:
        gone = GivenUp(name=f"chat-{turn}", at_s=float(turn), reason="Claimed")
        status = _status(KeptStatus(name=f"chat-{turn + 1}"), gone)
        (pool,) = status.pools
        return NodeStatus(pools=(replace(pool, name="batch"), pool))

    told = _told(NodeStatus(), *map(renamed, range(1, 361)), every_s=10.0)
    assert sum(told) == 2 * MOST_GIVEN_UP * 6, "of each pool so many in ten minutes"
    assert max(told) == 2


def test_a_whole_nodes_regions_are_told_of_at_once() -> None:
    (pool,) = _gone(5.0).pools
    regions = tuple(replace(pool.regions[0], name=f"node0-{n}") for n in range(MOST_GIVEN_UP))
    assert _told(NodeStatus(), NodeStatus(pools=(replace(pool, regions=regions),))) == [0, 16]


def test_regions_are_told_of_each_by_itself() -> None:
    def both(at_s: float) -> NodeStatus:
        (pool,) = _refused(at_s).pools
        regions = (*pool.regions, replace(pool.regions[0], name="node0-1"))
        return NodeStatus(pools=(replace(pool, regions=regions), replace(pool, name="batch")))

    assert _told(NodeStatus(), both(5.0), both(6.0), every_s=60.0) == [0, 3, 0]
