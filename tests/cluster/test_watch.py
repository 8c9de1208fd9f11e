"""The shared watch against a real API server: connections cut, history compacted, server killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from hostprep.kube.client import KubeClient, Resource
from hostprep.kube.logs import make_logger, set_up_logs
from hostprep.kube.watch import Event, Reflector
from testbed.control_plane import ControlPlane
from testbed.fault_proxy import FaultProxy
from testbed.faults import cut

pytestmark = pytest.mark.cluster

_PATH = "/api/v1/namespaces/default/configmaps"
_MAPS = Resource("ConfigMap", _PATH)


class _World:
    """What follows the config maps with a label, by one reflector through the proxy."""

    def __init__(self, cluster: ControlPlane, proxy: FaultProxy) -> None:
        self.cluster, self.proxy = cluster, proxy
        self.known: dict[str, str] = {}
        """Name to value, from the changes alone."""
        self.steps: list[tuple[Event, str]] = []
        self.last: dict[str, str] = {}
        """Name to the value in the document of its deletion."""

    async def follow(self, reflector: Reflector) -> None:
        async for change in reflector.changes():
            if change.event in (Event.LISTED, Event.CURRENT):
                self.steps.append((change.event, ""))
                continue
            self.steps.append((change.event, change.name))
            value = str((change.document or {}).get("data", {}).get("value", ""))
            if change.event is Event.OBSERVED:
                self.known[change.name] = value
                continue
            del self.known[change.name]
            self.last[change.name] = value

    def of(self, name: str) -> list[Event]:
        return [event for event, of in self.steps if of == name]

    async def put(self, name: str, value: int) -> None:
        body: dict[str, Any] = {"data": {"value": str(value)}}
        if await asyncio.to_thread(self.cluster.api.exists, f"{_PATH}/{name}"):
            await asyncio.to_thread(self.cluster.api.patch, f"{_PATH}/{name}", body)
            return
        body["metadata"] = {"name": name, "labels": {"watched": "yes"}}
        await asyncio.to_thread(self.cluster.api.create, _PATH, body)

    async def delete(self, name: str) -> None:
        await asyncio.to_thread(self.cluster.api.delete, f"{_PATH}/{name}")

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_so():  # noqa: ASYNC110 - a proxy's state knows no event
                await asyncio.sleep(0.05)

    async def until_watched(self) -> None:
        await self.until(lambda: _PATH in self.proxy.watches())

    def compact(self) -> None:
        """Have etcd forget all versions but the newest."""
        version = self.cluster.api.get(_PATH)["metadata"]["resourceVersion"]
        subprocess.run(
            [
                *("curl", "--fail", "--silent", "--show-error", "--max-time", "10"),
                *("--unix-socket", str(self.cluster.folder / "etcd.sock")),
                *("--data", json.dumps({"revision": version, "physical": True})),
                "http://localhost/v3/kv/compaction",
            ],
            check=True,
            capture_output=True,
        )


@contextlib.asynccontextmanager
async def _following(cluster: ControlPlane, proxy: FaultProxy) -> AsyncIterator[_World]:
    client = await KubeClient.connect(str(proxy.admin_kubeconfig()), name="test")
    reflector = Reflector(client, _MAPS, make_logger("test"), label_selector="watched=yes", page=2)
    world = _World(cluster, proxy)
    task = asyncio.create_task(world.follow(reflector))
    try:
        await world.until_watched()
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


def _run(cluster: ControlPlane, scene: Callable[[_World], Awaitable[None]]) -> None:
    set_up_logs(style="console", level="warning")

    async def run() -> None:
        with FaultProxy(cluster) as proxy:
            async with _following(cluster, proxy) as world:
                await scene(world)

    asyncio.run(run())


def test_each_change_comes_in_order_and_the_deletion_with_the_last_version(
    private_control_plane: ControlPlane,
) -> None:
    async def scene(world: _World) -> None:
        for value in range(3):
            await world.put("a", value)
        await world.delete("a")
        await world.until(lambda: "a" in world.last)
        assert world.of("a") == [Event.OBSERVED] * 3 + [Event.DELETED]
        assert world.last["a"] == "2"

    _run(private_control_plane, scene)


def test_cut_connections_lose_nothing_and_need_no_list(private_control_plane: ControlPlane) -> None:
    async def scene(world: _World) -> None:
        await world.put("stays", 0)
        for value in range(1, 5):
            await asyncio.sleep(1.2)  # a watch that breaks at once counts as one that fails
            world.proxy.cut_connections()
            await world.put("stays", value)
            await world.put("goes", value)
            await world.delete("goes")
            await world.until(lambda value=value: world.of("goes").count(Event.DELETED) == value)  # type: ignore[misc]
            await world.until_watched()
        assert world.known == {"stays": "4"}
        assert Event.VANISHED not in world.of("goes")
        assert world.steps.count((Event.LISTED, "")) == 1

    _run(private_control_plane, scene)


def test_what_was_deleted_before_the_history_was_compacted_vanishes(
    private_control_plane: ControlPlane,
) -> None:
    async def scene(world: _World) -> None:
        for name in ("a", "b", "c", "d", "e"):
            await world.put(name, 1)
        await world.until(lambda: len(world.known) == 5)
        # The proxy lets nothing through until the server has nothing of that time any more.
        with world.proxy.fault(cut(path=_PATH)):
            world.proxy.cut_connections()
            await world.delete("b")
            await world.put("a", 2)
            await asyncio.to_thread(world.compact)
            await asyncio.to_thread(world.cluster.restart_api_server)
        await world.until(lambda: "b" not in world.known and world.known["a"] == "2")
        assert set(world.known) == {"a", "c", "d", "e"}
        assert world.of("b")[-1] is Event.VANISHED
        await world.until_watched()
        await world.put("a", 3)
        await world.until(lambda: world.known["a"] == "3")

    _run(private_control_plane, scene)


def test_an_expired_watch_reads_the_list_again(private_control_plane: ControlPlane) -> None:
    async def scene(world: _World) -> None:
        await world.put("a", 1)
        await world.until(lambda: "a" in world.known)
        assert world.proxy.expire_watches(_PATH) == 1
        await world.until(lambda: world.steps.count((Event.LISTED, "")) == 2)
        await world.until_watched()
        await world.delete("a")
        await world.until(lambda: not world.known)
        assert world.of("a")[-1] is Event.DELETED

    _run(private_control_plane, scene)


def test_an_api_server_that_is_killed_and_comes_back_is_followed_on(
    private_control_plane: ControlPlane,
) -> None:
    async def scene(world: _World) -> None:
        await world.put("a", 1)
        await world.put("b", 1)
        await world.until(lambda: len(world.known) == 2)
        await asyncio.to_thread(world.cluster.kill_api_server)
        await asyncio.sleep(3)
        await asyncio.to_thread(world.cluster.start_api_server)
        await world.delete("b")
        await world.put("a", 2)
        await world.until(lambda: world.known == {"a": "2"})
        assert world.of("b")[-1] in (Event.DELETED, Event.VANISHED)

    _run(private_control_plane, scene)
