"""The operator's metrics: docs/metrics.md lists them."""

from __future__ import annotations

import contextlib
import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest

import hostprep
from hostprep_operator.reconcile.changes import Cause, NodeState
from hostprep_operator.records import POOL_COUNTS

_AGED_STATES = (
    *("preparing", "blocked", "degraded", "failed", "leaving", "releasing", "unavailable"),
)
_RECONCILE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_READY_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900)

# No query of ours reads a counter's birth, and it doubles the counters.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Every metric of one operator, in a registry of its own."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        registry = self.registry = CollectorRegistry()
        self._wall_clock = wall_clock
        self._node_states: dict[str, tuple[str, float | None]] = {}
        """Node to its state, and since when it is closed."""

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hostprep_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hostprep_operator_{name}", text, labels, registry=registry)

        info = gauge("build_info", "Always 1; the version is the label.", "version", "component")
        info.labels(hostprep.__version__, "operator").set(1)
        self._pool_nodes = gauge(
            "operator_pool_nodes", "Nodes of a pool, by where they stand.", "pool", "state"
        )
        self._pool_since_s: dict[str, Mapping[str, float]] = {}
        self._pool_oldest = gauge(
            "operator_pool_oldest_seconds",
            "For how long the node that is longest in a state has been in it; 0 where none is.",
            "pool",
            "state",
        )
        self._pool_paused = gauge(
            "operator_pool_paused", "1 while spec.rollout.paused holds the pool, else 0.", "pool"
        )
        self._nodes = gauge(
            "operator_nodes",
            "Nodes with a required pool, by their HostMemoryReady condition; waiting: those whose "
            "pools all wait for their first turn; releasing: those that no required pool asks for "
            "any more, with memory left.",
            "state",
        )
        oldest = gauge(
            "operator_oldest_closed_seconds",
            "For how long the longest closed node has been closed; 0 when none is.",
        )
        oldest.set_function(self._oldest_closed_s)
        self.queue_depth = gauge("operator_queue_depth", "Keys that wait for a worker.")
        self.leader = gauge("operator_leader", "1 while this replica does the work, else 0.")
        self.last_sync = gauge(
            "operator_last_sync_timestamp_seconds",
            "When every watch had last heard a list or a bookmark.",
        )
        self.openings = counter("openings", "Nodes opened: memory is ready.")
        self.closings = counter("closings", "Nodes closed, by cause.", "cause")
        for cause in get_args(Cause):
            self.closings.labels(cause)  # there from the start: increase() misses a series' birth
        self.deadlines = counter(
            "deadlines_exceeded", "Nodes that were not ready within readiness.deadlineSeconds."
        )
        self.reboots = counter(
            "reboots_detected",
            "Nodes seen with another boot ID than the one they were opened for.",
        )
        self.node_ready = Histogram(
            "hostprep_operator_node_ready_seconds",
            "From joining, or from the reboot seen, to opening.",
            buckets=_READY_S,
            registry=registry,
        )
        self._writes = counter(
            "writes", "Writes to the API server, by kind of object and result.", "kind", "result"
        )
        self.reconcile = Histogram(
            "hostprep_operator_reconcile_duration_seconds",
            "One reconcile of a node or a pool, writes included.",
            ["kind"],
            buckets=_RECONCILE_S,
            registry=registry,
        )
        self.errors = counter(
            "reconcile_errors", "Reconciles that failed and are tried again.", "kind", "reason"
        )

    def wrote(self, kind: str, result: str) -> None:
        """Count a write to the API server."""
        self._writes.labels(kind, result).inc()

    def show_pool(
        self, pool: str, counts: Mapping[str, int], since_s: Mapping[str, float], *, paused: bool
    ) -> None:
        """Show where a pool's nodes stand, and since when the longest there does."""
        for state in POOL_COUNTS:
            self._pool_nodes.labels(pool, state).set(counts.get(state, 0))
        self._pool_since_s[pool] = since_s
        self._pool_paused.labels(pool).set(float(paused))

    def drop_pool(self, pool: str) -> None:
        """Drop the series of a pool that is gone, and of which no node has anything left."""
        self._pool_since_s.pop(pool, None)
        series = [(self._pool_nodes, (pool, state)) for state in POOL_COUNTS]
        series += [(self._pool_oldest, (pool, state)) for state in _AGED_STATES]
        for metric, labels in (*series, (self._pool_paused, (pool,))):
            with contextlib.suppress(KeyError):  # older libraries raise for one that is not there
                metric.remove(*labels)

    def node_state(self, node: str, state: str | None, closed_since_s: float | None) -> None:
        """Remember where a node stands (a NodeState); None when not managed."""
        if state is None:
            self._node_states.pop(node, None)
        else:
            self._node_states[node] = (state, closed_since_s)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        counts = Counts(state for state, _ in self._node_states.values())
        for state in get_args(NodeState):
            self._nodes.labels(state).set(counts[state])
        now_s = self._wall_clock()
        for pool, since_s in self._pool_since_s.items():
            for state in _AGED_STATES:
                age_s = max(0.0, now_s - since_s.get(state, now_s))
                self._pool_oldest.labels(pool, state).set(age_s)
        return generate_latest(self.registry)

    def _oldest_closed_s(self) -> float:
        now_s = self._wall_clock()
        closed = (since_s for _, since_s in self._node_states.values() if since_s is not None)
        return max(0.0, now_s - min(closed, default=now_s))
