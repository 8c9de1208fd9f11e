"""A pool as the agent leaves it, and plugins that offer its regions as in the agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path

from hostprep.backing import Backing
from hostprep.client.handoff import Handoff, Region
from hostprep.deviceplugin.devices import Device
from hostprep.deviceplugin.manager import PluginManager
from hostprep.linux.processes import boot_id
from hostprep.paths import PoolPaths

RESOURCE = "hostprep.dev/kv"
FREE = (Device("node0-0", healthy=True, numa_node=0), Device("node1-0", healthy=True, numa_node=1))


class Offering:
    """Plugins that run in a loop of their own, as in the agent."""

    def __init__(self, root: str, kubelet_dir: Path) -> None:
        self.said: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.plugins = PluginManager(
            root,
            str(kubelet_dir),
            on_registered=lambda pool: self.said.append(f"registered {pool}"),
            on_failed=lambda pool, error: self.said.append(f"failed {pool}: {error.reason}"),
            on_gone=lambda pool: self.said.append(f"gone {pool}"),
        )
        self._task = asyncio.run_coroutine_threadsafe(self.plugins.run(), self._loop)

    def show(self, **pools: tuple[Device, ...]) -> None:
        async def tell() -> None:
            self.plugins.show(pools)

        asyncio.run_coroutine_threadsafe(tell(), self._loop).result(10)

    def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(BaseException):
            self._task.result(10)

        async def rest() -> None:
            await asyncio.sleep(0.05)

        asyncio.run_coroutine_threadsafe(rest(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def publish(paths: PoolPaths, *names: str, generation: int = 1) -> None:
    regions = []
    for name in names:
        status = os.stat(f"{paths.mem}/{name}")
        regions.append(
            Region(
                name=name,
                path=f"mem/{name}",
                st_dev=status.st_dev,
                st_ino=status.st_ino,
                size_bytes=4096,
                backing=Backing.BASE,
                page_bytes=4096,
                placement=name.replace("node", "node:").split("-")[0],
                pinned=True,
            )
        )
    handoff = Handoff(
        pool=paths.pool,
        pool_uid="",
        generation=generation,
        boot_id=boot_id(),
        agent_version="1",
        regions=tuple(regions),
    )
    Path(paths.handoff).write_bytes(handoff.to_bytes())
