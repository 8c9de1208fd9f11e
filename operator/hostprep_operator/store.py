"""The cache of the cluster's objects, and the keys that a change of one leads to.

Watches, lists and the answers to our own writes all come in through the EventHandler, in any order;
a version that is older than the known one changes nothing.

A cache is never proof that something does not exist: it may not be filled, or a watch may have
missed it. Code that releases memory asks the API server first (see `deletion_check`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from hostprep_operator.queue import KeyedQueue
from hostprep_operator.records import (
    AgentRecord,
    HostMemoryNodeRecord,
    NodeRecord,
    PoolRecord,
    Record,
)

_POOL_EVERY_S = 1.0
"""A pool's status is written at most that often."""
_POOL_SHARE = 10.0
"""To reconcile a pool of thousands of nodes takes a good part of a second: a tenth of the time."""
_POOL_SETTLE_S = 0.1
"""Changes of nodes come in bursts: the pool is reconciled once for all of them."""


class Kind(StrEnum):
    """The kinds of objects that the operator watches."""

    NODE = "node"
    POOL = "pool"
    HOST_MEMORY_NODE = "hostmemorynode"
    AGENT = "agent"


class Key(NamedTuple):
    """One thing to reconcile."""

    kind: Literal["node", "pool"]
    name: str


def number_of(version: str) -> int:
    """Return a resourceVersion as the integer that it is: one that grows (KEP-5504)."""
    return int(version) if version.isdecimal() else 0


R = TypeVar("R", bound=Record)

_RECORDS: Mapping[Kind, type[NodeRecord | PoolRecord | HostMemoryNodeRecord | AgentRecord]] = {
    Kind.NODE: NodeRecord,
    Kind.POOL: PoolRecord,
    Kind.HOST_MEMORY_NODE: HostMemoryNodeRecord,
    Kind.AGENT: AgentRecord,
}


@dataclass(frozen=True, slots=True)
class Change(Generic[R]):
    """What a record has changed: `old` is None for a new one, `new` for one that is gone."""

    name: str
    old: R | None
    new: R | None

    @property
    def matters(self) -> bool:
        """Whether old and new differ in anything that the operator acts upon."""
        return self.old != self.new


