"""The agent's metrics of waiting for leases: each lease counts once, whatever a round shows."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep.agent.messages import LeaseWait, PoolObservation, ReconcileResult, decode, encode
from hostprep.agent.metrics import Metrics, Registry, WaitMetrics
from hostprep.api.node_resource import NodeStatus, Phase, PoolStatus, RegionStatus
from tests.support.agent_values import observation_of, pool_observation, region

pytestmark = pytest.mark.unit

FIRST, SECOND = LeaseWait("aa", 2.0), LeaseWait("bb", 40.0)


def a_pool(*waits: LeaseWait, **changes: Any) -> PoolObservation:
    return pool_observation(region(), waits=waits, **{"waiters": 0, **changes})


class Shown:
    """Metrics that were shown these rounds, the first of them as the agent started."""

    def __init__(self, *rounds: PoolObservation | None) -> None:
        self._registry = Registry()
        metrics = WaitMetrics(self._registry)
        for pool in rounds:
            metrics.show(observation_of(*([pool] if pool else [])))

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"hostprep_{name}", {"pool": "kv", **labels})

    @property
    def counted(self) -> tuple[float | None, float | None]:
        return self.value("lease_wait_seconds_count"), self.value("lease_wait_seconds_sum")


def test_a_pool_that_nobody_waits_for_has_its_series_at_zero() -> None:
    shown = Shown(a_pool())
    assert shown.value("lease_waiters") == 0
    assert shown.counted == (0, 0)


def test_the_waiters_are_those_of_the_last_round() -> None:
    assert Shown(a_pool(waiters=3), a_pool(waiters=2)).value("lease_waiters") == 2


def test_where_the_queue_cannot_be_seen_no_number_is_claimed() -> None:
    assert Shown(a_pool(waiters=3), a_pool(waiters=None)).value("lease_waiters") is None


def test_a_lease_counts_once_however_often_it_is_seen() -> None:
    shown = Shown(a_pool(), a_pool(FIRST), a_pool(FIRST), a_pool(FIRST, SECOND))
    assert shown.counted == (2, 42)
    assert shown.value("lease_wait_seconds_bucket", le="3.0") == 1


def test_leases_from_before_the_agents_start_are_not_counted_again() -> None:
    assert Shown(a_pool(FIRST), a_pool(FIRST, SECOND)).counted == (1, 40)


def test_the_first_lease_of_a_pool_that_was_just_made_counts() -> None:
    assert Shown(None, a_pool(FIRST)).counted == (1, 2)


def test_a_round_in_which_the_pool_cannot_be_seen_counts_nothing_twice() -> None:
    blind = pool_observation(failure="cannot be looked at")
    assert Shown(a_pool(), a_pool(FIRST), blind, a_pool(FIRST, SECOND)).counted == (2, 42)


def test_what_a_pool_holds_that_could_not_be_seen_at_first_is_from_before() -> None:
    blind = pool_observation(failure="cannot be looked at")
    assert Shown(blind, blind, a_pool(FIRST), a_pool(FIRST, SECOND)).counted == (1, 40)


def test_waits_go_from_worker_to_agent() -> None:
    sent = ReconcileResult(1, observation_of(a_pool(FIRST, waiters=4)), (), busy=False)
    assert decode(encode(sent)) == sent


def test_region_gauges_tell_numa_nodes_apart() -> None:
    def one(name: str, placement: str, state: str) -> RegionStatus:
        return RegionStatus(
            name=name, size_bytes=8, backing="HugeTLB2Mi", placement=placement, state=state
        )

    regions = (
        one("node0-0", "node:0", "Leased"),
        one("node0-1", "node:0", "Free"),
        one("node1-0", "node:1", "Free"),
        one("interleave-0", "interleave", "Leased"),
    )
    pool = PoolStatus(name="kv", phase=Phase.READY, regions_leased=2, regions=regions)
    metrics = Metrics()
    metrics.show_status(NodeStatus(pools=(pool,)), now_s=1.0)

    shown = metrics.text().decode()

    for numa, leased in (("0", 1), ("1", 0), ("interleave", 1)):
        assert f'hostprep_regions_leased{{numa="{numa}",pool="kv"}} {leased}.0' in shown
    assert 'numa="1",pool="kv",state="Free"} 8.0' in shown
