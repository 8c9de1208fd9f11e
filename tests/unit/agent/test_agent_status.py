"""The status: what is said of each pool, and in which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.agent.desired import Source
from hostprep.agent.messages import (
    Failure,
    PoolObservation,
    PoolResult,
    Progress,
    RegionObservation,
)
from hostprep.agent.status import NodeContext, node_status
from hostprep.api.node_resource import NodeStatus, Phase, PoolStatus
from tests.support.agent_values import (
    context_of,
    entry_of,
    observation_of,
    pool_observation,
    region,
    result_of,
)

pytestmark = pytest.mark.unit

KV = entry_of()
READY_LOOK = observation_of(pool_observation(region()))
DAMAGED = region(state="Damaged", message="has 0 bytes, not 8589934592")


def _status(
    view: NodeContext, previous: NodeStatus | None = None, now_s: float = 1000.0
) -> NodeStatus:
    return node_status(view, previous or NodeStatus(), now_s=now_s)


def _ready() -> NodeStatus:
    return _status(context_of(KV, observation=READY_LOOK, results=(result_of(KV),)))


def _pool(status: NodeStatus, name: str = "kv") -> PoolStatus:
    pool = status.pool(name)
    assert pool is not None
    return pool


def _said(
    *regions: RegionObservation, previous: NodeStatus | None = None, **outcome: Any
) -> PoolStatus:
    view = context_of(
        KV,
        observation=observation_of(pool_observation(*regions)),
        results=(result_of(KV, **outcome),),
    )
    return _pool(_status(view, previous))


def test_a_sound_published_pool_with_nothing_to_do_is_ready() -> None:
    status = _ready()

    assert _pool(status).phase is Phase.READY
    assert _pool(status).message == "8 GiB in 1 region of HugeTLB2Mi pages"
    assert status.summary == "kv 8 GiB HugeTLB2Mi ready"
    assert [(c.type, c.status) for c in status.conditions] == [
        ("Ready", "True"),
        ("ResizeBlocked", "False"),
        ("Damaged", "False"),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"pending": True},
        {"error": Failure("Failed", "no")},
        {"unmet": Failure("TooLarge", "no")},
        {"blocked": ("node0-0",)},
    ],
)
def test_nothing_is_ready_while_anything_is_left_to_do(changes: dict[str, Any]) -> None:
    assert _said(region(), **changes).phase is not Phase.READY


def test_a_pool_that_lost_a_region_before_its_handoff_was_written_is_not_ready() -> None:
    pool = _said(
        region("node0-1"),
        wanted_bytes=16 << 30,
        planned_bytes=16 << 30,
        regions=("node0-0", "node0-1"),
    )

    assert (pool.phase, pool.reason) == (Phase.DEGRADED, "Repairing")
    assert pool.message == (
        "node0-0 was lost during the work: 8 GiB of 16 GiB are published; being rebuilt"
    )


def test_an_outcome_of_other_words_proves_nothing() -> None:
    other = entry_of(generation=2)
    status = _status(context_of(other, observation=READY_LOOK, results=(result_of(KV),)))

    assert _pool(status).phase is Phase.RESIZING


def test_what_was_never_there_is_being_prepared() -> None:
    progress = {"kv": Progress("kv", 42, 100)}
    outcome = result_of(KV, pending=True)
    status = _status(
        context_of(KV, observation=observation_of(), results=(outcome,), progress=progress)
    )

    assert (_pool(status).phase, _pool(status).progress_percent) == (Phase.PREPARING, 42)
    assert status.summary == "kv preparing 42 %"
    assert status.conditions[0].reason == "Preparing"


def test_what_was_ready_and_is_lost_is_degraded_while_it_is_made_anew() -> None:
    gone = region(state="Damaged", size_bytes=0, message="its file is gone")

    pool = _said(gone, previous=_ready(), pending=True)

    assert (pool.phase, pool.reason) == (Phase.DEGRADED, "Repairing")
    assert pool.message == "node0-0 its file is gone; being rebuilt"
    assert pool.ready_bytes == 0


@pytest.mark.parametrize("outcomes", [(), ({"pending": True},)])
def test_an_agent_that_starts_anew_leaves_ready_what_is_all_there(
    outcomes: tuple[dict[str, Any], ...],
) -> None:
    """Before its first plan, or while it looks after what the last one may have left."""
    ready = _ready()
    found = tuple(result_of(KV, **changes) for changes in outcomes)
    status = _status(context_of(KV, observation=READY_LOOK, results=found), previous=ready)

    assert _pool(status).phase is Phase.READY
    assert _pool(status).message == _pool(ready).message
    assert (
        _pool(_status(context_of(KV, observation=observation_of()), previous=ready)).phase
        is Phase.DEGRADED
    )


def test_after_a_reboot_the_same_is_prepared_not_repaired() -> None:
    previous = replace(_ready(), boot_id="another")
    outcome = result_of(KV, pending=True)
    status = _status(context_of(KV, observation=observation_of(), results=(outcome,)), previous)

    assert _pool(status).phase is Phase.PREPARING


def test_a_changed_pool_with_sound_memory_is_resizing() -> None:
    changed = entry_of(generation=2)
    outcome = result_of(changed, pending=True, wanted_bytes=16 << 30)
    pool = _pool(_status(context_of(changed, observation=READY_LOOK, results=(outcome,)), _ready()))

    assert pool.phase is Phase.RESIZING
    assert pool.message == "has 8 GiB ready, on the way to 16 GiB"


def test_a_change_that_is_not_planned_yet_leaves_the_pool_as_it_was_reported() -> None:
    before = _ready()
    changed = entry_of(generation=2)
    status = _status(context_of(changed, observation=READY_LOOK), before)

    assert (_pool(status).phase, _pool(status).generation) == (Phase.READY, 1)
    gone = _status(context_of(changed, observation=observation_of()), before)
    assert _pool(gone).generation == 2, "but not where its memory is gone"


def test_a_change_that_waits_for_a_lease_names_the_holder() -> None:
    held = region(state="Leased", holder="process 12, vllm serve")
    status = _status(
        context_of(
            KV,
            observation=observation_of(pool_observation(held)),
            results=(result_of(KV, blocked=("node0-0",)),),
        )
    )

    assert (_pool(status).phase, _pool(status).reason) == (Phase.BLOCKED, "ResizeBlocked")
    assert "node0-0 (process 12, vllm serve)" in _pool(status).message
    assert status.conditions[0].status == "True", "it serves as before"
    assert "a change of kv waits for leases" in status.conditions[0].message
    assert status.conditions[1].status == "True"
    again = context_of(KV, observation=observation_of(pool_observation(held)), results=())
    assert _pool(_status(again, status)).phase is Phase.BLOCKED, "a restarted agent knows it"


def test_a_change_that_waits_for_a_lease_and_has_taken_all_else_is_no_state_to_serve_in() -> None:
    held = region(state="Leased", holder="process 12, vllm serve")
    unfinished = region("node0-1", state="Unfinished")
    status = _status(
        context_of(
            KV,
            observation=observation_of(pool_observation(held, unfinished)),
            results=(result_of(KV, blocked=("node0-0",)),),
        )
    )

    assert (_pool(status).phase, _pool(status).reason) == (Phase.RESIZING, "ResizeBlocked")


def test_a_damaged_region_that_is_leased_is_shown_and_waits() -> None:
    held = replace(DAMAGED, holder="process 12, vllm")
    pool = _said(region("node0-1"), held, previous=_ready(), blocked=("node0-0",))

    assert (pool.phase, pool.reason) == (Phase.DEGRADED, "Damaged")
    assert "after the release of node0-0" in pool.message
    assert pool.ready_bytes == 8 << 30


def test_what_cannot_be_had_says_why_and_what_to_do() -> None:
    unmet = Failure("TooLarge", "100 TiB is more than the machine has; ask for 20Gi or less")
    view = context_of(
        KV, observation=observation_of(), results=(result_of(KV, unmet=unmet, backing=""),)
    )
    status = _status(view)

    assert (_pool(status).phase, _pool(status).reason) == (Phase.FAILED, "TooLarge")
    assert _pool(status).message.endswith("ask for 20Gi or less")
    assert status.conditions[0].reason == "TooLarge"


def test_another_hostprep_at_work_is_no_failure() -> None:
    busy = Failure("AlreadyRunning", "another hostprep is at work", waits=True)
    view = context_of(KV, observation=observation_of(), results=(result_of(KV, error=busy),))
    pool = _pool(_status(view))

    assert (pool.phase, pool.reason) == (Phase.PREPARING, "AlreadyRunning")


def test_an_absent_pool_that_is_gone_is_not_mentioned() -> None:
    gone = entry_of(absent=True)
    assert (
        _status(context_of(gone, observation=observation_of(), results=(result_of(gone),))).pools
        == ()
    )


def test_an_absent_pool_that_is_leased_says_who_holds_it() -> None:
    gone = entry_of(absent=True)
    held = observation_of(pool_observation(region(state="Leased", holder="process 12, vllm")))
    view = context_of(gone, observation=held, results=(result_of(gone, blocked=("node0-0",)),))
    pool = _pool(_status(view))

    assert (pool.phase, pool.reason) == (Phase.RELEASING, "Leased")
    assert "process 12, vllm" in pool.message
    (condition,) = [one for one in _status(view).conditions if one.type == "Releasing"]
    assert (condition.status, condition.reason) == ("True", "Leased")
    assert "process 12, vllm" in condition.message


def test_an_absent_pool_that_could_not_be_looked_at_is_not_taken_for_gone() -> None:
    gone = entry_of(absent=True)
    unseen = PoolObservation(name="kv", generation=0, published=False, regions=(), failure="no")
    pool = _pool(_status(context_of(gone, observation=observation_of(unseen))))

    assert pool.phase is Phase.RELEASING


def test_an_absent_entry_from_the_file_waits_for_the_api_server() -> None:
    view = context_of(entry_of(absent=True), observation=READY_LOOK, source=Source.SAVED)

    assert _pool(_status(view)).reason == "Withheld"


def test_a_sentence_whose_numbers_alone_move_is_no_news() -> None:
    def said(free: str, previous: NodeStatus | None = None) -> NodeStatus:
        unmet = Failure("TooLarge", f"ask for {free} or less")
        view = context_of(KV, observation=observation_of(), results=(result_of(KV, unmet=unmet),))
        return _status(view, previous)

    first = said("20.5 GiB")
    assert said("19.75 GiB", first) == first


def test_a_half_made_region_with_a_finished_namesake_is_listed_once() -> None:
    look = observation_of(pool_observation(region(state="Unfinished", sound=False), region()))
    pool = _pool(_status(context_of(KV, observation=look, results=(result_of(KV, pending=True),))))

    assert [item.state for item in pool.regions] == ["Free"]


def test_the_summary_of_many_pools_stays_short() -> None:
    entries = [entry_of(f"pool-{number}") for number in range(40)]
    assert _status(context_of(*entries, observation=observation_of())).summary.endswith("· 37 more")


_STATES = st.sampled_from(["Free", "Leased", "Dirty", "Damaged", "Unpublished", "Unfinished"])
_FAILURES = st.none() | st.builds(
    Failure, st.sampled_from(["TooLarge", "NothingToPublish"]), st.just("why"), st.booleans()
)
_REGIONS = st.lists(_STATES, max_size=3).map(
    lambda states: [region(f"node0-{i}", state) for i, state in enumerate(states)]
)


@st.composite
def _views(draw: st.DrawFn) -> NodeContext:
    entry = entry_of(absent=draw(st.booleans()), generation=draw(st.integers(1, 3)))
    regions = draw(_REGIONS)
    is_there = draw(st.booleans())
    pools = [pool_observation(*regions)] if regions or is_there else []
    outcome: PoolResult = result_of(
        entry,
        pending=draw(st.booleans()),
        error=draw(_FAILURES),
        unmet=draw(_FAILURES),
        blocked=tuple(draw(st.sets(st.sampled_from([r.name for r in regions])))) if regions else (),
    )
    outcomes = (outcome,) if draw(st.booleans()) else ()
    source = draw(st.sampled_from([Source.LIVE, Source.SAVED]))
    return context_of(entry, observation=observation_of(*pools), results=outcomes, source=source)


@given(_views(), _views())
def test_whatever_is_seen_the_same_view_says_the_same_again(
    first: NodeContext, second: NodeContext
) -> None:
    before = _status(first, now_s=1.0)
    once = _status(second, before, now_s=2.0)

    assert _status(second, once, now_s=3.0) == once
    assert NodeStatus.from_json(once.to_json()) == once


@given(_views())
def test_ready_is_said_only_of_what_is_wholly_sound(view: NodeContext) -> None:
    status = _status(view)

    for pool in status.pools:
        sound = (
            [one for one in view.observation.pools[0].regions if one.sound]
            if view.observation.pools
            else []
        )
        assert pool.ready_bytes == sum(one.size_bytes for one in sound)
        if pool.phase in (Phase.READY, Phase.BLOCKED):
            assert view.observation.pools[0].published
            assert len(sound) == len(view.observation.pools[0].regions)
        assert pool.reason
        assert pool.message


@given(_views())
def test_an_absent_pool_vanishes_only_once_its_folder_has(view: NodeContext) -> None:
    entry = view.desired.entries[0]
    is_answered = bool(view.results) or view.desired.source is Source.SAVED
    if entry.absent:
        assert bool(_status(view).pools) == bool(view.observation.pools or not is_answered)


@pytest.mark.parametrize("answered", [False, True])
def test_a_pool_made_again_under_its_name_keeps_what_is_held_and_since_when(
    answered: bool,
) -> None:
    again = replace(KV, uid="uid-of-the-next-kv", generation=1)
    results = (result_of(again),) if answered else (result_of(KV),)
    view = context_of(again, observation=READY_LOOK, results=results)

    said = _pool(_status(view, _ready(), now_s=2000.0))

    assert said.phase is Phase.READY
    assert said.ready_bytes == 8 << 30
    assert said.ready_since_s == 1000.0
    assert said.uid == (again.uid if answered else KV.uid), "answered for only once it was planned"