class Store(dict[str, R]):
    """Records of one kind, by name; changed by apply() and remove() only.

    An older version never replaces a newer one, wherever it comes from.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gone: dict[str, int] = {}
        """Name to the version in which it went: a late answer must not bring it back."""

    def is_news(self, name: str, resource_version: str) -> bool:
        """Whether that version is newer than the known one, or than the end of the object."""
        old = self.get(name)
        known = number_of(old.resource_version) if old else self._gone.get(name, -1)
        return number_of(resource_version) > known

    def apply(self, record: R) -> Change[R]:
        """Take a record unless a newer one is known."""
        old = self.get(record.name)
        if not self.is_news(record.name, record.resource_version):
            return Change(record.name, old, old)
        self._gone.pop(record.name, None)
        self[record.name] = record
        return Change(record.name, old, record)

    def remove(self, name: str, *, uid: str, resource_version: str) -> Change[R]:
        """Drop that very object, which went in that version; another of the same name stays."""
        old = self.get(name)
        version = number_of(resource_version)
        if old is not None and (old.uid != uid or number_of(old.resource_version) > version):
            return Change(name, old, old)
        self._gone[name] = max(version, self._gone.get(name, -1))
        self.pop(name, None)
        return Change(name, old, None)

    def forget_gone(self, before: int) -> None:
        """Forget what went before that version: no answer that old is still under way."""
        self._gone = {name: version for name, version in self._gone.items() if version > before}


class Cache:
    """All four kinds, with the indexes that keep an event's cost at O(pools)."""

    def __init__(self) -> None:
        self.nodes: Store[NodeRecord] = Store()
        self.pools: Store[PoolRecord] = Store()
        self.host_memory_nodes: Store[HostMemoryNodeRecord] = Store()
        self.agents: Store[AgentRecord] = Store()
        """By the name of the Pod."""
        self.stores: Mapping[Kind, Store[Any]] = {
            Kind.NODE: self.nodes,
            Kind.POOL: self.pools,
            Kind.HOST_MEMORY_NODE: self.host_memory_nodes,
            Kind.AGENT: self.agents,
        }
        self._selected: dict[str, set[str]] = {}
        """Pool to the names of the nodes that it selects."""
        self._agents_of: dict[str, set[str]] = {}
        """Node to the names of its agents' Pods."""

    def selected(self, pool: str) -> set[str]:
        """Return the names of the nodes that the pool selects; not to be changed."""
        return self._selected.get(pool, set())

    def pools_of(self, node: str) -> list[PoolRecord]:
        """Return the pools that select the node."""
        return [pool for pool in self.pools.values() if node in self.selected(pool.name)]

    def agents_of(self, node: str) -> list[AgentRecord]:
        """Return the agents' Pods on the node."""
        names = self._agents_of.get(node, set())
        return [self.agents[name] for name in names if name in self.agents]

    def nodes_with_entry(self, pool: str) -> Iterator[str]:
        """Yield the nodes whose HostMemoryNode has an entry of that pool: O(nodes)."""
        for record in self.host_memory_nodes.values():
            if any(entry.name == pool for entry in record.entries):
                yield record.name

    def node_changed(self, change: Change[NodeRecord]) -> set[str]:
        """Bring the index up to date; returns the pools that gained or lost the node."""
        old, new = change.old, change.new
        if old is not None and new is not None and old.labels == new.labels:
            return set()
        name, moved = change.name, set()
        for pool in self.pools.values():
            members = self._selected.setdefault(pool.name, set())
            before = name in members
            now = new is not None and pool.selects(new.labels)
            if before != now:
                (members.add if now else members.discard)(name)
                moved.add(pool.name)
        return moved

    def pool_changed(self, change: Change[PoolRecord]) -> set[str]:
        """Bring the index up to date; returns the nodes that the pool gained or lost."""
        old, new = change.old, change.new
        if new is None:
            return self._selected.pop(old.name, set()) if old else set()
        if old is not None and old.selection == new.selection:
            return set()
        before = self._selected.get(new.name, set())
        now = {node.name for node in self.nodes.values() if new.selects(node.labels)}
        self._selected[new.name] = now
        return before ^ now

    def agent_changed(self, change: Change[AgentRecord]) -> set[str]:
        """Bring the index up to date; returns the nodes whose agent came, went or changed."""
        nodes = set()
        for record, is_there in ((change.old, False), (change.new, True)):
            if record is None or not record.node_name:
                continue
            nodes.add(record.node_name)
            pods = self._agents_of.setdefault(record.node_name, set())
            (pods.add if is_there else pods.discard)(record.name)
            if not pods:
                del self._agents_of[record.node_name]
        return nodes


