"""Who may work: one holder at a time, by one's own clock, whatever others' clocks say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from hostprep.kube.client import KubeClient
from hostprep.kube.errors import ConflictError, UnreachableError
from hostprep_operator.leader_election import Leader
from tests.unit.hostprep_operator.virtual_time import run_virtually

pytestmark = pytest.mark.unit

JsonObject = dict[str, Any]


class _Server:
    """One Lease with the API server's rules: versions, conflicts, merge patches."""

    def __init__(self) -> None:
        self.lease: JsonObject | None = None
        self.version = 0
        self.down_for: set[str] = set()
        self.hangs = False

    def for_replica(self, name: str) -> KubeClient:
        return cast("KubeClient", _Client(self, name))

    def store(self, lease: JsonObject) -> JsonObject:
        self.version += 1
        lease["metadata"]["resourceVersion"] = str(self.version)
        self.lease = lease
        return lease

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""


class _Client:
    def __init__(self, server: _Server, name: str) -> None:
        self._server, self._name = server, name

    async def get(self, _resource: object, _name: str) -> JsonObject | None:
        await self._reach()
        return self._server.lease

    async def create(self, _resource: object, body: Mapping[str, Any]) -> JsonObject:
        await self._reach()
        if self._server.lease is not None:
            raise ConflictError("it exists")
        return self._server.store({"metadata": dict(body["metadata"]), "spec": dict(body["spec"])})

    async def patch(
        self, _resource: object, _name: str, body: Mapping[str, Any]
    ) -> JsonObject | None:
        await self._reach()
        lease = self._server.lease
        if lease is None:
            return None
        if body["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"]:
            raise ConflictError("changed meanwhile")
        spec = {**lease["spec"], **body["spec"]}
        return self._server.store({"metadata": dict(lease["metadata"]), "spec": spec})

    async def _reach(self) -> None:
        await asyncio.sleep(3600 if self._server.hangs else 0.01)
        if self._name in self._server.down_for:
            raise UnreachableError("no answer")


def _leader(server: _Server, name: str) -> Leader:
    return Leader(server.for_replica(name), namespace="default", name="l", identity=name)


def _now() -> float:
    return asyncio.get_running_loop().time()


def test_the_first_to_come_works_and_the_second_waits_as_long_as_it_renews() -> None:
    async def scenario() -> None:
        server = _Server()
        first = _leader(server, "a")
        await first.acquire()
        keeping = asyncio.create_task(first.keep())
        second = asyncio.create_task(_leader(server, "b").acquire())
        await asyncio.sleep(300)
        assert server.holder == "a"
        assert not second.done()
        assert not keeping.done()
        keeping.cancel()
        second.cancel()

    run_virtually(scenario())


def test_a_holder_that_is_gone_is_followed_once_its_time_is_over_and_not_before() -> None:
    async def scenario() -> None:
        server = _Server()
        await _leader(server, "a").acquire()
        began_s = _now()
        second = _leader(server, "b")
        await second.acquire()
        assert 15 <= _now() - began_s < 15 + 3 * 2
        assert server.holder == "b"
        assert server.lease is not None
        assert server.lease["spec"]["leaseTransitions"] == 1

    run_virtually(scenario())


def test_a_lease_that_is_released_is_taken_at_the_next_look() -> None:
    async def scenario() -> None:
        server = _Server()
        first = _leader(server, "a")
        await first.acquire()
        await first.release()
        began_s = _now()
        await _leader(server, "b").acquire()
        assert _now() - began_s < 1

    run_virtually(scenario())


def test_who_cannot_renew_stops_before_another_can_start() -> None:
    async def scenario() -> None:
        server = _Server()
        first = _leader(server, "a")
        await first.acquire()
        keeping = asyncio.create_task(first.keep())
        second = asyncio.create_task(_leader(server, "b").acquire())
        await asyncio.sleep(30)
        server.down_for.add("a")
        await keeping
        assert not second.done(), "two must never work at once"
        assert server.holder == "a"
        await second
        assert server.holder == "b"

    run_virtually(scenario())


def test_a_server_that_hangs_does_not_keep_the_holder_from_giving_up_in_time() -> None:
    async def scenario() -> float:
        server = _Server()
        leader = Leader(server.for_replica("a"), namespace="d", name="l", identity="a")
        await leader.acquire()
        renewed_s = asyncio.get_running_loop().time()
        server.hangs = True
        await leader.keep()
        return asyncio.get_running_loop().time() - renewed_s

    assert run_virtually(scenario()) < 12.5


def test_a_short_outage_does_not_cost_the_lead() -> None:
    async def scenario() -> None:
        server = _Server()
        first = _leader(server, "a")
        await first.acquire()
        keeping = asyncio.create_task(first.keep())
        for _ in range(10):
            server.down_for.add("a")
            await asyncio.sleep(5)
            server.down_for.clear()
            await asyncio.sleep(5)
        assert not keeping.done()
        keeping.cancel()

    run_virtually(scenario())


def test_who_finds_another_holder_stops_at_once() -> None:
    async def scenario() -> None:
        server = _Server()
        first = _leader(server, "a")
        await first.acquire()
        assert server.lease is not None
        server.store({**server.lease, "spec": {**server.lease["spec"], "holderIdentity": "b"}})
        assert "another" in await first.keep()

    run_virtually(scenario())


def test_of_many_that_come_at_once_exactly_one_works() -> None:
    async def scenario() -> None:
        server = _Server()
        tries = [asyncio.create_task(_leader(server, name).acquire()) for name in "abcdef"]
        await asyncio.sleep(10)
        assert sum(task.done() for task in tries) == 1
        for task in tries:
            task.cancel()

    run_virtually(scenario())
