"""The operator's metrics: names and labels of docs/control-plane.md, base units."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest

import hostprep

POOL_STATES = (
    "selected",
    "ready",
    "preparing",
    "degraded",
    "failed",
    "releasing",
    "unavailable",
)
disable_created_metrics()  # type: ignore[no-untyped-call]
# No query of ours reads a counter's birth, and it doubles the counters.

NODE_STATES = ("ready", "closed", "unknown")
CLOSING_CAUSES = ("join", "reboot", "repair", "resize")
_RECONCILE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_READY_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900)


class Metrics:
    """Every metric of one operator, in a registry of its own."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._wall_clock = wall_clock
        self._node_states: dict[str, str] = {}
        self._closed_since_s: dict[str, float] = {}
        self._pools: set[str] = set()
        self._make_gauges()
        self._make_counters()

    def _make_gauges(self) -> None:
        registry = self.registry
        info = Gauge(
            "hostprep_build_info",
            "Always 1; the version is the label.",
            ["version", "component"],
            registry=registry,
        )
        info.labels(hostprep.__version__, "operator").set(1)
        self._pool_nodes = Gauge(
            "hostprep_operator_pool_nodes",
            "Nodes of a pool, by where they stand.",
            ["pool", "state"],
            registry=registry,
        )
        self._nodes = Gauge(
            "hostprep_operator_nodes",
            "Nodes with a required pool, by their HostMemoryReady condition.",
            ["state"],
            registry=registry,
        )
        for state in NODE_STATES:
            self._nodes.labels(state).set(0)
        oldest = Gauge(
            "hostprep_operator_oldest_closed_seconds",
            "For how long the longest closed node has been closed; 0 when none is.",
            registry=registry,
        )
        oldest.set_function(self._oldest_closed_s)
        self.queue_depth = Gauge(
            "hostprep_operator_queue_depth", "Keys that wait for a worker.", registry=registry
        )
        self.leader = Gauge(
            "hostprep_operator_leader",
            "1 while this replica does the work, else 0.",
            registry=registry,
        )
        self.last_sync = Gauge(
            "hostprep_operator_last_sync_timestamp_seconds",
            "When everything was last compared with the API server.",
            registry=registry,
        )

    def _make_counters(self) -> None:
        registry = self.registry
        self.openings = Counter(
            "hostprep_operator_openings", "Nodes opened: memory is ready.", registry=registry
        )
        self.closings = Counter(
            "hostprep_operator_closings", "Nodes closed, by cause.", ["cause"], registry=registry
        )
        for cause in CLOSING_CAUSES:
            self.closings.labels(cause)  # there from the start: increase() misses a series' birth
        self.deadlines = Counter(
            "hostprep_operator_deadlines_exceeded",
            "Nodes that were not ready within readiness.deadlineSeconds.",
            registry=registry,
        )
        self.reboots = Counter(
            "hostprep_operator_reboots_detected",
            "Nodes seen with another boot ID than the one they were opened for.",
            registry=registry,
        )
        self.node_ready = Histogram(
            "hostprep_operator_node_ready_seconds",
            "From joining, or from the reboot seen, to opening.",
            buckets=_READY_S,
            registry=registry,
        )
        self._writes = Counter(
            "hostprep_operator_writes",
            "Writes to the API server, by kind of object and result.",
            ["kind", "result"],
            registry=registry,
        )
        self.reconcile = Histogram(
            "hostprep_operator_reconcile_duration_seconds",
            "One look at a node or a pool, writes included.",
            ["kind"],
            buckets=_RECONCILE_S,
            registry=registry,
        )
        self._errors = Counter(
            "hostprep_operator_reconcile_errors",
            "Looks that failed and come again, by reason.",
            ["kind", "reason"],
            registry=registry,
        )

    def wrote(self, kind: str, result: str) -> None:
        """Count a write to the API server."""
        self._writes.labels(kind, result).inc()

    def failed(self, kind: str, reason: str) -> None:
        """Count a reconcile that failed."""
        self._errors.labels(kind, reason).inc()

    def pool_counts(self, pool: str, counts: Mapping[str, int]) -> None:
        """Show where a pool's nodes stand."""
        self._pools.add(pool)
        for state in POOL_STATES:
            self._pool_nodes.labels(pool, state).set(counts.get(state, 0))

    def drop_pool(self, pool: str) -> None:
        """Drop the series of a pool that is gone."""
        if pool in self._pools:
            self._pools.discard(pool)
            for state in POOL_STATES:
                self._pool_nodes.remove(pool, state)

    def node_state(self, node: str, state: str | None, closed_since_s: float | None) -> None:
        """Remember where a node stands (`ready`, `closed`, `unknown`); None when not managed."""
        if state is None:
            self._node_states.pop(node, None)
        else:
            self._node_states[node] = state
        if closed_since_s is None:
            self._closed_since_s.pop(node, None)
        else:
            self._closed_since_s[node] = closed_since_s

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        counts = Counts(self._node_states.values())
        for state in NODE_STATES:
            self._nodes.labels(state).set(counts[state])
        return generate_latest(self.registry)

    def _oldest_closed_s(self) -> float:
        oldest = min(self._closed_since_s.values(), default=None)
        return 0.0 if oldest is None else max(0.0, self._wall_clock() - oldest)
