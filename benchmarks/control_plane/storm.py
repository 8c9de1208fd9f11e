"""From a Node update that shows another boot to its taint: seconds, by an independent watch."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.control_plane.api import NODES, Api, at_once
from benchmarks.control_plane.nodes import name_of, reboot
from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT

_LONGEST_S = 120.0


@dataclass
class Watcher:
    """Notes when each node's boot changed, and when its taint came; parses afterwards."""

    lines: list[tuple[float, bytes]] = field(default_factory=list)

    async def run(self, api: Api, version: str) -> None:
        """Collect until cancelled."""
        async for line in api.watch(NODES, version):
            self.lines.append((time.monotonic(), line))

    async def silence(self, quiet_s: float = 3.0) -> None:
        """Return once nothing has come for a while: parsing meanwhile would take CPU from all."""
        seen = -1
        while seen != len(self.lines):
            seen = len(self.lines)
            await asyncio.sleep(quiet_s)

    def delays_s(self, boots: dict[str, str]) -> dict[str, float]:
        """Return the seconds for each node whose taint came; `boots` are those before."""
        rebooted: dict[str, float] = {}
        delays: dict[str, float] = {}
        for at_s, line in self.lines:
            node = json.loads(line)["object"]
            name = node["metadata"]["name"]
            if name not in boots:
                continue
            if node["status"]["nodeInfo"]["bootID"] != boots[name]:
                rebooted.setdefault(name, at_s)
            if name in rebooted and name not in delays and _is_tainted(node):
                delays[name] = at_s - rebooted[name]
        return delays


def _is_tainted(node: dict[str, Any]) -> bool:
    taints = node["spec"].get("taints") or ()
    return any(taint["key"] == CLUSTER_AUTOSCALER_TAINT for taint in taints)


async def storm(api: Api, count: int, boot: int) -> list[float]:
    """Reboot the first `count` nodes at once; return each one's seconds to its taint, sorted.

    Raises TimeoutError if one has none after two minutes.
    """
    version = await api.version(NODES)
    names = {name_of(index) for index in range(count)}
    before = {
        node["metadata"]["name"]: node["status"]["nodeInfo"]["bootID"]
        async for node in api.list(NODES)
        if node["metadata"]["name"] in names
    }
    watcher = Watcher()
    watching = asyncio.create_task(watcher.run(api, version))
    await asyncio.sleep(0.5)
    await at_once(range(count), lambda index: reboot(api, index, boot), width=32)
    deadline_s = time.monotonic() + _LONGEST_S
    while True:
        await watcher.silence()
        delays = watcher.delays_s(before)
        if len(delays) == count:
            watching.cancel()
            return sorted(delays.values())
        if watching.done():
            raise RuntimeError(f"the driver's own watch ended: {watching.exception()}")
        if time.monotonic() > deadline_s:
            tainted = [node async for node in api.list(NODES) if _is_tainted(node)]
            raise TimeoutError(
                f"{count - len(delays)} of {count} nodes were not seen tainted; {len(tainted)} are"
            )
