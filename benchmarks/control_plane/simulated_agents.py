"""All agents of a cluster in one process with one watch: they answer every spec at once.

`python -m benchmarks.control_plane.simulated_agents KUBECONFIG`; a line `reboot N FROM TO` on
standard input has the agents of nodes FROM to TO - 1 come back with boot number N, and is answered
by `rebooted`. A line `progress PERCENT SECONDS` has every agent report once that a pool is prepared
so far (100: ready), spread over so many seconds, and is answered by `progressed`. Ends with its
standard input. Says `ready` once it watches.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.control_plane.api import HMN, MERGE, Api, at_once
from benchmarks.control_plane.nodes import boot_id, name_of
from hostprep.api.node_resource import (
    HugePageStatus,
    NodeStatus,
    Phase,
    PoolEntry,
    PoolStatus,
    RegionStatus,
    entries_of,
)

_LANES = 8
_GIB = 1 << 30
_PAGE_BYTES = 2 << 20


class Agents:
    """Every node's agent: what it was asked for, and how often its node was booted."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._boots: dict[str, int] = {}
        self._seen: dict[str, dict[str, Any]] = {}
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._percent = 100
        """How far each node's first pool is prepared."""

    async def run(self) -> None:
        """Answer until cancelled."""
        version = await self._api.version(HMN)
        async for document in self._api.list(HMN):
            self._hear(document)
        print("ready", flush=True)
        lanes = [asyncio.create_task(self._answer()) for _ in range(_LANES)]
        async for line in self._api.watch(HMN, version):
            event = json.loads(line)
            if event["type"] in ("ADDED", "MODIFIED"):
                self._hear(event["object"])
        for lane in lanes:
            lane.cancel()

    def _hear(self, document: dict[str, Any]) -> None:
        name = document["metadata"]["name"]
        generation = document["metadata"]["generation"]
        status = document.get("status") or {}
        self._seen[name] = document
        if status.get("observedGeneration") != generation or status.get("bootID") != self._boot(
            name
        ):
            self._queue.put_nowait(name)

    def _boot(self, name: str) -> str:
        return boot_id(name, self._boots.get(name, 0))

    async def reboot(self, boot: int, first: int, end: int) -> None:
        """Have those nodes' agents come back on another boot."""
        names = [name_of(index) for index in range(first, end)]
        for name in names:
            self._boots[name] = boot
        await at_once(names, self._report, width=_LANES)

    async def progress(self, percent: int, seconds: float) -> None:
        """Have every agent report that its first pool is prepared so far."""
        self._percent = percent
        names = sorted(self._seen)
        begin_s, pause_s = time.monotonic(), seconds / max(1, len(names))

        async def report(numbered: tuple[int, str]) -> None:
            number, name = numbered
            await asyncio.sleep(begin_s + number * pause_s - time.monotonic())
            await self._report(name)

        await at_once(enumerate(names), report, width=_LANES)

    async def _answer(self) -> None:
        while True:
            await self._report(await self._queue.get())

    async def _report(self, name: str) -> None:
        document = self._seen.get(name)
        if document is None:
            return
        status = status_for(document, self._boot(name), self._percent).to_json()
        await self._api.request(
            "PATCH", f"{HMN}/{name}/status", {"status": status}, content_type=MERGE
        )


def status_for(document: dict[str, Any], boot: str, percent: int = 100) -> NodeStatus:
    """Return the status of an agent that has everything ready, its first pool so far."""
    entries = [entry for entry in entries_of(document) if not entry.absent]
    pools = tuple(_pool(entry) for entry in entries)
    if percent < 100 and pools:
        pools = (_unfinished(pools[0], percent), *pools[1:])
    held = sum(pool.ready_bytes for pool in pools) // _PAGE_BYTES
    return NodeStatus(
        observed_generation=document["metadata"]["generation"],
        boot_id=boot,
        agent_version="simulated",
        summary=f"{len(pools)} pools ready",
        pools=pools,
        huge_pages=(HugePageStatus(page_bytes=_PAGE_BYTES, total=held, held=held),),
    )


def _pool(entry: PoolEntry) -> PoolStatus:
    regions = tuple(
        RegionStatus(
            name=f"node{node}-0",
            size_bytes=32 * _GIB,
            backing="HugeTLB2Mi",
            placement=f"node:{node}",
            state="Free",
        )
        for node in range(2)
    )
    return PoolStatus(
        name=entry.name,
        uid=entry.uid,
        generation=entry.generation,
        phase=Phase.READY,
        reason="Ready",
        backing="HugeTLB2Mi",
        wanted_bytes=64 * _GIB,
        ready_bytes=64 * _GIB,
        handoff_generation=1,
        ready_since_s=time.time(),
        regions=regions,
    )


def _unfinished(pool: PoolStatus, percent: int) -> PoolStatus:
    """Return the pool while it is prepared: bytes count as ready with their whole region."""
    done = len(pool.regions) * percent // 100
    regions = tuple(
        replace(region, state="Free" if number < done else "Unfinished")
        for number, region in enumerate(pool.regions)
    )
    return replace(
        pool,
        phase=Phase.PREPARING,
        reason="Preparing",
        message=f"{percent} % of 64 GiB are there",
        progress_percent=percent,
        ready_bytes=sum(region.size_bytes for region in regions[:done]),
        ready_since_s=None,
        regions=regions,
    )


async def _main(kubeconfig: str) -> None:
    async with Api(kubeconfig) as api:
        agents = Agents(api)
        answering = asyncio.create_task(agents.run())
        while line := await asyncio.to_thread(sys.stdin.readline):
            match line.split():
                case ["reboot", boot, first, end]:
                    await agents.reboot(int(boot), int(first), int(end))
                    print("rebooted", flush=True)
                case ["progress", percent, seconds]:
                    await agents.progress(int(percent), float(seconds))
                    print("progressed", flush=True)
        answering.cancel()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
