"""What the agent asks of its worker, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hostprep.agent.desired import DesiredState, Source
from hostprep.agent.messages import (
    Done,
    Failure,
    Observation,
    PoolDone,
    PoolResult,
    Progress,
    ReconcileResult,
)
from hostprep.agent.metrics import Metrics
from hostprep.agent.state import AgentState
from hostprep.api.node_resource import NodeStatus, Phase, PoolEntry
from hostprep.api.pool_spec import PoolState
from tests.support.agent_values import (
    desired_state_of,
    entry_of,
    observation_of,
    pool_observation,
    region,
    result_of,
)

pytestmark = pytest.mark.unit

KV = entry_of()
EMPTY = observation_of()
READY = observation_of(pool_observation(region()))


def _state(*, desired: DesiredState | None = None) -> AgentState:
    state = AgentState(Metrics())
    state.set_desired(desired or desired_state_of(KV))
    return state


def _answer(
    state: AgentState, look: Observation, *outcomes: PoolResult, now_s: float = 0.0, **more: Any
) -> None:
    number = state.request(now_s=now_s).number
    busy = any(outcome.pending for outcome in outcomes)
    state.take(
        ReconcileResult(number, look, outcomes, **({"busy": busy} | more)), now_s=now_s, wall_s=0
    )


def _phase(state: AgentState, previous: NodeStatus | None = None) -> Phase | None:
    status = state.status(previous or NodeStatus(), wall_s=0)
    pool = status.pool("kv") if status else None
    return pool.phase if pool else None


def test_nothing_is_said_before_a_round_was_asked_about_the_present_wishes() -> None:
    state = AgentState(Metrics())
    request = state.request(now_s=0)
    state.set_desired(desired_state_of(KV))
    state.take(ReconcileResult(request.number, READY, (), busy=False), now_s=0, wall_s=0)
    assert state.status(NodeStatus(), wall_s=0) is None

    _answer(state, READY, result_of(KV))
    assert _phase(state) is Phase.READY


def test_the_steps_of_work_that_ended_before_anybody_asked_are_kept() -> None:
    state = _state()
    pending = result_of(KV, pending=True)
    state.take(ReconcileResult(0, EMPTY, (pending,), busy=True), now_s=0, wall_s=0)
    done = result_of(KV, steps=(("Populate", 2.0),))
    state.take(PoolDone(done, READY), now_s=2, wall_s=2)
    state.take(Done(), now_s=2, wall_s=2)
    assert state.status(NodeStatus(), wall_s=2) is None, "no round of its own was answered"

    _answer(state, READY, result_of(KV), now_s=3)

    status = state.status(NodeStatus(), wall_s=3)
    assert status is not None
    assert [(step.name, step.seconds) for step in status.pools[0].steps] == [("Populate", 2.0)]


def test_a_deleted_object_stops_everything_and_releases_nothing() -> None:
    state = _state(desired=desired_state_of(KV, entry_of("old", absent=True)))
    assert {one.spec.state for one in state.request(now_s=0).pools} == set(PoolState)

    state.set_desired(DesiredState())

    assert state.request(now_s=0).pools == ()
    assert state.status(NodeStatus(), wall_s=0) is None


def test_an_instruction_from_the_file_carries_out_no_release() -> None:
    state = _state(desired=desired_state_of(KV, entry_of("old", absent=True), source=Source.SAVED))

    assert [one.spec.state for one in state.request(now_s=0).pools] == [PoolState.PRESENT]


def _fail(state: AgentState, now_s: float, failure: Failure) -> None:
    _answer(state, EMPTY, result_of(KV, pending=True), now_s=now_s)
    state.take(PoolDone(result_of(KV, error=failure), EMPTY), now_s=now_s, wall_s=0)
    state.take(Done(), now_s=now_s, wall_s=0)


def test_what_failed_is_tried_again_ever_more_rarely() -> None:
    state = _state()
    pauses = []
    now_s = 0.0
    for _ in range(12):
        _fail(state, now_s, Failure("Failed", "no"))
        begin_s = now_s
        while state.request(now_s=now_s).held:
            now_s += 1
        pauses.append(now_s - begin_s)

    assert pauses[0] <= 5
    assert all(150 <= pause <= 300 for pause in pauses[8:])
    assert _phase(state) is Phase.FAILED


def test_what_failed_is_tried_at_once_where_its_regions_have_changed() -> None:
    state = _state()
    _fail(state, 0.0, Failure("NothingToPublish", "no"))
    assert state.request(now_s=0.1).held == ("kv",)

    _answer(state, observation_of(pool_observation(region(state="Damaged"))), now_s=0.1)

    assert state.request(now_s=0.1).held == ()


def test_what_others_are_in_the_way_of_is_tried_at_the_next_round() -> None:
    state = _state()
    _fail(state, 0.0, Failure("AlreadyRunning", "busy", waits=True))

    assert state.request(now_s=0.1).held == ()


@pytest.mark.parametrize("waits", [True, False])
def test_trying_again_is_no_news_until_something_moves(waits: bool) -> None:
    state = _state()
    _fail(state, 0.0, Failure("AlreadyRunning", "busy", waits=waits))
    before = state.status(NodeStatus(), wall_s=0)
    assert before is not None

    _answer(state, EMPTY, result_of(KV, pending=True))
    state.take(Progress("kv", 0, 100), now_s=0, wall_s=0)
    again = state.status(before, wall_s=0)
    assert again is not None
    assert again.pools[0].reason == "AlreadyRunning"

    state.take(Progress("kv", 1, 100), now_s=0, wall_s=0)
    moving = state.status(before, wall_s=0)
    assert moving is not None
    assert moving.pools[0].reason == "Preparing"


def test_an_error_of_the_whole_job_is_said_of_what_was_waiting_for_it() -> None:
    state = _state()
    _answer(state, EMPTY, result_of(KV, pending=True))

    state.take(Done(error=Failure("Unexpected", "it broke")), now_s=0, wall_s=0)

    assert _phase(state) is Phase.FAILED
    assert state.is_settled


def test_other_words_are_tried_at_once_whatever_failed_before() -> None:
    state = _state()
    _fail(state, 0.0, Failure("Failed", "no"))

    state.set_desired(desired_state_of(entry_of(generation=2)))

    assert state.request(now_s=0.1).held == ()


def test_an_answer_about_other_words_is_not_believed() -> None:
    state = _state()
    state.set_desired(desired_state_of(entry_of(generation=2)))
    _answer(state, READY, result_of(KV), busy=True)

    assert _phase(state) is Phase.RESIZING


def test_a_stopped_job_asks_for_another_round_at_once() -> None:
    state = _state()
    assert state.take(Done(stopped=True), now_s=0, wall_s=0)
    assert not state.take(Done(), now_s=0, wall_s=0)


def test_metrics_count_a_problem_once_and_forget_pools_that_went() -> None:
    metrics = Metrics()
    state = AgentState(metrics)
    state.set_desired(desired_state_of(KV))
    damaged = observation_of(pool_observation(region(state="Damaged", problem="RegionResized")))
    for look in (READY, damaged, damaged, READY):
        _answer(state, look, result_of(KV))
        state.status(NodeStatus(), wall_s=0)
    text = metrics.text().decode()
    assert 'hostprep_verify_problems_total{pool="kv",reason="RegionResized"} 1.0' in text
    assert 'hostprep_pool_phase{phase="Ready",pool="kv"} 1.0' in text
    assert 'hostprep_huge_pages{kind="held",page_size="2Mi"} 4096.0' in text

    state.set_desired(DesiredState())
    state.status(NodeStatus(), wall_s=0)
    assert "hostprep_pool_phase{" not in metrics.text().decode()


def test_metrics_say_since_when_a_pool_is_in_its_phase() -> None:
    metrics = Metrics()
    state = AgentState(metrics)
    state.set_desired(desired_state_of(KV))
    damaged = observation_of(pool_observation(region(state="Damaged", problem="RegionResized")))
    since: list[float | None] = []
    for at_s, look in ((10, READY), (20, READY), (30, damaged), (40, damaged), (50, READY)):
        _answer(state, look, result_of(KV))
        state.status(NodeStatus(), wall_s=at_s)
        name = "hostprep_pool_phase_since_timestamp_seconds"
        since.append(metrics._registry.get_sample_value(name, {"pool": "kv"}))
    assert since == [10, 10, 30, 30, 50]

    state.set_desired(DesiredState())
    state.status(NodeStatus(), wall_s=60)
    assert "phase_since_timestamp_seconds{" not in metrics.text().decode()


def test_an_absent_pool_is_not_called_gone_while_the_work_of_before_may_still_make_it() -> None:
    state = _state()
    _answer(state, EMPTY, result_of(KV, pending=True))
    gone = entry_of(absent=True, generation=2)
    state.set_desired(desired_state_of(gone))

    _answer(state, EMPTY, busy=True)
    assert _phase(state) is Phase.RELEASING

    state.take(Done(stopped=True), now_s=0, wall_s=0)
    _answer(state, EMPTY, result_of(gone))
    assert state.status(NodeStatus(), wall_s=0) is not None
    assert _phase(state) is None


def test_a_pool_that_was_tried_and_ran_short_waits_longer_each_time_and_counts_once() -> None:
    state = _state()
    short = Failure("FoundShort", "node 0 gave 3 of 16 pages")
    _answer(state, EMPTY, result_of(KV, pending=True))
    state.take(PoolDone(result_of(KV, unmet=short, error=short), EMPTY), now_s=0, wall_s=0)

    assert state.request(now_s=2).held == ("kv",)
    assert state.request(now_s=6).held == ()
    assert b'prepare_failures_total{pool="kv",reason="FoundShort"} 1.0' in state.metrics.text()


def _devices(mode: str = "devicePlugin", **more: Any) -> PoolEntry:
    return replace(KV, policy={**KV.policy, "attach": {"mode": mode}, **more})


def test_kubelet_hands_out_the_pools_that_say_so() -> None:
    entry = _devices()
    state = _state(desired=desired_state_of(entry, entry_of("tier")))
    assert state.device_pools() is None, "nothing was looked at yet"
    _answer(
        state, observation_of(pool_observation(region()), pool_observation(region(), name="tier"))
    )
    pools = state.device_pools()
    assert pools is not None
    assert set(pools) == {"kv"}
    assert not pools["kv"].scrubbed_on_claim


@pytest.mark.parametrize(
    "entry",
    [_devices("hostPath"), _devices("other"), replace(_devices(), absent=True), KV],
)
def test_no_other_pool_is_handed_out(entry: PoolEntry) -> None:
    state = _state(desired=desired_state_of(entry))
    _answer(state, READY)
    assert state.device_pools() == {}


@pytest.mark.parametrize("attach", [None, "devicePlugin", [], {"mode": None}])
def test_an_attach_that_makes_no_sense_is_no_device_plugin(attach: Any) -> None:
    state = _state(desired=desired_state_of(replace(KV, policy={**KV.policy, "attach": attach})))
    _answer(state, READY)
    assert state.device_pools() == {}


def test_without_an_instruction_kubelet_is_told_nothing_new() -> None:
    state = _state(desired=desired_state_of(_devices()))
    _answer(state, READY)
    state.set_desired(DesiredState())
    assert state.device_pools() is None


def test_pools_that_are_scrubbed_on_claim_are_named() -> None:
    state = _state(desired=desired_state_of(_devices(scrub={"when": "OnClaim"})))
    _answer(state, READY)
    pools = state.device_pools()
    assert pools is not None
    assert pools["kv"].scrubbed_on_claim
