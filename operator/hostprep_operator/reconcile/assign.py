"""Pools × node × entries → entries: what one node must hold, and what it must give back.

Only an `Absent` entry releases memory, so it is made only of what is certain: labels that no
longer match, or a pool that is gone by a read of the API server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hostprep.api.names import API_VERSION, NODE_KIND
from hostprep.api.node_resource import Phase, PoolEntry, PoolStatus
from hostprep_operator.reconcile.changes import (
    CreateHostMemoryNode,
    DeleteHostMemoryNode,
    NodeView,
    PatchHostMemoryNodeSpec,
    Write,
)
from hostprep_operator.records import HostMemoryNodeRecord, NodeRecord, PoolRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A node's desired entries."""

    entries: tuple[PoolEntry, ...] = ()
    unknown: frozenset[str] = frozenset()
    """Pools of entries that can neither be kept up to date nor given up yet."""
    released: tuple[str, ...] = ()
    """Pools whose memory the node has given back: their entries go."""
    write: Write | None = None
    """The one write of the HostMemoryNode that this takes; None where it is up to date."""

    def entry(self, name: str) -> PoolEntry | None:
        """Return the entry of that pool."""
        return next((entry for entry in self.entries if entry.name == name), None)


def selecting(pools: Iterable[PoolRecord], node: NodeRecord) -> tuple[PoolRecord, ...]:
    """Return the pools that select the node, the ruling first."""
    chosen = [pool for pool in pools if pool.selects(node.labels)]
    return tuple(sorted(chosen, key=lambda pool: pool.rank))


def usable(node: NodeRecord, hmn: HostMemoryNodeRecord | None) -> HostMemoryNodeRecord | None:
    """Return the HostMemoryNode if it is this very Node's and is to stay."""
    return hmn if hmn and hmn.owner_uid == node.uid and not hmn.deleting else None


def is_current(entry: PoolEntry | None, pool: PoolRecord) -> bool:
    """Whether the entry is the pool's as it is now."""
    return (
        entry is not None
        and not entry.absent
        and entry.uid == pool.uid
        and entry.policy == pool.policy
    )


def pool_ready(node: NodeRecord, hmn: HostMemoryNodeRecord | None, entry: PoolEntry | None) -> bool:
    """Whether the status, of this boot, says that exactly this entry is Ready."""
    if entry is None or entry.absent or not node.boot_id:
        return False
    report = report_of(node, hmn, entry)
    return report is not None and report.phase is Phase.READY


def report_of(
    node: NodeRecord, hmn: HostMemoryNodeRecord | None, entry: PoolEntry | None
) -> PoolStatus | None:
    """Return what the agent reports in this boot of exactly that entry."""
    if hmn is None or entry is None or hmn.status.boot_id != node.boot_id:
        return None
    report = hmn.status.pool(entry.name)
    if report is None or (report.uid, report.generation) != (entry.uid, entry.generation):
        return None
    return report


def assign(view: NodeView, node: NodeRecord) -> Assignment:
    """Return the entries that the node is to have, and the write that they need."""
    hmn = usable(node, view.hmn)
    chosen = {pool.name: pool for pool in selecting(view.pools, node)}
    existing = {pool.name: pool for pool in view.pools}
    entries: list[PoolEntry] = []
    unknown: set[str] = set()
    released: list[str] = []
    for entry in hmn.entries if hmn else ():
        pool = existing.get(entry.name)
        if entry.name in chosen:
            granted = entry.name in view.granted
            entries.append(_updated(node, hmn, entry, chosen[entry.name], granted=granted))
        elif entry.absent:
            if _has_released(hmn, entry):
                released.append(entry.name)
            else:
                entries.append(entry)
        elif pool is None and entry.name not in view.gone_pools:
            unknown.add(entry.name)
            entries.append(entry)
        elif not _retained(entry, pool):
            entries.append(replace(entry, absent=True, policy={}))
    names = {entry.name for entry in entries}
    entries += [_present(pool) for name, pool in sorted(chosen.items()) if name not in names]
    return Assignment(
        entries=tuple(entries),
        unknown=frozenset(unknown),
        released=tuple(released),
        write=_write(view.hmn, node, tuple(entries)),
    )


def _updated(
    node: NodeRecord,
    hmn: HostMemoryNodeRecord | None,
    entry: PoolEntry,
    pool: PoolRecord,
    *,
    granted: bool,
) -> PoolEntry:
    """Return the entry: a change waits for its turn where the pool serves, and only there."""
    if is_current(entry, pool) or (pool_ready(node, hmn, entry) and not granted):
        return entry
    return _present(pool)


def _present(pool: PoolRecord) -> PoolEntry:
    return PoolEntry(name=pool.name, uid=pool.uid, generation=pool.generation, policy=pool.policy)


def _has_released(hmn: HostMemoryNodeRecord | None, entry: PoolEntry) -> bool:
    """Whether the agent has read that the pool is to go, and holds nothing of it any more."""
    return (
        hmn is not None
        and hmn.status.observed_generation >= hmn.generation
        and hmn.status.pool(entry.name) is None
    )


def _retained(entry: PoolEntry, pool: PoolRecord | None) -> bool:
    """Return what the pool says while it exists (the same, by UID), else what the entry says."""
    if pool is not None and pool.uid == entry.uid:
        return pool.deletion_policy == "Retain"
    return entry.policy.get("deletionPolicy") == "Retain"


def _write(
    hmn: HostMemoryNodeRecord | None, node: NodeRecord, entries: tuple[PoolEntry, ...]
) -> Write | None:
    if hmn is None:
        owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid}
        body = {
            "apiVersion": API_VERSION,
            "kind": NODE_KIND,
            "metadata": {"name": node.name, "ownerReferences": [owner]},
            "spec": {"pools": [entry.to_json() for entry in entries]},
        }
        return CreateHostMemoryNode(body) if entries else None
    if hmn.deleting:
        return None
    if hmn.owner_uid != node.uid or not entries:
        return DeleteHostMemoryNode(uid=hmn.uid, resource_version=hmn.resource_version)
    if entries == hmn.entries:
        return None
    patch = {
        "metadata": {"resourceVersion": hmn.resource_version},
        "spec": {"pools": [entry.to_json() for entry in entries]},
    }
    return PatchHostMemoryNodeSpec(patch)