class EventHandler:
    """Fills the cache, and adds the keys to the queue that a change leads to."""

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
        self._on_change: Mapping[Kind, Callable[[Change[Any]], None]] = {
            Kind.NODE: self._node,
            Kind.POOL: self._pool,
            Kind.HOST_MEMORY_NODE: self._host_memory_node,
            Kind.AGENT: self._agent,
        }
        self._pool_due_s: dict[str, float] = {}
        self.gone_pools: set[str] = set()
        """Pools that do not exist, by a read of the API server."""
        self.former_pools: dict[str, PoolRecord] = {}
        """Pools that were deleted, as they were last."""
        self.agent_gone_s: dict[str, float] = {}
        """Node to when its agent's last Pod went, by the wall clock."""

    def open(self) -> None:
        """Let changes add keys from now on; before, the cache is not complete.

        Everything that is known is reconciled once.
        """
        self._open = True
        now_s = self._wall_clock()
        names = self._cache.nodes.keys() | self._cache.host_memory_nodes.keys()
        for name in sorted(names):
            if not self._cache.agents_of(name) and not self._is_known_to_lack_an_agent(name):
                self.agent_gone_s[name] = now_s
            self._queue.add(Key("node", name))
        for pool in self._cache.pools:
            self.enqueue_pool(pool)

    def observed(self, kind: Kind, document: Mapping[str, Any]) -> None:
        """Take an object in that version; an older one than is known changes nothing.

        Spares reading what is not news: the echo of our own write, mostly.
        """
        store, metadata = self._cache.stores[kind], document["metadata"]
        if store.is_news(metadata["name"], metadata.get("resourceVersion") or ""):
            self._changed(kind, store.apply(_RECORDS[kind].from_json(document)))

    def deleted(self, kind: Kind, document: Mapping[str, Any]) -> None:
        """Record that an object was deleted; the document is its last version."""
        metadata = document["metadata"]
        self.vanished(
            kind,
            metadata["name"],
            uid=metadata.get("uid") or "",
            resource_version=metadata.get("resourceVersion") or "",
        )
        if kind is Kind.POOL and metadata["name"] in self.former_pools:
            # Where the watch was broken, its last change was not reported by itself.
            self.former_pools[metadata["name"]] = PoolRecord.from_json(document).as_gone()

    def vanished(self, kind: Kind, name: str, *, uid: str, resource_version: str) -> None:
        """Record that this very object is gone as of that version."""
        store = self._cache.stores[kind]
        self._changed(kind, store.remove(name, uid=uid, resource_version=resource_version))

    def enqueue_pool(self, name: str) -> None:
        """Add a pool's key soon, and not more than once a second."""
        if not self._open:
            return
        due_s = self._pool_due_s.get(name, 0.0)
        delay_s = max(_POOL_SETTLE_S, due_s - asyncio.get_running_loop().time())
        self._queue.add_after(Key("pool", name), delay_s)

    def pool_reconciled(self, name: str, took_s: float) -> None:
        """Record that a pool was reconciled, and how much processor time that took."""
        pause_s = max(_POOL_EVERY_S, took_s * _POOL_SHARE)
        self._pool_due_s[name] = asyncio.get_running_loop().time() + pause_s

    def _changed(self, kind: Kind, change: Change[Any]) -> None:
        if kind is Kind.POOL:
            if change.new is not None:
                self.gone_pools.discard(change.name)
                self.former_pools.pop(change.name, None)
            elif change.old is not None:
                self.former_pools[change.name] = change.old.as_gone()
        if change.matters:
            self._on_change[kind](change)

    def _node(self, change: Change[NodeRecord]) -> None:
        old, new, name = change.old, change.new, change.name
        pools = self._cache.node_changed(change)
        if new is None:
            self.agent_gone_s.pop(name, None)
        rebooted = old is not None and new is not None and old.boot_id != new.boot_id
        self._enqueue_node(name, urgent=rebooted)
        self._enqueue_pools(pools | self._pools_at(name))

    def _host_memory_node(self, change: Change[HostMemoryNodeRecord]) -> None:
        records = (record for record in (change.old, change.new) if record is not None)
        names = {entry.name for record in records for entry in record.entries}
        self._enqueue_node(change.name)
        self._enqueue_pools(names | {pool.name for pool in self._cache.pools_of(change.name)})

    def _pool(self, change: Change[PoolRecord]) -> None:
        old, new, pool = change.old, change.new, change.name
        moved = self._cache.pool_changed(change)
        self.enqueue_pool(pool)
        if old is None or new is None:
            moved |= set(self._cache.nodes_with_entry(pool))
        elif (old.uid, old.generation, old.deleting) == (new.uid, new.generation, new.deleting):
            return  # only its status
        for name in moved | self._cache.selected(pool):
            self._enqueue_node(name)

    def _agent(self, change: Change[AgentRecord]) -> None:
        for node in self._cache.agent_changed(change):
            if self._cache.agents_of(node):
                self.agent_gone_s.pop(node, None)
            elif self._open and node in self._cache.nodes:
                # For a node that went first it would never be read, and never be dropped.
                self.agent_gone_s[node] = self._wall_clock()
            self._enqueue_node(node)
            self._enqueue_pools(self._pools_at(node))

    def _pools_at(self, node: str) -> set[str]:
        """Return the pools that select the node, and those that it has an entry of."""
        holder = self._cache.host_memory_nodes.get(node)
        held = {entry.name for entry in holder.entries} if holder else set()
        return held | {pool.name for pool in self._cache.pools_of(node)}

    def _enqueue_node(self, name: str, *, urgent: bool = False) -> None:
        if self._open:
            self._queue.add(Key("node", name), urgent=urgent)

    def _enqueue_pools(self, names: set[str]) -> None:
        for name in names:  # of pools that are gone too: they give turns to release
            self.enqueue_pool(name)

    def _is_known_to_lack_an_agent(self, name: str) -> bool:
        """Whether the node's condition says so already: then the grace is over."""
        node = self._cache.nodes.get(name)
        return node is not None and any(c.reason == "NoAgent" for c in node.conditions.values())
