"""One size of cluster from nothing to all nodes open; quiet, progress, a restart, reboot storms."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.control_plane.api import HMN, HMP, NODES, Api, at_once
from benchmarks.control_plane.nodes import heartbeat, make_nodes, renew_lease
from benchmarks.control_plane.processes import Program
from benchmarks.control_plane.storm import storm
from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT

POOLS = 3
_POLL_S = 0.25
_LONGEST_S = 1800.0
_WRITE = re.compile(r"^hostprep_operator_writes_total\{(?P<labels>[^}]*)\} (?P<value>\S+)$")
_MAX_STORM = 500
_STATUS_EVERY_S = 300.0
"""Kubelet updates an unchanged Node's status so often (nodeStatusReportFrequency)."""
_LEASE_EVERY_S = 10.0
"""And renews the node's Lease so often. Hostprep's agents send no heartbeats of their own."""
_PROGRESS_EVERY_S = 10.0
"""An agent reports each step of 10 %, at most so often: the densest reports that there are."""
_PROGRESS_PERCENT = (20, 30, 40, 50, 60, 70)


@dataclass
class Point:
    """What one size showed. Seconds, bytes and counts."""

    nodes: int
    specs_s: float = 0.0
    """From the first pool's creation until every HostMemoryNode was there."""
    marked_s: float = 0.0
    """From the start of the simulated agents until every node was open."""
    operator_cpu_s: float = 0.0
    agents_cpu_s: float = 0.0
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    writes: dict[str, int] = field(default_factory=dict)
    pool_writes_per_s: float = 0.0
    quiet_s: float = 0.0
    quiet_writes: int = 0
    quiet_cpu_share: float = 0.0
    progress_reports: int = 0
    progress_writes: int = 0
    progress_cpu_s: float = 0.0
    """Of the operator while these reports came, less what it uses while quiet."""
    resync_s: float = 0.0
    resync_writes: int = 0
    storm_s: list[float] = field(default_factory=list)
    bare_storm_s: list[float] = field(default_factory=list)

    @property
    def writes_per_node(self) -> float:
        """Object writes by the operator for each node prepared, pool status and events apart."""
        kinds = ("Node", "HostMemoryNode")
        return sum(self.writes.get(kind, 0) for kind in kinds) / self.nodes

    @property
    def cpu_ms_per_report(self) -> float | None:
        """Milliseconds of the operator's CPU time for one progress report of an agent."""
        if not self.progress_reports:
            return None
        return 1000.0 * self.progress_cpu_s / self.progress_reports

    @property
    def storm_ratio(self) -> float | None:
        """How much longer the slowest hundredth waits under the operator than under the loop."""
        if not self.storm_s or not self.bare_storm_s:
            return None
        return percentile(self.storm_s, 0.99) / percentile(self.bare_storm_s, 0.99)

    @property
    def is_met(self) -> bool:
        """Whether every reach is met at this size."""
        quiet = self.quiet_writes == self.resync_writes == self.progress_writes == 0
        storm = self.storm_ratio is None or self.storm_ratio <= 2.0
        slim = self.peak_rss_bytes < 150 << 20
        return quiet and storm and slim and self.writes_per_node <= 6


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of the sorted values lies."""
    return values[min(len(values) - 1, int(share * len(values)))]


class Operator:
    """The operator as a process, asked over HTTP as Prometheus would."""

    def __init__(self, kubeconfig: str, log: Path, *, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        arguments = ("run", "--kubeconfig", kubeconfig, "--listen", f"127.0.0.1:{port}")
        self.program = Program(
            "hostprep_operator", *arguments, "--agent-liveness", "off", log=str(log)
        )

    def metrics(self) -> str:
        """Return the whole page."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as page:
            return str(page.read().decode())

    def is_ready(self) -> bool:
        """Whether it has read everything."""
        try:
            with urllib.request.urlopen(f"{self._url}/readyz", timeout=5) as page:
                return bool(page.status == 200)
        except OSError:
            return False

    def writes(self) -> dict[str, int]:
        """Return the object writes by kind: successful ones, events apart."""
        return {kind: count for kind, count in self._written().items() if kind != "Event"}

    def events(self) -> int:
        """Return how many events it has posted."""
        return self._written().get("Event", 0)

    def _written(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for line in self.metrics().splitlines():
            if match := _WRITE.match(line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"]))
                if labels.get("result") == "written":
                    counts[labels["kind"]] = counts.get(labels["kind"], 0) + int(
                        float(match["value"])
                    )
        return counts

    def nodes_ready(self) -> int:
        """Return how many nodes it counts as open."""
        found = re.search(
            r'^hostprep_operator_nodes\{state="ready"\} (\S+)$', self.metrics(), re.MULTILINE
        )
        return int(float(found[1])) if found else 0


@dataclass
class Run:
    """One control plane with its operator and agents."""

    kubeconfig: str
    folder: Path
    port: int
    quiet_s: float

    def operator(self) -> Operator:
        """Return an operator that is not started yet."""
        return Operator(self.kubeconfig, self.folder / "operator.log", port=self.port)


async def measure(run: Run, count: int) -> Point:
    """Return what that many nodes cost. Raises TimeoutError where it never ends."""
    point = Point(count)
    async with Api(run.kubeconfig) as api:
        await make_nodes(api, count)
        operator = run.operator()
        with operator.program:
            await _until(_async(operator.is_ready), "the operator's start")
            await _prepare(run, api, operator, point)
        await _restart(run, point)
    return point


async def _prepare(run: Run, api: Api, operator: Operator, point: Point) -> None:
    """From nothing to all open, with the agents started once all specs are written."""
    begin_s = time.monotonic()
    for number in range(POOLS):
        await api.request("POST", HMP, _pool(number))
    await _until(_count_is(api, point.nodes), "the specs")
    point.specs_s = time.monotonic() - begin_s
    with Program(
        "benchmarks.control_plane.simulated_agents",
        run.kubeconfig,
        log=str(run.folder / "agents.log"),
    ) as agents:
        began_s = time.monotonic()
        agents.wait_for("ready")

        async def all_open() -> bool:
            return operator.nodes_ready() == point.nodes

        await _until(all_open, "all nodes open")
        point.marked_s = time.monotonic() - began_s
        total_s = time.monotonic() - begin_s
        await _check_open(api, point.nodes)
        await asyncio.sleep(2.0)
        point.writes = operator.writes()
        point.operator_cpu_s = operator.program.cpu_s()
        point.agents_cpu_s = agents.cpu_s()
        point.rss_bytes = operator.program.rss_bytes()
        point.peak_rss_bytes = operator.program.peak_rss_bytes()
        point.pool_writes_per_s = point.writes.get("HostMemoryPool", 0) / POOLS / total_s
        await _quiet(run, api, operator, point)
        await _progress(operator, agents, point)
        if point.nodes >= 2 * _MAX_STORM:
            await _storms(run, api, operator, agents, point)


async def _quiet(run: Run, api: Api, operator: Operator, point: Point) -> None:
    """Kubelets go on updating statuses and renewing Leases; the operator has nothing to write."""
    await at_once(range(point.nodes), lambda index: renew_lease(api, index))
    await _until(_events_are_told(operator), "the end of the events")
    before, cpu_s = sum(operator.writes().values()), operator.program.cpu_s()
    begin_s = time.monotonic()
    await asyncio.gather(
        _paced(run.quiet_s, point.nodes / _STATUS_EVERY_S, point.nodes, api, heartbeat),
        _paced(run.quiet_s, point.nodes / _LEASE_EVERY_S, point.nodes, api, renew_lease),
    )
    point.quiet_s = time.monotonic() - begin_s
    point.quiet_writes = sum(operator.writes().values()) - before
    point.quiet_cpu_share = (operator.program.cpu_s() - cpu_s) / point.quiet_s


async def _paced(
    seconds: float, per_s: float, nodes: int, api: Api, send: Callable[[Api, int], Awaitable[None]]
) -> None:
    """Send for one node after another, so many a second."""
    begin_s, sent = time.monotonic(), 0
    while (passed_s := time.monotonic() - begin_s) < seconds:
        await send(api, sent % nodes)
        sent += 1
        await asyncio.sleep(max(0.0, min(sent / per_s, seconds) - passed_s))


async def _progress(operator: Operator, agents: Program, point: Point) -> None:
    """Each node prepares a pool, and says so at every step; then all is ready again."""

    async def report(percent: int) -> None:
        agents.say(f"progress {percent} {_PROGRESS_EVERY_S}")
        await asyncio.to_thread(agents.wait_for, "progressed")

    await report(10)  # another phase: the operator marks the nodes and counts the pool
    await _until(_events_are_told(operator), "the end of the events")
    await _until(_writes_are_done(operator), "the end of the writes")
    before, cpu_s = sum(operator.writes().values()), operator.program.cpu_s()
    begin_s = time.monotonic()
    for percent in _PROGRESS_PERCENT:
        await report(percent)
    await asyncio.sleep(1.0)
    passed_s = time.monotonic() - begin_s
    point.progress_reports = len(_PROGRESS_PERCENT) * point.nodes
    point.progress_writes = sum(operator.writes().values()) - before
    used_s = operator.program.cpu_s() - cpu_s
    point.progress_cpu_s = max(0.0, used_s - point.quiet_cpu_share * passed_s)
    await report(100)

    async def all_open() -> bool:
        return operator.nodes_ready() == point.nodes

    await _until(all_open, "the nodes open after their preparation")


def _writes_are_done(operator: Operator) -> Callable[[], Awaitable[bool]]:
    """Tell whether nothing was written for three seconds."""

    async def done() -> bool:
        before = operator.writes()
        await asyncio.sleep(3.0)
        return operator.writes() == before

    return done


def _events_are_told(operator: Operator) -> Callable[[], Awaitable[bool]]:
    """Tell whether none was posted for two seconds: ten a second are, long after the work."""

    async def told() -> bool:
        before = operator.events()
        await asyncio.sleep(2.0)
        return operator.events() == before

    return told


async def _storms(run: Run, api: Api, operator: Operator, agents: Program, point: Point) -> None:
    """Reboot the same nodes twice: once under the operator, once under the bare loop."""
    count = min(_MAX_STORM, point.nodes)
    point.storm_s = await storm(api, count, 1)
    agents.say(f"reboot 1 0 {count}")
    agents.wait_for("rebooted")

    async def all_open() -> bool:
        return operator.nodes_ready() == point.nodes

    await _until(all_open, "the nodes open again")
    operator.program.stop()
    try:
        with Program("benchmarks.control_plane.bare_loop", run.kubeconfig) as bare:
            bare.wait_for("ready")
            point.bare_storm_s = await storm(api, count, 2)
    finally:
        operator.program.start()
    agents.say(f"reboot 2 0 {count}")
    agents.wait_for("rebooted")
    await _until(all_open, "the nodes open once more")


async def _restart(run: Run, point: Point) -> None:
    """Start a new operator: it reads everything and has nothing to write."""
    operator = run.operator()
    begin_s = time.monotonic()
    with operator.program:
        await _until(_async(operator.is_ready), "the operator's second start")

        async def all_open() -> bool:
            return operator.nodes_ready() == point.nodes

        await _until(all_open, "all nodes known again")
        point.resync_s = time.monotonic() - begin_s
        await asyncio.sleep(5.0)
        point.resync_writes = sum(operator.writes().values())


def _pool(number: int) -> dict[str, object]:
    return {
        "apiVersion": "hostprep.dev/v1alpha1",
        "kind": "HostMemoryPool",
        "metadata": {"name": f"pool-{number}"},
        "spec": {
            "size": "64Gi",
            "priority": number,
            "nodeSelector": {f"pool.hostprep.dev/pool-{number}": "true"},
            "rollout": {"maxUnavailable": "100%"},  # the agents start when all specs are there
        },
    }


def _async(check: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def checked() -> bool:
        return await asyncio.to_thread(check)

    return checked


def _count_is(api: Api, count: int) -> Callable[[], Awaitable[bool]]:
    """Ask how many HostMemoryNodes there are, without reading them."""

    async def counted() -> bool:
        page = await api.request("GET", f"{HMN}?limit=1")
        left = page["metadata"].get("remainingItemCount", 0)
        return len(page["items"]) + int(left) >= count

    return counted


async def _until(check: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline_s = time.monotonic() + _LONGEST_S
    while not await check():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not after {_LONGEST_S:.0f} s")
        await asyncio.sleep(_POLL_S)


async def _check_open(api: Api, count: int) -> None:
    """See for ourselves that every node is open: no taint, and the condition True."""
    closed = [node["metadata"]["name"] async for node in api.list(NODES) if not _is_open(node)]
    if closed:
        raise TimeoutError(f"{len(closed)} of {count} nodes are not open, such as {closed[0]}")


def _is_open(node: dict[str, dict[str, object]]) -> bool:
    taints = node["spec"].get("taints") or []
    conditions = node["status"]["conditions"]
    assert isinstance(taints, list)
    assert isinstance(conditions, list)
    ready = any(
        c["type"] == "hostprep.dev/HostMemoryReady" and c["status"] == "True" for c in conditions
    )
    return ready and all(taint["key"] != CLUSTER_AUTOSCALER_TAINT for taint in taints)
