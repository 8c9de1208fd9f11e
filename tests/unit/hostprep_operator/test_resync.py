"""How the operator notices what no watch reported."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hostprep.kube.client import NODES, POOLS, KubeClient, Page, Resource
from hostprep_operator.metrics import Metrics
from hostprep_operator.queue import KeyedQueue
from hostprep_operator.resync import Resync
from hostprep_operator.store import Cache, EventHandler, Key, Kind
from tests.unit.hostprep_operator.virtual_time import run_virtually

pytestmark = pytest.mark.unit

JsonObject = dict[str, Any]


def _object(name: str, version: int) -> JsonObject:
    return {"metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}}


class _Lists(KubeClient):
    """Lists of objects, without a server."""

    def __init__(self) -> None:
        self.objects: dict[str, list[JsonObject]] = {}
        self.read: list[str] = []

    async def pages(self, resource: Resource, **_: Any) -> AsyncIterator[Page]:
        self.read.append(resource.kind)
        yield Page(self.objects.get(resource.path, []), "100")


class _World:
    def __init__(self) -> None:
        self.kube, self.cache = _Lists(), Cache()
        self.handler = EventHandler(self.cache, KeyedQueue[Key]())
        self.resync = Resync(
            self.kube, self.cache, self.handler, Metrics(), namespace="default", watch_agents=False
        )

    async def run_for(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.resync.run()


def test_a_last_pool_that_vanished_while_nobody_watched_is_missed_within_two_minutes() -> None:
    async def scene() -> int:
        world = _World()
        world.kube.objects[POOLS.path] = [_object("kv", 3)]
        await world.resync.first()
        assert len(world.cache.pools) == 1
        world.kube.objects[POOLS.path] = []  # kopf, which lists nothing, calls nobody
        await world.run_for(120)
        return len(world.cache.pools)

    assert run_virtually(scene()) == 0


def test_lists_that_are_read_anew_all_the_time_do_not_put_off_comparing_everything() -> None:
    async def scene() -> int:
        world = _World()
        world.kube.objects[NODES.path] = [_object("n1", 3)]
        await world.resync.first()
        world.kube.objects[NODES.path] = []
        for _ in range(8):
            world.handler.listed(Kind.HOST_MEMORY_NODE)
            await world.run_for(120)
        return len(world.cache.nodes)

    assert run_virtually(scene()) == 0
