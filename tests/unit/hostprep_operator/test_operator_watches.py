"""What the operator makes of its watches, against a small server that speaks their protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from hostprep.kube.client import NODES, POOLS
from hostprep_operator.metrics import Metrics
from hostprep_operator.queue import KeyedQueue
from hostprep_operator.store import Cache, EventHandler, Key, Kind
from hostprep_operator.watch import Watches
from tests.support.watch_server import WatchServer, client_of

pytestmark = pytest.mark.unit


class _Cluster(WatchServer):
    """Three collections behind one address; this one is the pools."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.others = WatchServer(), WatchServer()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == POOLS.path:
            return await super().handle(request)
        return await (self.nodes if request.path == NODES.path else self.others).handle(request)


class _World:
    def __init__(self, cluster: _Cluster, cache: Cache, handler: EventHandler) -> None:
        self.cluster, self.cache, self.handler = cluster, cache, handler
        self.metrics = Metrics()
        self.watches: Watches

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():  # noqa: ASYNC110 - what is waited for knows no event
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _watching(cluster: _Cluster) -> AsyncIterator[_World]:
    async with client_of(cluster) as kube:
        cache = Cache()
        world = _World(cluster, cache, EventHandler(cache, KeyedQueue[Key]()))
        world.watches = Watches(
            kube,
            cache,
            world.handler,
            world.metrics,
            namespace="default",
            watch_agents=False,
            relist_s=3600.0,
        )
        tasks = [asyncio.create_task(world.watches.follow(kind)) for kind in world.watches.kinds]
        try:
            async with asyncio.timeout(30):
                await world.watches.synced()
            yield world
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _run(scene: Callable[[_Cluster], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene(_Cluster())

    asyncio.run(run())


_PAUSED: dict[str, Any] = {"allNodes": True, "rollout": {"maxUnavailable": 7}}


def test_all_kinds_are_known_once_it_is_in_sync() -> None:
    async def scene(cluster: _Cluster) -> None:
        await cluster.put("kv", allNodes=True)
        await cluster.nodes.put("n1")
        async with _watching(cluster) as world:
            assert world.watches.kinds == (Kind.POOL, Kind.HOST_MEMORY_NODE, Kind.NODE)
            assert set(world.cache.pools) == {"kv"}
            assert world.cache.selected("kv") == {"n1"}
            assert world.watches.silent_s() < 30
            page = world.metrics.text().decode()
            assert "hostprep_operator_last_sync_timestamp_seconds 0.0" not in page

    _run(scene)


def test_a_patch_followed_at_once_by_the_deletion_is_what_the_pool_was_last() -> None:
    async def scene(cluster: _Cluster) -> None:
        await cluster.put("kv", allNodes=True)
        async with _watching(cluster) as world:
            await cluster.put("kv", **_PAUSED)
            await cluster.delete("kv")
            await world.until(lambda: "kv" in world.handler.former_pools)
            former = world.handler.former_pools["kv"]
            assert former.rollout.max_unavailable == 7
            assert former.gone
            assert "kv" not in world.cache.pools

    _run(scene)


def test_a_last_pool_that_went_while_the_watch_was_away_is_handled_as_it_was_known_last() -> None:
    async def scene(cluster: _Cluster) -> None:
        await cluster.put("kv", **_PAUSED)
        async with _watching(cluster) as world:
            await world.until(lambda: bool(cluster.streams))
            cluster.refuse_watches = 500
            await cluster.end_watches()
            await world.until(lambda: not cluster.streams)
            await cluster.delete("kv")
            cluster.history.clear()
            cluster.compact()
            cluster.refuse_watches = 0
            await world.until(lambda: "kv" in world.handler.former_pools)
            assert world.handler.former_pools["kv"].rollout.max_unavailable == 7
            assert not world.handler.gone_pools, "a list is no proof: it is asked for by name"

    _run(scene)


def test_an_object_of_an_own_write_that_no_watch_showed_goes_with_the_next_list() -> None:
    async def scene(cluster: _Cluster) -> None:
        async with _watching(cluster) as world:
            await world.until(lambda: bool(cluster.nodes.streams))
            metadata = {"name": "n9", "uid": "u9", "resourceVersion": "9"}
            world.handler.observed(Kind.NODE, {"metadata": metadata})
            assert set(world.cache.nodes) == {"n9"}
            cluster.nodes.refuse = [410]
            await cluster.nodes.end_watches()
            await world.until(lambda: not world.cache.nodes)

    _run(scene)


def test_an_object_that_cannot_be_read_hides_no_other() -> None:
    async def scene(cluster: _Cluster) -> None:
        async with _watching(cluster) as world:
            await cluster.put("odd", priority="not a number")
            await cluster.put("kv", allNodes=True)
            await world.until(lambda: "kv" in world.cache.pools)
            assert "odd" not in world.cache.pools

    _run(scene)
