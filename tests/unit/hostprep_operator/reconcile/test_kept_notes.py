"""Events about what regions keep: one for each thing that happened, without any values."""

from __future__ import annotations

import pytest

from hostprep.api.node_resource import GivenUp, KeptStatus, NodeStatus, PoolStatus, RegionStatus
from hostprep_operator.reconcile.changes import EventNote
from hostprep_operator.reconcile.kept import kept_notes
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
    return list(kept_notes(_record(status).status).values())


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


def test_a_refusal_names_the_fields_and_not_too_many() -> None:
    fields = tuple(f"field{number}" for number in range(12))
    (note,) = _notes(_status(KeptStatus(name="chat", reported_s=5.0, refused=fields)))
    assert (note.type, note.reason) == ("Warning", "WarmRestartRefused")
    assert "field0, " in note.message
    assert "field7 and 4 more" in note.message


def test_what_is_kept_in_order_is_no_event_and_no_news() -> None:
    quiet = _status(KeptStatus(name="chat", since_s=1.0, reported_s=5.0, recovered_blocks=7))
    assert _notes(quiet) == []
    assert _record(quiet) == _record(_status())


def test_each_time_has_its_own_key() -> None:
    statuses = [
        _status(KeptStatus(name="chat", reported_s=at_s, refused=("weights",)))
        for at_s in (5.0, 5.0, 6.0)
    ]
    assert len({key for status in statuses for key in kept_notes(status)}) == 2
    assert _record(statuses[0]) != _record(statuses[2]), "the operator would not look again"
