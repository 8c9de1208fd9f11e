"""Where everything that is learnt of the cluster comes in: into the cache, and what follows of it.

Watches, lists and the answers to our own writes all pass through here, in any order; a version that
is older than the known one changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hostprep_operator.cache import Applied, Cache
from hostprep_operator.keys import Key, Kind
from hostprep_operator.queue import KeyedQueue
from hostprep_operator.records import AgentRecord, HostMemoryNodeRecord, NodeRecord, PoolRecord

__all__ = ["Intake"]

_POOL_EVERY_S = 1.0
"""A pool's status is written at most that often."""
_POOL_SHARE = 10.0
"""A look at a pool of thousands of nodes takes a good part of a second: it may have a tenth."""
_POOL_SETTLE_S = 0.1
"""Changes of nodes come in bursts: the pool is looked at once for all of them."""


class Intake:
    """Fills the cache and says which keys are to be looked at."""

    def __init__(
        self,
        cache: Cache,
        queue: KeyedQueue[Key],
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._wall_clock = wall_clock
        self._open = False
        self._pool_due_s: dict[str, float] = {}
        self.gone_pools: set[str] = set()
        """Pools of which the API server itself said that they do not exist."""
        self.agent_gone_s: dict[str, float] = {}
        """Node to when its agent's last Pod went, by the wall clock."""
        self.relisted: set[Kind] = set()
        """Kinds that kopf has read anew: what vanished before was not told to anybody."""
        self.on_relisted: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Let changes lead to looks from now on; before, the cache is not complete.

        Everything that is known is looked at once.
        """
        self._open = True
        now_s = self._wall_clock()
        names = self._cache.nodes.names() | self._cache.host_memory_nodes.names()
        for name in sorted(names):
            if not self._cache.agents_of(name) and not self._is_known_to_lack_an_agent(name):
                self.agent_gone_s[name] = now_s
            self._queue.add(Key("node", name))
        for pool in self._cache.pools:
            self.look_at_pool(pool.name)

    def seen(self, kind: Kind, document: Mapping[str, Any]) -> None:
        """Take an object in that version."""
        if not self._cache.store(kind).is_news(document["metadata"]):
            return  # the echo of our own write, mostly
        match kind:
            case Kind.NODE:
                self._node(self._cache.nodes.apply(NodeRecord.from_json(document)))
            case Kind.POOL:
                self._pool(self._cache.pools.apply(PoolRecord.from_json(document)))
            case Kind.HOST_MEMORY_NODE:
                record = HostMemoryNodeRecord.from_json(document)
                self._host_memory_node(self._cache.host_memory_nodes.apply(record))
            case Kind.AGENT:
                self._agent(self._cache.agents.apply(AgentRecord.from_json(document)))

    def gone(self, kind: Kind, document: Mapping[str, Any]) -> None:
        """Take note that an object was deleted; the document is its last version."""
        metadata = document["metadata"]
        self.vanished(
            kind,
            metadata["name"],
            uid=metadata.get("uid") or "",
            resource_version=metadata.get("resourceVersion") or "",
        )

    def vanished(self, kind: Kind, name: str, *, uid: str, resource_version: str) -> None:
        """Take note that this very object is gone as of that version."""
        known = {"uid": uid, "resource_version": resource_version}
        match kind:
            case Kind.NODE:
                self._node(self._cache.nodes.remove(name, **known))
            case Kind.POOL:
                self._pool(self._cache.pools.remove(name, **known))
            case Kind.HOST_MEMORY_NODE:
                self._host_memory_node(self._cache.host_memory_nodes.remove(name, **known))
            case Kind.AGENT:
                self._agent(self._cache.agents.remove(name, **known))

    def listed(self, kind: Kind) -> None:
        """Have that kind compared soon: kopf, which has read its list, tells not what vanished."""
        self.relisted.add(kind)
        self.on_relisted()

    def look_at_pool(self, name: str) -> None:
        """Have a pool looked at soon, and not more than once a second."""
        if not self._open:
            return
        due_s = self._pool_due_s.get(name, 0.0)
        delay_s = max(_POOL_SETTLE_S, due_s - asyncio.get_running_loop().time())
        self._queue.add_after(Key("pool", name), delay_s)

    def pool_ran(self, name: str, took_s: float) -> None:
        """Take note that a pool was looked at, and how long that kept the processor."""
        pause_s = max(_POOL_EVERY_S, took_s * _POOL_SHARE)
        self._pool_due_s[name] = asyncio.get_running_loop().time() + pause_s

    def _node(self, change: Applied[NodeRecord]) -> None:
        if not change.matters:
            return
        old, new = change.old, change.new
        pools = self._cache.node_changed(change)
        record = new or old
        if record is None:
            return
        if new is None:
            self.agent_gone_s.pop(record.name, None)
        rebooted = old is not None and new is not None and old.boot_id != new.boot_id
        self._look_at_node(record.name, urgent=rebooted)
        self._look_at_pools(pools | {pool.name for pool in self._cache.pools_of(record.name)})

    def _host_memory_node(self, change: Applied[HostMemoryNodeRecord]) -> None:
        if not change.matters:
            return
        names: set[str] = set()
        for record in (change.old, change.new):
            if record is not None:
                names |= {entry.name for entry in record.entries}
                self._look_at_node(record.name)
                names |= {pool.name for pool in self._cache.pools_of(record.name)}
        self._look_at_pools(names)

    def _pool(self, change: Applied[PoolRecord]) -> None:
        if change.new is not None:
            self.gone_pools.discard(change.new.name)
        if not change.matters:
            return
        moved = self._cache.pool_changed(change)
        record = change.new or change.old
        if record is None:
            return
        self.look_at_pool(record.name)
        if _is_only_its_status(change):
            return
        for name in moved | self._cache.selected(record.name):
            self._look_at_node(name)
        if change.old is None or change.new is None:
            for name in self._cache.nodes_with_entry(record.name):
                self._look_at_node(name)

    def _agent(self, change: Applied[AgentRecord]) -> None:
        if not change.matters:
            return
        for node in self._cache.agent_changed(change):
            if self._cache.agents_of(node):
                self.agent_gone_s.pop(node, None)
            elif self._open and self._cache.nodes.get(node) is not None:
                # Of a node that went first nobody asks, and nobody would ever forget it.
                self.agent_gone_s[node] = self._wall_clock()
            self._look_at_node(node)

    def _look_at_node(self, name: str, *, urgent: bool = False) -> None:
        if self._open:
            self._queue.add(Key("node", name), urgent=urgent)

    def _look_at_pools(self, names: Iterable[str]) -> None:
        for name in names:
            if self._cache.pools.get(name) is not None:
                self.look_at_pool(name)

    def _is_known_to_lack_an_agent(self, name: str) -> bool:
        """Whether the node says so already: then it has been so for long enough."""
        node = self._cache.nodes.get(name)
        return node is not None and any(c.reason == "NoAgent" for c in node.conditions.values())


def _is_only_its_status(change: Applied[PoolRecord]) -> bool:
    old, new = change.old, change.new
    if old is None or new is None:
        return False
    return (old.uid, old.generation, old.deleting) == (new.uid, new.generation, new.deleting)
