"""The operator's cache: newer wins, whoever brings it; selections kept as objects come and go."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep_operator.queue import KeyedQueue
from hostprep_operator.records import NodeRecord
from hostprep_operator.store import Cache, EventHandler, Key, Kind, Store
from tests.unit.hostprep_operator.virtual_time import run_virtually

pytestmark = pytest.mark.unit

JsonObject = dict[str, Any]


def _record(version: int, *, uid: str = "u", boot_id: str = "b") -> NodeRecord:
    return NodeRecord(name="n", uid=uid, resource_version=str(version), boot_id=boot_id)


def _node(name: str, version: int, *, boot_id: str = "b", **labels: str) -> JsonObject:
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": labels,
        },
        "status": {"nodeInfo": {"bootID": boot_id}},
    }


def _pool(name: str, version: int, generation: int = 1, **selector: str) -> JsonObject:
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "generation": generation,
        },
        "spec": {"nodeSelector": selector},
    }


def _hmn(name: str, version: int, *pools: str) -> JsonObject:
    return {
        "metadata": {"name": name, "uid": f"h-{name}", "resourceVersion": str(version)},
        "spec": {"pools": [{"name": pool, "state": "Present"} for pool in pools]},
    }


class _World:
    """A cache and a queue that nobody works off."""

    def __init__(self, *, opened: bool = True) -> None:
        self.cache = Cache()
        self.queue: KeyedQueue[Key] = KeyedQueue()
        self.handler = EventHandler(self.cache, self.queue, wall_clock=lambda: 1000.0)
        if opened:
            self.handler.open()

    async def looks(self) -> list[str]:
        """Names of the nodes that are to be looked at now; they are taken."""
        found = []
        while len(self.queue):
            key = await self.queue.get()
            self.queue.done(key)
            found.append(key.name)
        return found


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store: Store[NodeRecord] = Store()
    store.apply(_record(7))
    change = store.apply(_record(6, boot_id="old"))
    assert not change.matters
    assert store.get("n") == _record(7)


def test_what_is_gone_is_not_brought_back_by_a_late_answer_but_by_a_new_object() -> None:
    store: Store[NodeRecord] = Store()
    store.apply(_record(7))
    assert store.remove("n", uid="u", resource_version="9").matters
    store.apply(_record(8))
    assert store.get("n") is None
    store.apply(_record(10, uid="v"))
    assert store.get("n") is not None


def test_the_deletion_of_an_earlier_object_leaves_the_one_that_has_its_name_now() -> None:
    store: Store[NodeRecord] = Store()
    store.apply(_record(10, uid="v"))
    assert not store.remove("n", uid="u", resource_version="9").matters
    assert store.get("n") is not None


def test_versions_are_compared_as_numbers() -> None:
    store: Store[NodeRecord] = Store()
    store.apply(_record(9))
    assert store.apply(_record(10, boot_id="new")).matters


@given(st.permutations(range(1, 8)))
def test_whatever_the_order_of_arrival_the_newest_version_stays(order: list[int]) -> None:
    store: Store[NodeRecord] = Store()
    for version in order:
        store.apply(_record(version, boot_id=f"b{version}"))
    kept = store.get("n")
    assert kept is not None
    assert kept.boot_id == "b7"


def test_before_the_first_lists_are_complete_nothing_is_looked_at_and_then_everything() -> None:
    async def scenario() -> None:
        world = _World(opened=False)
        world.handler.observed(Kind.NODE, _node("a", 1))
        world.handler.observed(Kind.HOST_MEMORY_NODE, _hmn("b", 1, "kv"))
        assert await world.looks() == []
        world.handler.open()
        assert await world.looks() == ["a", "b"]

    run_virtually(scenario())


def test_a_heartbeat_leads_to_no_look() -> None:
    async def scenario() -> None:
        world = _World()
        world.handler.observed(Kind.NODE, _node("a", 1))
        assert await world.looks() == ["a"]
        world.handler.observed(Kind.NODE, _node("a", 2))
        assert await world.looks() == []
        record = world.cache.nodes.get("a")
        assert record is not None
        assert record.resource_version == "2", "the next write must carry the latest version"

    run_virtually(scenario())


def test_a_node_with_another_boot_id_is_looked_at_before_all_others() -> None:
    async def scenario() -> None:
        world = _World()
        for number, name in enumerate("abc"):
            world.handler.observed(Kind.NODE, _node(name, number + 1))
        await world.looks()
        world.handler.observed(Kind.NODE, _node("a", 11, x="1"))
        world.handler.observed(Kind.NODE, _node("b", 12, x="1"))
        world.handler.observed(Kind.NODE, _node("c", 13, boot_id="new"))
        assert await world.looks() == ["c", "a", "b"]

    run_virtually(scenario())


def test_selections_follow_labels_selectors_and_deletions() -> None:
    async def scenario() -> None:
        world = _World()
        handler, cache = world.handler, world.cache
        handler.observed(Kind.NODE, _node("a", 1, p="kv"))
        handler.observed(Kind.POOL, _pool("kv", 2, p="kv"))
        assert cache.selected("kv") == {"a"}
        handler.observed(Kind.NODE, _node("b", 3, p="kv"))
        handler.observed(Kind.NODE, _node("a", 4, p="none"))
        assert cache.selected("kv") == {"b"}
        handler.observed(Kind.POOL, _pool("kv", 5, generation=2, p="none"))
        assert cache.selected("kv") == {"a"}
        handler.vanished(Kind.NODE, "a", uid="uid-a", resource_version="6")
        assert cache.selected("kv") == set()
        handler.vanished(Kind.POOL, "kv", uid="uid-kv", resource_version="7")
        assert cache.selected("kv") == set()
        assert cache.pools_of("b") == []

    run_virtually(scenario())


def test_a_pools_change_leads_to_its_nodes_and_those_that_it_leaves() -> None:
    async def scenario() -> None:
        world = _World()
        for number, name in enumerate("abc"):
            world.handler.observed(Kind.NODE, _node(name, number + 1, **{name: "1"}))
        await world.looks()
        world.handler.observed(Kind.POOL, _pool("kv", 10, a="1"))
        assert await world.looks() == ["a"]
        world.handler.observed(Kind.POOL, _pool("kv", 11, generation=2, b="1"))
        assert sorted(await world.looks()) == ["a", "b"]

    run_virtually(scenario())


def test_the_status_of_a_pool_leads_to_no_look_at_its_nodes() -> None:
    async def scenario() -> None:
        world = _World()
        world.handler.observed(Kind.NODE, _node("a", 1))
        world.handler.observed(Kind.POOL, _pool("kv", 2))
        await world.looks()
        world.handler.observed(Kind.POOL, _pool("kv", 3) | {"status": {"ready": 1}})
        assert await world.looks() == []

    run_virtually(scenario())


def test_a_pool_that_goes_leads_to_every_node_with_an_entry_of_it() -> None:
    async def scenario() -> None:
        world = _World()
        world.handler.observed(Kind.NODE, _node("a", 1))
        world.handler.observed(Kind.HOST_MEMORY_NODE, _hmn("a", 2, "kv"))
        world.handler.observed(Kind.POOL, _pool("kv", 3, nobody="1"))
        await world.looks()
        world.handler.vanished(Kind.POOL, "kv", uid="uid-kv", resource_version="4")
        assert await world.looks() == ["a"]
        assert world.handler.gone_pools == set(), "that it is gone is not concluded from a cache"

    run_virtually(scenario())


def test_a_pool_is_looked_at_once_a_second_however_many_nodes_change() -> None:
    async def scenario() -> None:
        world = _World()
        loop = asyncio.get_running_loop()
        world.handler.observed(Kind.POOL, _pool("kv", 1))
        runs = []

        async def work() -> None:
            while True:
                key = await world.queue.get()
                if key.kind == "pool":
                    runs.append(loop.time())
                    world.handler.pool_reconciled(key.name, 0.0)
                world.queue.done(key)

        worker = asyncio.create_task(work())
        for number in range(500):
            world.handler.observed(Kind.NODE, _node(f"n{number}", number + 2))
            await asyncio.sleep(0.01)
        worker.cancel()
        gaps = [b - a for a, b in itertools.pairwise(runs)]
        assert 5 <= len(runs) <= 6
        assert min(gaps) > 0.999

    run_virtually(scenario())


def test_since_when_a_node_lacks_its_agent_is_remembered_until_another_comes() -> None:
    async def scenario() -> None:
        world = _World()
        world.handler.observed(Kind.NODE, _node("a", 1))
        pod = {
            "metadata": {"name": "p", "uid": "u", "resourceVersion": "1"},
            "spec": {"nodeName": "a"},
        }
        world.handler.observed(Kind.AGENT, pod)
        assert [agent.name for agent in world.cache.agents_of("a")] == ["p"]
        world.handler.deleted(Kind.AGENT, pod)
        assert world.cache.agents_of("a") == []
        assert world.handler.agent_gone_s == {"a": 1000.0}
        pod["metadata"] |= {"name": "q", "uid": "v", "resourceVersion": "2"}
        world.handler.observed(Kind.AGENT, pod)
        assert world.handler.agent_gone_s == {}

    run_virtually(scenario())


def test_an_agent_that_comes_or_goes_leads_to_the_pools_of_its_node() -> None:
    async def scenario() -> None:
        world = _World()
        world.handler.observed(Kind.NODE, _node("a", 1))
        world.handler.observed(Kind.HOST_MEMORY_NODE, _hmn("a", 2, "gone"))
        world.handler.observed(Kind.POOL, _pool("kv", 3))
        await asyncio.sleep(2)
        await world.looks()
        pod = _node("p", 4)
        pod["spec"] = {"nodeName": "a"}
        world.handler.observed(Kind.AGENT, pod)
        await asyncio.sleep(2)
        assert sorted(await world.looks()) == ["a", "gone", "kv"]

    run_virtually(scenario())


def test_nodes_that_come_and_go_leave_nothing_behind_when_their_agents_go_last() -> None:
    async def scenario() -> None:
        world = _World()
        for number in range(3):
            name, pod = f"n{number}", _node(f"p{number}", number + 1)
            pod["spec"] = {"nodeName": name}
            world.handler.observed(Kind.NODE, _node(name, number + 1))
            world.handler.observed(Kind.AGENT, pod)
            world.handler.deleted(Kind.NODE, _node(name, number + 1))
            world.handler.deleted(Kind.AGENT, pod)
        assert world.handler.agent_gone_s == {}

    run_virtually(scenario())


def test_a_pool_whose_look_takes_long_is_looked_at_less_often() -> None:
    async def scenario() -> None:
        world = _World()
        world.handler.observed(Kind.POOL, _pool("kv", 1))
        assert (await world.queue.get()).kind == "pool"
        world.handler.pool_reconciled("kv", 0.5)
        world.queue.done(Key("pool", "kv"))
        began_s = asyncio.get_running_loop().time()
        world.handler.enqueue_pool("kv")
        await world.queue.get()
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(5.0)

    run_virtually(scenario())


def test_a_deleted_pools_last_version_is_kept_though_its_change_was_not_reported() -> None:
    async def scenario() -> None:
        cache, queue = Cache(), KeyedQueue[Key]()
        handler = EventHandler(cache, queue)
        metadata = {"name": "kv", "uid": "u"}
        handler.observed(Kind.POOL, {"metadata": {**metadata, "resourceVersion": "1"}, "spec": {}})
        spec = {"release": {"when": "Immediately"}}
        handler.deleted(Kind.POOL, {"metadata": {**metadata, "resourceVersion": "3"}, "spec": spec})
        assert handler.former_pools["kv"].release.grace_s == 0.0
        assert handler.former_pools["kv"].gone

    asyncio.run(scenario())
