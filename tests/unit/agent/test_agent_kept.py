"""What regions keep for their owners, as metrics and the status show it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hostprep.agent.desired import DesiredState
from hostprep.agent.kept import KeptHistory, KeptMetrics
from hostprep.agent.messages import (
    KeptObservation,
    PoolObservation,
    ReconcileResult,
    decode,
    encode,
)
from hostprep.agent.metrics import Metrics, Registry
from hostprep.agent.state import AgentState
from hostprep.api.node_resource import GivenUp, NodeStatus, RegionStatus, field_label
from tests.engines.warm_rows import ROWS
from tests.support.agent_values import (
    desired_state_of,
    entry_of,
    observation_of,
    pool_observation,
    region,
    result_of,
)

pytestmark = pytest.mark.unit

GIB = 1 << 30
FREE = pool_observation(region())
UNSEEN = PoolObservation(name="kv", generation=0, published=False, regions=(), failure="no")


def kept(**changes: Any) -> KeptObservation:
    fields: dict[str, Any] = {
        "region": "node0-0",
        "size_bytes": 8 * GIB,
        "name": "chat",
        "since_s": 1000.0,
        "state": "Retained",
        "is_leased": False,
    }
    return KeptObservation(**(fields | changes))


def pool_of(*found: KeptObservation, **changes: Any) -> PoolObservation:
    regions = tuple(region(one.region, one.state) for one in found) or (region(),)
    return pool_observation(*regions, kept=found, **changes)


LEASED = pool_of(kept(state="Leased", is_leased=True))
RETAINED = pool_of(kept())


class Shown:
    """Metrics that were shown these observations, the first of them as the agent started."""

    def __init__(self, *pools: PoolObservation) -> None:
        self._registry = Registry()
        self._metrics = KeptMetrics(self._registry)
        self._history = KeptHistory()
        for pool in pools:
            self.show(pool)

    def show(self, *pools: PoolObservation) -> None:
        observation = observation_of(*pools)
        self._metrics.show(observation, self._history.take(observation, now_s=9))

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"hostprep_{name}", {"pool": "kv", **labels})

    @property
    def given_up(self) -> dict[str, float]:
        return {
            sample.labels["reason"]: sample.value
            for metric in self._registry.collect()
            for sample in metric.samples
            if sample.name == "hostprep_kept_given_up_total" and sample.value
        }


def test_gauges_show_what_is_kept_now_by_the_regions_state() -> None:
    shown = Shown(
        pool_of(
            kept(kept_blocks=5, unheld_s=60.0),
            kept(region="node0-1", state="Leased", is_leased=True, kept_blocks=7),
            kept(region="node1-0", unheld_s=90.0),
        )
    )
    assert shown.value("kept_bytes", state="Retained") == 16 * GIB
    assert shown.value("kept_bytes", state="Leased") == 8 * GIB
    assert shown.value("kept_blocks") == 12
    assert shown.value("kept_oldest_seconds") == 90
    shown.show(FREE)
    assert shown.value("kept_bytes", state="Retained") == shown.value("kept_oldest_seconds") == 0
    shown.show(UNSEEN)
    assert shown.value("kept_bytes", state="Retained") is None


def test_a_report_counts_once_and_its_loads_as_they_grow() -> None:
    report: dict[str, Any] = {"reported_s": 5.0, "recovered_blocks": 10, "recovered_bytes": 640}
    shown = Shown(FREE)
    for loaded in (0, 3, 3, 4):
        shown.show(pool_of(kept(**report, loaded_blocks=loaded)))
    assert shown.value("recovered_blocks_total") == 10
    assert shown.value("recovered_bytes_total") == 640
    assert shown.value("recovered_blocks_loaded_total") == 4
    shown.show(pool_of(kept(**(report | {"reported_s": 6.0}), loaded_blocks=2)))
    assert shown.value("recovered_blocks_total") == 20
    assert shown.value("recovered_blocks_loaded_total") == 6


def test_a_report_counts_no_more_than_the_region_can_hold() -> None:
    shown = Shown(FREE)
    for reported_s in (5.0, 6.0):
        found = kept(reported_s=reported_s, recovered_blocks=1 << 53, recovered_bytes=1 << 50)
        shown.show(pool_of(found))
    assert shown.value("recovered_bytes_total") == 2 * 8 * GIB
    assert shown.value("recovered_blocks_total") == 2 * 8 * GIB // 64


def test_what_was_reported_before_the_agent_started_is_not_counted_again() -> None:
    report: dict[str, Any] = {"reported_s": 5.0, "recovered_blocks": 10, "refused": ("weights",)}
    shown = Shown(pool_of(kept(**report, loaded_blocks=100)))
    shown.show(pool_of(kept(**report, loaded_blocks=101)))
    assert shown.value("recovered_blocks_total") == 0
    assert shown.value("recovery_refusals_total", field="weights") is None
    assert shown.value("recovered_blocks_loaded_total") == 1


def test_a_report_that_goes_backwards_takes_nothing_back() -> None:
    shown = Shown(FREE)
    for loaded in (9, 1):
        shown.show(pool_of(kept(reported_s=5.0, loaded_blocks=loaded)))
    assert shown.value("recovered_blocks_loaded_total") == 9


def test_refusals_count_by_the_part_of_the_identity() -> None:
    refused = ("model.dtype", "model.hf_config.rope_parameters.rope_type", "weights", "x" * 80)
    shown = Shown(FREE, pool_of(kept(reported_s=5.0, refused=refused)))
    assert shown.value("recovery_refusals_total", field="model") == 1
    assert shown.value("recovery_refusals_total", field="weights") == 1
    assert shown.value("recovery_refusals_total", field="other") == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_field_of_the_matrix_has_a_label_of_its_own(row: Any) -> None:
    assert field_label(row.names) in row.names


@pytest.mark.parametrize("name", ["", "\ufffd", "Weights", "weights\n", "weights2", "." * 80])
def test_names_that_an_engine_made_up_share_one_label(name: str) -> None:
    assert field_label(name) == "other"


def _held(*found: KeptObservation) -> PoolObservation:
    return pool_observation(region(state="Leased", holder="process 7, vllm"), kept=found)


def _damaged() -> PoolObservation:
    return pool_observation(region(state="Damaged"))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (pool_of(kept(gives_way="AgeLimit")), FREE, "AgeLimit"),
        (pool_of(kept(gives_way="Waiters", state="Dirty")), FREE, "Waiters"),
        (RETAINED, _held(), "Claimed"),
        (RETAINED, _held(kept(name="code", state="Leased", is_leased=True)), "Claimed"),
        (RETAINED, _held(kept(since_s=2000.0, state="Leased", is_leased=True)), "Claimed"),
        (RETAINED, pool_observation(region(state="Leased")), "Other"),
        (RETAINED, FREE, "Other"),
        (RETAINED, pool_observation(), "Removed"),
        (RETAINED, _damaged(), "Removed"),
        (LEASED, FREE, "Other"),
    ],
)
def test_what_is_given_up_counts_once_with_its_reason(
    before: PoolObservation, after: PoolObservation, reason: str
) -> None:
    assert Shown(before, after, after).given_up == {reason: 1}
    assert Shown(before, UNSEEN, after).given_up == {reason: 1}


@pytest.mark.parametrize("reason", ["AgeLimit", "Waiters"])
def test_the_reason_outlasts_the_rounds_that_fall_into_the_scrub(reason: str) -> None:
    due, scrubbing = pool_of(kept(gives_way=reason, unheld_s=9.0)), pool_of(kept(state="Dirty"))
    assert Shown(RETAINED, due, scrubbing, scrubbing, FREE).given_up == {reason: 1}
    assert Shown(due, scrubbing, UNSEEN, scrubbing, FREE).given_up == {reason: 1}


@pytest.mark.parametrize(
    ("between", "after", "reason"),
    [
        (LEASED, FREE, "Other"),
        (pool_of(kept(unheld_s=9.0)), FREE, "Other"),
        (pool_of(kept(unheld_s=9.0)), _held(), "Claimed"),
    ],
)
def test_a_reason_that_no_longer_holds_is_forgotten(
    between: PoolObservation, after: PoolObservation, reason: str
) -> None:
    """As the owner came back in time, or the waiter went away."""
    due = pool_of(kept(gives_way="Waiters", unheld_s=9.0))
    assert Shown(due, between, after).given_up == {reason: 1}


@pytest.mark.parametrize("other", [kept(name="code"), kept(since_s=2000.0)])
def test_a_reason_is_not_passed_on_to_other_contents(other: KeptObservation) -> None:
    due = pool_of(kept(gives_way="Waiters", unheld_s=9.0))
    assert Shown(due, pool_of(other), FREE).given_up == {"Waiters": 1, "Other": 1}


@pytest.mark.parametrize(
    "after", [RETAINED, LEASED, UNSEEN, pool_of(kept(gives_way="AgeLimit", unheld_s=9.0))]
)
def test_what_stays_was_not_given_up(after: PoolObservation) -> None:
    assert Shown(RETAINED, after).given_up == {}


def _state() -> AgentState:
    state = AgentState(Metrics())
    state.set_desired(desired_state_of(entry_of()))
    return state


def _see(state: AgentState, pool: PoolObservation, previous: NodeStatus) -> NodeStatus:
    number = state.request(now_s=0).number
    answer = ReconcileResult(number, observation_of(pool), (result_of(entry_of()),), busy=False)
    state.take(decode(encode(answer)), now_s=0, wall_s=5000.5)
    status = state.status(previous, wall_s=5000.5)
    assert status is not None
    return status


def _region(status: NodeStatus) -> RegionStatus:
    ((found,),) = (pool.regions for pool in status.pools)
    return found


def test_the_status_names_what_is_kept_and_no_values() -> None:
    state = _state()
    found = kept(reported_s=1234.5, recovered_blocks=10, refused=("weights", "model.dtype"))
    status = _see(state, pool_of(found), NodeStatus())

    assert _region(status).to_json()["kept"] == {
        "name": "chat",
        "since": "1970-01-01T00:16:40Z",
        "reportedAt": "1970-01-01T00:20:34Z",
        "recoveredBlocks": 10,
        "refused": ["model.dtype", "weights"],
    }
    assert status.summary == "kv 8 GiB HugeTLB2Mi ready, 8 GiB of it kept"
    assert NodeStatus.from_json(status.to_json()) == status
    # What moves in every round is for metrics.
    again = _see(
        state, pool_of(replace(found, unheld_s=5.0, kept_blocks=9, loaded_blocks=2)), status
    )
    assert again == status


def test_times_and_names_of_a_hostile_engine_are_bounded() -> None:
    refused = tuple(f"f{number}\x1b" + "x" * 99 for number in range(99))
    for since_s in (2.0**40, -1.0, 0.0):
        found = kept(since_s=since_s, reported_s=2.0**39, refused=refused)
        document = _region(_see(_state(), pool_of(found), NodeStatus())).to_json()["kept"]
        assert "since" not in document
        assert "reportedAt" not in document
        assert len(document["refused"]) == 16
        assert all(name.isprintable() and len(name) <= 80 for name in document["refused"])


def test_what_was_given_up_is_known_to_the_next_agent() -> None:
    state = _state()
    before = _see(state, pool_of(kept(gives_way="AgeLimit")), NodeStatus())
    status = _see(state, FREE, before)
    assert _region(status).kept is None
    assert _region(status).given_up == GivenUp(name="chat", at_s=5000.0, reason="AgeLimit")

    assert _region(_see(_state(), FREE, status)).given_up == _region(status).given_up


def test_a_round_that_saw_nothing_changes_nothing_of_what_is_kept() -> None:
    state = _state()
    status = _see(state, pool_of(kept(gives_way="AgeLimit")), NodeStatus())
    refused = pool_of(kept(name="code", reported_s=7.0, refused=("weights",)))
    status = _see(state, refused, status)
    assert _region(status).kept is not None
    assert _region(status).given_up is not None

    unseen = _see(_state(), UNSEEN, status)
    assert (unseen.pools[0].reason, unseen.pools[0].ready_bytes) == ("CannotLook", 0)
    assert _region(unseen) == _region(status)
    assert _region(_see(_state(), refused, unseen)) == _region(status)
    assert _see(_state(), UNSEEN, NodeStatus()).pools[0].regions == ()


def test_pools_that_went_show_nothing() -> None:
    metrics = Metrics()
    state = AgentState(metrics)
    state.set_desired(desired_state_of(entry_of()))
    _see(state, RETAINED, NodeStatus())
    state.set_desired(DesiredState())
    state.take(ReconcileResult(9, observation_of(), (), busy=False), now_s=0, wall_s=0)
    assert "hostprep_kept_bytes{" not in metrics.text().decode()
