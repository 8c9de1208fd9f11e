"""What the operator learns of what nobody told it, and what it makes of answers that are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from hostprep_operator.api_errors import UnreachableError
from hostprep_operator.cache import Cache
from hostprep_operator.intake import Intake
from hostprep_operator.keys import Key, Kind
from hostprep_operator.kube import Kube, Page
from hostprep_operator.metrics import Metrics
from hostprep_operator.queue import KeyedQueue
from hostprep_operator.resources import NODES, POOLS, Resource
from hostprep_operator.sync import Sync
from tests.support.virtual_time import run_virtually

pytestmark = pytest.mark.unit

JsonObject = dict[str, Any]


def _object(name: str, version: int) -> JsonObject:
    return {"metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}}


class _Lists(Kube):
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
        self.intake = Intake(self.cache, KeyedQueue[Key]())
        self.sync = Sync(
            self.kube, self.cache, self.intake, Metrics(), namespace="default", watch_agents=False
        )

    async def run_for(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.sync.run()


def test_a_last_pool_that_vanished_while_nobody_watched_is_missed_within_two_minutes() -> None:
    async def scene() -> int:
        world = _World()
        world.kube.objects[POOLS.path] = [_object("kv", 3)]
        await world.sync.first()
        assert len(world.cache.pools) == 1
        world.kube.objects[POOLS.path] = []  # kopf, which lists nothing, calls nobody
        await world.run_for(120)
        return len(world.cache.pools)

    assert run_virtually(scene()) == 0


def test_lists_that_are_read_anew_all_the_time_do_not_put_off_comparing_everything() -> None:
    async def scene() -> int:
        world = _World()
        world.kube.objects[NODES.path] = [_object("n1", 3)]
        await world.sync.first()
        world.kube.objects[NODES.path] = []
        for _ in range(8):
            world.intake.listed(Kind.HOST_MEMORY_NODE)
            await world.run_for(120)
        return len(world.cache.nodes)

    assert run_virtually(scene()) == 0


def test_an_answer_that_is_no_json_is_trouble_on_the_way_and_not_the_end() -> None:
    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="<html>please log in</html>")

    async def scene() -> None:
        app = web.Application()
        app.router.add_get("/{any:.*}", page)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        kube = Kube(Configuration(f"http://127.0.0.1:{runner.addresses[0][1]}"))
        try:
            with pytest.raises(UnreachableError, match="no JSON"):
                await kube.get(NODES, "n1")
        finally:
            await kube.close()
            await runner.cleanup()

    asyncio.run(scene())
