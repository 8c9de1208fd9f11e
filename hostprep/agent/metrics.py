"""The agent's metrics, in a registry of their own; docs/agent.md lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import hostprep
from hostprep.agent.gate_metrics import GateMetrics
from hostprep.agent.messages import Look, PoolLook
from hostprep.api.node_resource import NodeStatus, Phase
from hostprep.backing import GIB, MIB
from hostprep.deviceplugin.devices import HEALTHY, UNHEALTHY

__all__ = ["Metrics"]

_PREPARE_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 900)
_VERIFY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
_HEALTHS = (HEALTHY, UNHEALTHY)
_WRITE_RESULTS = ("written", "unchanged", "failed")


class Metrics:
    """Everything that a scrape shows. Gauges mirror the last status and the last look."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hostprep_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hostprep_{name}", text, labels, registry=registry)

        build = gauge("build_info", "Version of this program.", "version", "component")
        build.labels(hostprep.__version__, "agent").set(1)
        self._wanted = gauge("pool_wanted_bytes", "Asked for on this node.", "pool")
        self._ready = gauge("pool_ready_bytes", "Sound and published.", "pool")
        self._phase = gauge("pool_phase", "1 for the current phase.", "pool", "phase")
        self._region = gauge("region_bytes", "Size by state.", "pool", "backing", "state")
        self._leased = gauge("regions_leased", "Regions that engines hold.", "pool")
        self.device_plugin_registered = gauge(
            "device_plugin_registered", "1 while kubelet hands the pool's regions out.", "pool"
        )
        self._devices = gauge("devices", "Regions as kubelet knows them.", "pool", "health")
        self._pages = gauge("huge_pages", "Pages on the node, and ours.", "page_size", "kind")
        self._verified = gauge(
            "verify_last_timestamp_seconds", "End of the last verification round."
        )
        self.connected = gauge("api_connected", "1 while the API server answers.")
        self._prepare = Histogram(
            "hostprep_prepare_duration_seconds",
            "From the begin of a preparation that changed something to its end.",
            ("pool",),
            buckets=_PREPARE_BUCKETS_S,
            registry=registry,
        )
        self._verify = Histogram(
            "hostprep_verify_duration_seconds",
            "Time that a verification round takes.",
            buckets=_VERIFY_BUCKETS_S,
            registry=registry,
        )
        self._failures = counter("prepare_failures", "Preparations that failed.", "pool", "reason")
        self._populated = counter("populated_bytes", "Made resident.", "pool", "backing")
        self._problems = counter(
            "verify_problems", "Promises that were found broken.", "pool", "reason"
        )
        self.writes = counter("status_writes", "Status reports by result.", "result")
        for result in _WRITE_RESULTS:
            self.writes.labels(result)
        self.worker_restarts = counter("worker_restarts", "Workers that ended unasked.")
        self._gates = GateMetrics(registry)

    def show_status(self, status: NodeStatus) -> None:
        """Show what the pools are now; pools that went are shown no more."""
        for metric in (self._wanted, self._ready, self._phase, self._region, self._leased):
            metric.clear()
        for pool in status.pools:
            self._wanted.labels(pool.name).set(pool.wanted_bytes)
            self._ready.labels(pool.name).set(pool.ready_bytes)
            self._leased.labels(pool.name).set(pool.regions_leased)
            for phase in Phase:
                self._phase.labels(pool.name, phase.value).set(phase is pool.phase)
            for region in pool.regions:
                labels = (pool.name, region.backing, region.state)
                self._region.labels(*labels).inc(region.size_bytes)

    def show_devices(self, pools: Mapping[str, Iterable[str]]) -> None:
        """Show how many devices of each health kubelet is told of, by pool."""
        self._devices.clear()
        for pool, healths in pools.items():
            for health in _HEALTHS:
                self._devices.labels(pool, health).set(0)
            for health in healths:
                self._devices.labels(pool, health).inc()

    def show_look(self, look: Look, before: Look | None, *, now_s: float) -> None:
        """Show a verification round; count the problems that the one before did not have."""
        self._verify.observe(look.took_s)
        self._verified.set(now_s)
        self._gates.show(look)
        for size in look.huge_pages:
            label = _page_label(size.page_bytes)
            self._pages.labels(label, "total").set(size.total)
            self._pages.labels(label, "held").set(size.held)
        for pool in look.pools:
            known = _problems(before.pool(pool.name) if before else None)
            for region, reason in _problems(pool) - known:
                _ = region
                self._problems.labels(pool.name, reason).inc()

    def count_prepared(
        self, pool: str, took_s: float | None, populated: Iterable[tuple[str, int]]
    ) -> None:
        """Count a piece of work; `took_s` is None where it did not get to its end."""
        if took_s is not None:
            self._prepare.labels(pool).observe(took_s)
        for backing, size_bytes in populated:
            self._populated.labels(pool, backing).inc(size_bytes)

    def count_failure(self, pool: str, reason: str) -> None:
        """Count a preparation that failed, or a pool that turned out not to be had."""
        self._failures.labels(pool, reason).inc()

    def text(self) -> bytes:
        """Return all of it as a scrape wants it."""
        return generate_latest(self._registry)


def _problems(pool: PoolLook | None) -> set[tuple[str, str]]:
    return {(problem.region, problem.reason) for problem in pool.problems} if pool else set()


def _page_label(page_bytes: int) -> str:
    """Return the size as Kubernetes writes it in `hugepages-2Mi`."""
    for unit, suffix in ((GIB, "Gi"), (MIB, "Mi")):
        if page_bytes % unit == 0:
            return f"{page_bytes // unit}{suffix}"
    return f"{page_bytes // 1024}Ki"
