"""What the cluster looks like as far as we know: slim records by name, and who selects whom.

A cache is never proof that something does not exist: it may not be filled, or a watch may have
missed it. Whatever releases memory asks the API server first (see confirm.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from hostprep_operator.keys import Kind
from hostprep_operator.records import AgentRecord, HostMemoryNodeRecord, NodeRecord, PoolRecord

__all__ = ["Applied", "Cache", "Record", "Store"]


class Record(Protocol):
    """What every kind of record has."""

    @property
    def name(self) -> str:
        """Unique among its kind."""

    @property
    def uid(self) -> str:
        """Unique for ever."""

    @property
    def resource_version(self) -> str:
        """Grows with every change; not part of the record's equality."""


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Applied(Generic[R]):
    """What a record has changed: `old` is None for a new one, `new` for one that is gone."""

    old: R | None
    new: R | None

    @property
    def matters(self) -> bool:
        """Whether anything differs that we act upon."""
        return self.old != self.new


class Store(Generic[R]):
    """Records of one kind. An older version never replaces a newer one, wherever it comes from."""

    def __init__(self) -> None:
        self._records: dict[str, R] = {}
        self._gone: dict[str, int] = {}
        """Name to the version in which it went: a late answer must not bring it back."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R]:
        return iter(self._records.values())

    def names(self) -> set[str]:
        """Return the names of all records."""
        return set(self._records)

    def get(self, name: str) -> R | None:
        """Return the record of that name."""
        return self._records.get(name)

    def is_news(self, metadata: Mapping[str, Any]) -> bool:
        """Whether that version is newer than the known one; spares reading what is not."""
        old = self._records.get(metadata["name"])
        version = metadata.get("resourceVersion") or ""
        return old is None or _number(version) > _number(old.resource_version)

    def apply(self, record: R) -> Applied[R]:
        """Take a record unless a newer one is known."""
        old = self._records.get(record.name)
        version = _number(record.resource_version)
        if old is not None and version <= _number(old.resource_version):
            return Applied(old, old)
        if version <= self._gone.get(record.name, -1):
            return Applied(old, old)
        self._gone.pop(record.name, None)
        self._records[record.name] = record
        return Applied(old, record)

    def remove(self, name: str, *, uid: str, resource_version: str) -> Applied[R]:
        """Drop that very object, which went in that version; another of the same name stays."""
        old = self._records.get(name)
        version = _number(resource_version)
        if old is not None and (old.uid != uid or _number(old.resource_version) > version):
            return Applied(old, old)
        self._gone[name] = max(version, self._gone.get(name, -1))
        self._records.pop(name, None)
        return Applied(old, None)

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
        self._selected: dict[str, set[str]] = {}
        """Pool to the names of the nodes that it selects."""
        self._agents_of: dict[str, set[str]] = {}
        """Node to the names of its agents' Pods."""

    def store(self, kind: Kind) -> Store[Any]:
        """Return the records of that kind."""
        match kind:
            case Kind.NODE:
                return self.nodes
            case Kind.POOL:
                return self.pools
            case Kind.HOST_MEMORY_NODE:
                return self.host_memory_nodes
            case Kind.AGENT:
                return self.agents

    def selected(self, pool: str) -> set[str]:
        """Return the names of the nodes that the pool selects; not to be changed."""
        return self._selected.get(pool, set())

    def pools_of(self, node: str) -> list[PoolRecord]:
        """Return the pools that select the node."""
        return [pool for pool in self.pools if node in self.selected(pool.name)]

    def agents_of(self, node: str) -> list[AgentRecord]:
        """Return the agents' Pods on the node."""
        found = (self.agents.get(name) for name in self._agents_of.get(node, ()))
        return [agent for agent in found if agent is not None]

    def nodes_with_entry(self, pool: str) -> Iterator[str]:
        """Yield the nodes whose HostMemoryNode has an entry of that pool: O(nodes)."""
        for record in self.host_memory_nodes:
            if any(entry.name == pool for entry in record.entries):
                yield record.name

    def node_changed(self, change: Applied[NodeRecord]) -> set[str]:
        """Bring the index up to date; returns the pools that gained or lost the node."""
        old, new = change.old, change.new
        if old is not None and new is not None and old.labels == new.labels:
            return set()
        name = (new or old).name if (new or old) else ""  # type: ignore[union-attr]
        moved = set()
        for pool in self.pools:
            members = self._selected.setdefault(pool.name, set())
            if new is not None and pool.selects(new.labels):
                if name not in members:
                    members.add(name)
                    moved.add(pool.name)
            elif name in members:
                members.discard(name)
                moved.add(pool.name)
        return moved

    def pool_changed(self, change: Applied[PoolRecord]) -> set[str]:
        """Bring the index up to date; returns the nodes that the pool gained or lost."""
        old, new = change.old, change.new
        if new is None:
            return self._selected.pop(old.name, set()) if old else set()
        if old is not None and old.node_selector == new.node_selector:
            return set()
        before = self._selected.get(new.name, set())
        now = {node.name for node in self.nodes if new.selects(node.labels)}
        self._selected[new.name] = now
        return before ^ now

    def agent_changed(self, change: Applied[AgentRecord]) -> set[str]:
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


def _number(version: str) -> int:
    """Resource versions of one resource are integers that grow (KEP-5504)."""
    return int(version) if version.isdecimal() else 0
