"""The agent's metrics of engines' gates: each run counts once, whatever a look shows of it."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep.agent.messages import (
    GateObservation,
    PoolObservation,
    ReconcileResult,
    decode,
    encode,
)
from hostprep.agent.metrics import GateMetrics, Registry
from tests.support.agent_values import observation_of, pool_observation, region

pytestmark = pytest.mark.unit

EMPTY = pool_observation(region())


def a_gate(state: str, **changes: Any) -> GateObservation:
    if state == "Open":
        changes = {"open_after_s": 2.0, **changes}
    return GateObservation(**{"region": "node0-0", "state": state, "run": "aa", **changes})


def pool_of(*gates: GateObservation, name: str = "kv") -> PoolObservation:
    return pool_observation(region(), name=name, gates=gates)


class Shown:
    """Metrics that were shown these looks, the first of them as the agent started."""

    def __init__(self, *pools: PoolObservation) -> None:
        self._registry = Registry()
        self._metrics = GateMetrics(self._registry)
        for pool in pools:
            self.show(pool)

    def show(self, *pools: PoolObservation) -> None:
        self._metrics.show(observation_of(*pools))

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"hostprep_{name}", {"pool": "kv", **labels})

    @property
    def degraded(self) -> float | None:
        return self.value("gates_degraded_total")

    @property
    def opened(self) -> float | None:
        return self.value("gate_open_seconds_count")


def test_a_pool_without_engines_has_all_series_at_zero() -> None:
    shown = Shown(EMPTY)
    states = [
        shown.value("gates", state=state) for state in ("Closed", "Open", "Degraded", "Unknown")
    ]
    assert states == [0, 0, 0, 0]
    assert shown.degraded == shown.opened == shown.value("registered_bytes") == 0
    assert shown.value("register_longest_chunk_seconds") == 0


def test_gauges_add_up_the_engines_that_run() -> None:
    shown = Shown(
        EMPTY,
        pool_of(
            a_gate("Closed", registered_bytes=3, longest_chunk_s=0.05),
            a_gate("Open", region="node0-1", run="bb", registered_bytes=4, longest_chunk_s=0.2),
            a_gate("Unknown", region="node1-0", run=""),
            a_gate("Degraded", region="node1-1", run="cc", is_running=False, longest_chunk_s=9.0),
        ),
    )
    assert shown.value("gates", state="Closed") == 1
    assert shown.value("gates", state="Open") == 1
    assert shown.value("gates", state="Unknown") == 1
    assert shown.value("gates", state="Degraded") == 0, "that run is over"
    assert shown.value("registered_bytes") == 7
    assert shown.value("register_longest_chunk_seconds") == 0.2
    shown.show(EMPTY)
    assert shown.value("registered_bytes") == shown.value("gates", state="Open") == 0


def test_a_degraded_run_counts_once_however_often_it_is_seen() -> None:
    degraded = pool_of(a_gate("Degraded"))
    shown = Shown(EMPTY, pool_of(a_gate("Closed")), degraded, degraded, EMPTY, degraded)
    shown.show(pool_of(a_gate("Degraded", is_running=False)))
    assert shown.degraded == 1
    shown.show(pool_of(a_gate("Degraded", run="bb")))
    assert shown.degraded == 2
    assert shown.opened == 0


def test_a_run_that_came_and_went_between_two_looks_counts() -> None:
    assert Shown(EMPTY, pool_of(a_gate("Degraded", is_running=False))).degraded == 1


def test_a_gate_that_opened_is_timed_once_and_its_end_is_no_degradation() -> None:
    opened = pool_of(a_gate("Open", open_after_s=40.0))
    shown = Shown(EMPTY, opened, opened)
    shown.show(pool_of(a_gate("Open", open_after_s=40.0, is_running=False)))
    assert shown.opened == 1
    assert shown.value("gate_open_seconds_sum") == 40
    assert shown.value("gate_open_seconds_bucket", le="30.0") == 0
    assert shown.value("gate_open_seconds_bucket", le="60.0") == 1
    assert shown.degraded == 0


def test_ranks_that_are_ready_before_the_gate_says_so_are_timed_by_what_it_says() -> None:
    shown = Shown(EMPTY, pool_of(a_gate("Open", open_after_s=None)), pool_of(a_gate("Open")))
    assert (shown.opened, shown.value("gate_open_seconds_sum")) == (1, 2)


def test_what_was_decided_before_the_agent_started_is_not_counted_again() -> None:
    degraded = pool_of(a_gate("Degraded"))
    shown = Shown(degraded, degraded)
    assert shown.degraded == 0
    assert shown.value("gates", state="Degraded") == 1
    shown.show(pool_of(a_gate("Degraded", run="bb")))
    assert shown.degraded == 1


def test_a_gate_that_was_closed_when_the_agent_started_counts_once_decided() -> None:
    assert Shown(pool_of(a_gate("Closed")), pool_of(a_gate("Degraded"))).degraded == 1


def test_a_pool_that_cannot_be_looked_at_for_a_while_is_not_counted_again() -> None:
    degraded = pool_of(a_gate("Degraded"))
    unseen = PoolObservation(name="kv", generation=0, published=False, regions=(), failure="no")
    shown = Shown(EMPTY, degraded, unseen)
    assert shown.value("gates", state="Degraded") is None
    shown.show(degraded)
    assert (shown.degraded, shown.value("gates", state="Degraded")) == (1, 1)


def test_pools_count_by_themselves_and_those_that_went_show_no_gates() -> None:
    shown = Shown()
    shown.show(EMPTY, pool_of(name="batch"))
    shown.show(pool_of(a_gate("Degraded")), pool_of(a_gate("Degraded"), name="batch"))
    shown.show(pool_of(a_gate("Degraded"), name="batch"))
    assert shown.value("gates", state="Degraded") is None
    assert shown.value("gates_degraded_total", pool="batch") == 1


@pytest.mark.parametrize("open_after_s", [None, 2.5])
def test_gates_survive_the_pipe(open_after_s: float | None) -> None:
    gate = a_gate("Open", open_after_s=open_after_s, registered_bytes=5, longest_chunk_s=0.25)
    message = ReconcileResult(1, observation_of(pool_of(gate)), (), busy=False)
    assert decode(encode(message)) == message
