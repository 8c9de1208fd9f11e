"""The watch that agent and operator share, against a small HTTP server that speaks its protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from hostprep.kube.client import POOLS
from hostprep.kube.watch import Change, Event, Reflector
from tests.support.watch_server import WatchServer, client_of

pytestmark = pytest.mark.unit


class _Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, event: str, **_: Any) -> None:
        self.said.append(event)

    warning = error = info


class _World:
    def __init__(self, server: WatchServer, reflector: Reflector, log: _Log) -> None:
        self.server, self.reflector, self.log = server, reflector, log
        self.seen: list[Change] = []
        self._came = asyncio.Event()

    async def follow(self) -> None:
        async for change in self.reflector.changes():
            self.seen.append(change)
            self._came.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                self._came.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self._came.wait()

    def told(self, name: str) -> list[Event]:
        return [change.event for change in self.seen if change.name == name]

    def count(self, event: Event) -> int:
        return sum(change.event is event for change in self.seen)


@contextlib.asynccontextmanager
async def _following(server: WatchServer, **options: Any) -> AsyncIterator[_World]:
    async with client_of(server) as client:
        log = _Log()
        world = _World(server, Reflector(client, POOLS, log, **options), log)
        task = asyncio.create_task(world.follow())
        try:
            yield world
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _run(scene: Callable[[WatchServer], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene(WatchServer())

    asyncio.run(run())


def test_a_list_of_several_pages_is_followed_by_each_change_in_order() -> None:
    async def scene(server: WatchServer) -> None:
        for number in range(5):
            await server.put(f"p{number}")
        async with _following(server, page=2) as world:
            await world.until(lambda: bool(server.streams))
            assert [c.name for c in world.seen] == ["p0", "p1", "p2", "p3", "p4", ""]
            assert world.seen[-1].event is Event.LISTED
            await server.put("p1", size=2)
            await server.delete("p1")
            await server.put("p1", size=3)
            await world.until(lambda: len(world.seen) == 9)
        modified, deleted, made = world.seen[6:]
        assert [c.event for c in world.seen[6:]] == [Event.OBSERVED, Event.DELETED, Event.OBSERVED]
        assert modified.document is not None
        assert deleted.document is not None
        assert modified.document["spec"] == deleted.document["spec"] == {"size": 2}
        assert deleted.uid == modified.uid != made.uid
        assert int(deleted.resource_version) > int(modified.resource_version)

    _run(scene)


def test_a_watch_that_ends_in_order_goes_on_from_the_last_bookmark_without_a_list() -> None:
    async def scene(server: WatchServer) -> None:
        async with _following(server) as world:
            await world.until(lambda: bool(server.streams))
            await server.bookmark()
            await world.until(lambda: world.count(Event.CURRENT) == 1)
            server.compact()
            await server.end_watches()
            await server.put("kv")
            await world.until(lambda: bool(world.told("kv")))
        assert server.lists == 1
        watches = [query for query in server.asked if "watch" in query]
        assert watches[-1]["resourceVersion"] == "11"
        assert all(q["allowWatchBookmarks"] == "true" for q in watches)
        assert all(0 < int(q["timeoutSeconds"]) <= 480 for q in watches)

    _run(scene)


def test_what_went_while_the_version_became_too_old_vanishes_after_the_list() -> None:
    async def scene(server: WatchServer) -> None:
        await server.put("stays")
        await server.put("goes")
        async with _following(server) as world:
            await world.until(lambda: bool(server.streams))
            server.refuse_watches = 500
            await server.end_watches()
            await world.until(lambda: not server.streams)
            uid = world.seen[0].uid
            server.history.clear()
            await server.delete("goes")
            server.compact()
            server.refuse_watches = 0
            await world.until(lambda: world.count(Event.LISTED) == 2)
        assert world.told("stays") == [Event.OBSERVED, Event.OBSERVED]
        assert world.told("goes") == [Event.OBSERVED, Event.VANISHED]
        gone = next(change for change in world.seen if change.event is Event.VANISHED)
        assert gone.uid == uid
        assert gone.document is None
        assert gone.resource_version == str(server.version), "as of the list, not of the object"
        assert "watch_expired" in world.log.said

    _run(scene)


def test_a_broken_watch_goes_on_where_it_was_and_lists_only_after_several_failures() -> None:
    async def scene(server: WatchServer) -> None:
        async with _following(server) as world:
            await world.until(lambda: bool(server.streams))
            server.refuse = [500, 500]
            await server.end_watches()
            await server.put("kv")
            await world.until(lambda: bool(world.told("kv")))
            assert server.lists == 1
            await world.until(lambda: bool(server.streams))
            server.refuse_watches = 500
            await server.end_watches()
            await server.put("kv", size=2)
            await world.until(lambda: server.lists >= 2)
            assert world.told("kv") == [Event.OBSERVED] * 2, "a list tells it where no watch does"
        assert world.log.said == ["api_away", "api_back", "api_away"]

    _run(scene)


def test_a_list_that_breaks_in_the_middle_takes_nothing_for_vanished() -> None:
    async def scene(server: WatchServer) -> None:
        for number in range(4):
            await server.put(f"p{number}")
        async with _following(server, page=2) as world:
            await world.until(lambda: bool(server.streams))
            server.refuse_watches = 410
            await server.end_watches()
            await world.until(lambda: server.lists == 2)
            server.refuse_watches = 0
            server.refuse = [500]
            await world.until(lambda: world.reflector.connected and bool(server.streams))
        assert world.count(Event.VANISHED) == 0

    _run(scene)


def test_the_list_is_read_again_from_time_to_time_where_that_is_asked_for() -> None:
    async def scene(server: WatchServer) -> None:
        async with _following(server, relist_s=1.0) as world:
            await world.until(lambda: bool(server.streams))
            await asyncio.sleep(1.1)
            await server.end_watches()
            await world.until(lambda: world.count(Event.LISTED) == 2)
        first = next(query for query in server.asked if "watch" in query)
        assert first["timeoutSeconds"] == "1"

    _run(scene)


def test_selectors_go_with_the_list_and_with_the_watch() -> None:
    async def scene(server: WatchServer) -> None:
        options = {"label_selector": "a=b", "field_selector": "metadata.name=kv"}
        async with _following(server, **options) as world:
            await world.until(lambda: bool(server.streams))
        assert {(q["labelSelector"], q["fieldSelector"]) for q in server.asked} == {
            ("a=b", "metadata.name=kv")
        }
        assert len(server.asked) == 2

    _run(scene)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_why_it_does_not_work_is_logged_once_and_so_is_that_it_works_again(status: int) -> None:
    async def scene(server: WatchServer) -> None:
        server.refuse = [status, status]
        async with _following(server) as world:
            await world.until(lambda: bool(server.streams))
            await world.until(lambda: world.log.said == ["api_away", "api_back"])
            assert world.reflector.connected

    _run(scene)


def test_an_answer_that_is_no_object_is_an_error_like_others_and_tried_again() -> None:
    async def scene(server: WatchServer) -> None:
        server.objects["odd"] = {"metadata": {}}
        async with _following(server) as world:
            await world.until(lambda: world.log.said == ["api_away"])
            del server.objects["odd"]
            await server.put("kv")
            await world.until(lambda: bool(world.told("kv")))
        assert world.count(Event.LISTED) >= 1

    _run(scene)


def test_what_the_caller_learned_of_by_itself_vanishes_too() -> None:
    async def scene(server: WatchServer) -> None:
        await server.put("kv")
        known = {"kv": "u11", "own": "u1"}
        async with _following(server, known=lambda: known) as world:
            await world.until(lambda: world.count(Event.LISTED) == 1)
        assert world.told("own") == [Event.VANISHED]
        assert world.told("kv") == [Event.OBSERVED]

    _run(scene)
