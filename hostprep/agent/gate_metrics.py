"""The metrics of registering: gates by state, time to open, bytes, chunk times, degradations."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hostprep.agent.gates import UNKNOWN
from hostprep.agent.messages import GateLook, Look, PoolLook
from hostprep.cuda.board_layout import CLOSED, DEGRADED, OPEN

__all__ = ["GateMetrics"]

_STATES = (CLOSED, OPEN, DEGRADED, UNKNOWN)
_OPEN_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 900)


class GateMetrics:
    """Gauges mirror the last look; what was decided counts once for each run of an engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gates = Gauge(
            "hostprep_gates", "Gates of engines by state.", ("pool", "state"), registry=registry
        )
        self._registered = Gauge(
            "hostprep_registered_bytes",
            "Registered with CUDA by ranks that live.",
            ("pool",),
            registry=registry,
        )
        self._longest = Gauge(
            "hostprep_register_longest_chunk_seconds",
            "Longest call of the engines that run.",
            ("pool",),
            registry=registry,
        )
        self._open = Histogram(
            "hostprep_gate_open_seconds",
            "From a first rank's joining to the opening of the gate.",
            ("pool",),
            buckets=_OPEN_BUCKETS_S,
            registry=registry,
        )
        self._degraded = Counter(
            "hostprep_gates_degraded",
            "Runs of engines whose gate will never open.",
            ("pool",),
            registry=registry,
        )
        self._decided: dict[str, dict[str, str]] = {}
        """The last run whose gate was decided, by pool and region."""

    def show(self, look: Look) -> None:
        """Show the gates of a look, and count those decided since the one before."""
        for metric in (self._gates, self._registered, self._longest):
            metric.clear()
        there = {pool.name for pool in look.pools}
        self._decided = {name: runs for name, runs in self._decided.items() if name in there}
        for pool in look.pools:
            if not pool.failure:
                self._show_pool(pool)
                self._count(pool)

    def _show_pool(self, pool: PoolLook) -> None:
        gates = [gate for gate in pool.gates if gate.is_running]
        for state in _STATES:
            count = sum(gate.state == state for gate in gates)
            self._gates.labels(pool.name, state).set(count)
        self._registered.labels(pool.name).set(sum(gate.registered_bytes for gate in gates))
        longest_s = max((gate.longest_chunk_s for gate in gates), default=0.0)
        self._longest.labels(pool.name).set(longest_s)

    def _count(self, pool: PoolLook) -> None:
        # What was there at the first look may have been counted by the agent of before: to a
        # query a restarted counter begins at 0, and it would seem to have happened again.
        is_first = pool.name not in self._decided
        decided = self._decided.setdefault(pool.name, {})
        # Made at once: an increase from nothing to 1 is none to Prometheus.
        degraded, opened = self._degraded.labels(pool.name), self._open.labels(pool.name)
        for gate in pool.gates:
            if not _is_decided(gate) or decided.get(gate.region) == gate.run:
                continue
            decided[gate.region] = gate.run
            if is_first:
                continue
            if gate.open_after_s is None:
                degraded.inc()
            else:
                opened.observe(gate.open_after_s)


def _is_decided(gate: GateLook) -> bool:
    # All ranks may be ready a moment before the engine's gate says so, and when.
    return gate.state == DEGRADED or gate.open_after_s is not None
