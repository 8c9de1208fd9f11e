"""The agent's metrics, in a registry of their own; docs/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import hostprep
from hostprep.agent.kept import KeptMetrics, Key
from hostprep.agent.messages import GateObservation, Observation, PoolObservation
from hostprep.agent.verification import GATE_UNKNOWN
from hostprep.api.node_resource import GivenUp, NodeStatus, Phase
from hostprep.cuda.board_layout import CLOSED, DEGRADED, OPEN
from hostprep.deviceplugin.devices import HEALTHY, UNHEALTHY
from hostprep.units import format_quantity

_LONG_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 900)
_WAIT_BUCKETS_S = (0.01, *_LONG_BUCKETS_S, 3600)
_VERIFY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
_GATE_STATES = (CLOSED, OPEN, DEGRADED, GATE_UNKNOWN)


class Registry(CollectorRegistry):
    """Makes the metrics that it holds."""

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Return a new gauge, without `hostprep_` in its name."""
        return Gauge(f"hostprep_{name}", text, labels, registry=self)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Return a new counter, likewise."""
        return Counter(f"hostprep_{name}", text, labels, registry=self)

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        """Return a new histogram, likewise."""
        return Histogram(f"hostprep_{name}", text, labels, buckets=buckets, registry=self)


class Metrics:
    """Everything that a scrape shows. Gauges mirror the last status and observation."""

    def __init__(self) -> None:
        registry = self._registry = Registry()
        gauge, counter = registry.gauge, registry.counter
        build = gauge("build_info", "Version of this program.", "version", "component")
        build.labels(hostprep.__version__, "agent").set(1)
        self._wanted = gauge("pool_wanted_bytes", "Asked for on this node.", "pool")
        self._ready = gauge("pool_ready_bytes", "Sound and published.", "pool")
        self._phase = gauge("pool_phase", "1 for the current phase.", "pool", "phase")
        self._phase_since = gauge(
            "pool_phase_since_timestamp_seconds", "When the current phase was entered.", "pool"
        )
        self._entered: dict[str, tuple[Phase, float]] = {}
        """Pool to its phase, and when this agent first saw it there."""
        self._region = gauge("region_bytes", "Size by state.", "pool", "backing", "state", "numa")
        self._leased = gauge("regions_leased", "Regions that engines hold.", "pool", "numa")
        self.device_plugin_registered = gauge(
            "device_plugin_registered", "1 while kubelet hands the pool's regions out.", "pool"
        )
        self._devices = gauge("devices", "Regions as kubelet knows them.", "pool", "health")
        self._pages = gauge("huge_pages", "Pages on the node, and ours.", "page_size", "kind")
        self._verified = gauge(
            "verify_last_timestamp_seconds", "End of the last verification round."
        )
        self.connected = gauge("api_connected", "1 while the API server answers.")
        self._prepare = registry.histogram(
            "prepare_duration_seconds",
            "From the begin of a preparation that changed something to its end.",
            "pool",
            buckets=_LONG_BUCKETS_S,
        )
        self._verify = registry.histogram(
            "verify_duration_seconds",
            "Time that a verification round takes.",
            buckets=_VERIFY_BUCKETS_S,
        )
        self._failures = counter("prepare_failures", "Preparations that failed.", "pool", "reason")
        self._populated = counter("populated_bytes", "Made resident.", "pool", "backing")
        self._problems = counter(
            "verify_problems", "Promises that were found broken.", "pool", "reason"
        )
        self.writes = counter("status_writes", "Status reports by result.", "result")
        for result in ("written", "unchanged", "failed"):
            self.writes.labels(result)
        self.worker_restarts = counter("worker_restarts", "Workers that ended unasked.")
        self._gates = GateMetrics(registry)
        self._kept = KeptMetrics(registry)
        self._waits = WaitMetrics(registry)

    def show_status(self, status: NodeStatus, *, now_s: float) -> None:
        """Show the present pools, and no others. `now_s`: seconds since the epoch."""
        gauges = (self._wanted, self._ready, self._phase, self._region, self._leased)
        for metric in (*gauges, self._phase_since):
            metric.clear()
        before, self._entered = self._entered, {}
        for pool in status.pools:
            phase, since_s = before.get(pool.name, (None, now_s))
            since_s = since_s if phase is pool.phase else now_s
            self._entered[pool.name] = (pool.phase, since_s)
            self._phase_since.labels(pool.name).set(since_s)
            self._wanted.labels(pool.name).set(pool.wanted_bytes)
            self._ready.labels(pool.name).set(pool.ready_bytes)
            for phase in Phase:
                self._phase.labels(pool.name, phase.value).set(phase is pool.phase)
            for region in pool.regions:
                numa = _numa(region.placement)
                labels = (pool.name, region.backing, region.state, numa)
                self._region.labels(*labels).inc(region.size_bytes)
                self._leased.labels(pool.name, numa).inc(region.state == "Leased")

    def show_devices(self, pools: Mapping[str, Iterable[str]]) -> None:
        """Show how many devices of each health kubelet has been sent, by pool."""
        self._devices.clear()
        for pool, healths in pools.items():
            for health in (HEALTHY, UNHEALTHY):
                self._devices.labels(pool, health).set(0)
            for health in healths:
                self._devices.labels(pool, health).inc()

    def show_observation(
        self,
        observation: Observation,
        before: Observation | None,
        *,
        given_up: Mapping[Key, GivenUp],
        now_s: float,
    ) -> None:
        """Show a verification round; count the problems that the one before did not have.

        `given_up`: what was kept then, and is kept no longer.
        """
        self._verify.observe(observation.took_s)
        self._verified.set(now_s)
        self._gates.show(observation)
        self._kept.show(observation, given_up)
        self._waits.show(observation)
        for size in observation.huge_pages:
            label = format_quantity(size.page_bytes)  # as in `hugepages-2Mi`
            self._pages.labels(label, "total").set(size.total)
            self._pages.labels(label, "held").set(size.held)
        for pool in observation.pools:
            known = _problems(before.pool(pool.name) if before else None)
            for _region, reason in _problems(pool) - known:
                self._problems.labels(pool.name, reason).inc()

    def count_prepared(
        self, pool: str, took_s: float | None, populated: Iterable[tuple[str, int]]
    ) -> None:
        """Count a preparation; `took_s` is None where it did not finish."""
        if took_s is not None:
            self._prepare.labels(pool).observe(took_s)
        for backing, size_bytes in populated:
            self._populated.labels(pool, backing).inc(size_bytes)

    def count_failure(self, pool: str, reason: str) -> None:
        """Count a preparation that failed, or a pool that cannot be had."""
        self._failures.labels(pool, reason).inc()

    def text(self) -> bytes:
        """Return all of it in the exposition format."""
        return generate_latest(self._registry)


def _problems(pool: PoolObservation | None) -> set[tuple[str, str]]:
    regions = pool.regions if pool else ()
    return {(region.name, region.problem) for region in regions if region.problem}


def _numa(placement: str) -> str:
    """Return the NUMA node of a placement such as `node:1`; one that spans all stays a word."""
    return placement.removeprefix("node:")


class WaitMetrics:
    """Claims that wait, and how long those waited that got a lease; each lease counts once."""

    def __init__(self, registry: Registry) -> None:
        self._waiters = registry.gauge(
            "lease_waiters", "Claims that wait for a lease, as of the last round.", "pool"
        )
        self._waited = registry.histogram(
            "lease_wait_seconds",
            "From asking for regions to holding their locks, in ms as the engine noted it. Leases"
            " shorter than a verification round may be missed.",
            "pool",
            buckets=_WAIT_BUCKETS_S,
        )
        self._counted: dict[str, frozenset[str] | None] | None = None
        """Leases as last observed, by pool (None: never yet); None before the first round."""

    def show(self, observation: Observation) -> None:
        """Show an observation; count the leases that the one before did not have."""
        self._waiters.clear()
        # What the first observation finds, the agent's predecessor counted, as with gates.
        before, self._counted = self._counted, {}
        for pool in observation.pools:
            known = None if before is None else before.get(pool.name, frozenset())
            if pool.failure:
                self._counted[pool.name] = known
                continue
            waited = self._waited.labels(pool.name)
            self._counted[pool.name] = frozenset(one.lease_id for one in pool.waits)
            if pool.waiters is not None:
                self._waiters.labels(pool.name).set(pool.waiters)
            for one in pool.waits:
                if known is not None and one.lease_id not in known:
                    waited.observe(one.waited_s)


class GateMetrics:
    """Gates of engines: gauges mirror the last observation; a decision counts once for each run."""

    def __init__(self, registry: Registry) -> None:
        self._gates = registry.gauge("gates", "Gates of engines by state.", "pool", "state")
        self._registered = registry.gauge(
            "registered_bytes", "Registered with CUDA by ranks that live.", "pool"
        )
        self._longest = registry.gauge(
            "register_longest_chunk_seconds", "Longest call of the engines that run.", "pool"
        )
        self._open = registry.histogram(
            "gate_open_seconds",
            "From a first rank's joining to the opening of the gate.",
            "pool",
            buckets=_LONG_BUCKETS_S,
        )
        self._degraded = registry.counter(
            "gates_degraded", "Runs of engines whose gate will never open.", "pool"
        )
        self._decided: dict[str, dict[str, str]] = {}
        """The last run whose gate was decided, by pool and region."""

    def show(self, observation: Observation) -> None:
        """Show the gates of an observation; count those decided since the one before."""
        for metric in (self._gates, self._registered, self._longest):
            metric.clear()
        present = {pool.name for pool in observation.pools}
        self._decided = {name: runs for name, runs in self._decided.items() if name in present}
        for pool in observation.pools:
            if not pool.failure:
                self._show_pool(pool)
                self._count(pool)

    def _show_pool(self, pool: PoolObservation) -> None:
        gates = [gate for gate in pool.gates if gate.is_running]
        for state in _GATE_STATES:
            count = sum(gate.state == state for gate in gates)
            self._gates.labels(pool.name, state).set(count)
        self._registered.labels(pool.name).set(sum(gate.registered_bytes for gate in gates))
        longest_s = max((gate.longest_chunk_s for gate in gates), default=0.0)
        self._longest.labels(pool.name).set(longest_s)

    def _count(self, pool: PoolObservation) -> None:
        # The agent's predecessor may have counted what the first observation finds: a restarted
        # counter begins at 0, and to a query it would seem to have happened again.
        is_first = pool.name not in self._decided
        decided = self._decided.setdefault(pool.name, {})
        # Created at once: Prometheus sees no increase from no series to 1.
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


def _is_decided(gate: GateObservation) -> bool:
    # All ranks may be ready a moment before the engine's gate says so.
    return gate.state == DEGRADED or gate.open_after_s is not None
