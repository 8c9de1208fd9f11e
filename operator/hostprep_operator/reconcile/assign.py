"""Pools × node × entries → entries: what one node must hold, and what it must give back.

Only an `Absent` entry releases memory, so it is made only of what is certain: labels that no
longer match, or a pool that is gone by a read of the API server; and only when the entry's grace
period is over and the pool's rollout lets this node go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hostprep.api.names import API_VERSION, NODE_KIND
from hostprep.api.node_resource import OPERATORS_FIELDS, Phase, PoolEntry, PoolStatus
from hostprep_operator.marks import Marks, policy_mark
from hostprep_operator.reconcile.changes import (
    CreateHostMemoryNode,
    DeleteHostMemoryNode,
    NodeView,
    PatchHostMemoryNodeSpec,
    Write,
)
from hostprep_operator.reconcile.release import absent, is_due, is_retained, leaving
from hostprep_operator.records import HostMemoryNodeRecord, NodeRecord, PoolRecord

SERVING = (Phase.READY, Phase.BLOCKED)
WAITING_REASONS = ("WaitingForTurn", "Paused", "Partitioned")
"""Of HostMemoryReady where a node's pools all wait for a turn that its rollouts give."""
JOINING_S = 900.0
"""For so long after its creation a node is joining: as long as autoscalers wait for it."""


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
    """Whether the entry asks for the memory that the pool asks for now."""
    if entry is None or entry.absent or entry.uid != pool.uid:
        return False
    return entry.policy == pool.policy or _memory(entry.policy) == _memory(pool.policy)


def pool_ready(node: NodeRecord, hmn: HostMemoryNodeRecord | None, entry: PoolEntry | None) -> bool:
    """Whether the status, of this boot, says that exactly this entry serves.

    Blocked is serving: all regions are there, as they were before a change that waits for leases.
    """
    if entry is None or entry.absent or not node.boot_id:
        return False
    report = report_of(node, hmn, entry)
    return report is not None and report.phase in SERVING


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


def is_joining(pool: PoolRecord, node: NodeRecord, now_s: float) -> bool:
    """Whether the node came no sooner than the pool, and so lately that it serves nothing yet.

    Its first preparation takes nothing from anybody, and a burst waits for it: no turn is needed.
    """
    return node.created_s >= pool.created_s and now_s - node.created_s < JOINING_S


def may_begin(pool: PoolRecord, node: NodeRecord) -> bool:
    """Whether the rollout holds nothing back on this node, as far as one node can tell.

    A partition by number takes the order of all nodes: there only a grant lets anything begin.
    """
    if pool.rollout.paused:
        return False
    partition = pool.rollout.partition
    if partition is None:
        return True
    return partition.selection is not None and partition.selection.matches(node.labels)


def assign(view: NodeView, node: NodeRecord) -> Assignment:
    """Return the entries that the node is to have, and the write that they need."""
    hmn = usable(node, view.hmn)
    chosen = {pool.name: pool for pool in selecting(view.pools, node)}
    existing = {pool.name: pool for pool in view.pools}
    entries: list[PoolEntry] = []
    unknown: set[str] = set()
    released: list[str] = []
    for entry in hmn.entries if hmn else ():
        pool = existing.get(entry.name) or view.former_pools.get(entry.name)
        if entry.name in chosen:
            entries.append(_kept(view, node, hmn, entry, chosen[entry.name]))
        elif entry.absent:
            if _has_released(hmn, entry):
                released.append(entry.name)
            else:
                entries.append(entry)
        elif entry.name not in existing and entry.name not in view.gone_pools:
            unknown.add(entry.name)
            entries.append(entry)
        elif not is_retained(entry, pool):
            entries.append(_given_up(view, entry, pool))
    names = {entry.name for entry in entries}
    entries += [
        _present(pool)
        for name, pool in sorted(chosen.items())
        if name not in names and _may_have_entry(view, node, pool)
    ]
    return Assignment(
        entries=tuple(entries),
        unknown=frozenset(unknown),
        released=tuple(released),
        write=_write(view.hmn, node, tuple(entries)),
    )


def is_restored(pool: PoolRecord, node: NodeRecord, marks: Marks) -> bool:
    """Whether the node was opened in this boot with exactly what the pool asks for.

    Then its HostMemoryNode was lost while the memory is there: to write the entry again is
    no beginning, and takes no turn.
    """
    is_opened = marks.opened_s is not None and marks.opened_boot == node.boot_id
    return is_opened and marks.policies.get(pool.name) == policy_mark(pool.policy)


def _may_have_entry(view: NodeView, node: NodeRecord, pool: PoolRecord) -> bool:
    """Whether a pool that selects the node may get its first entry there now."""
    if pool.name in view.granted:
        return True
    if may_begin(pool, node) and is_joining(pool, node, view.now_s):
        return True
    return usable(node, view.hmn) is None and is_restored(pool, node, Marks.parse(node.marks))


def _kept(
    view: NodeView,
    node: NodeRecord,
    hmn: HostMemoryNodeRecord | None,
    entry: PoolEntry,
    pool: PoolRecord,
) -> PoolEntry:
    """Return the entry of a pool that selects the node.

    What comes back to a pool is kept at once. A change waits for its turn where the pool serves;
    elsewhere for nothing but a rollout that is paused, or keeps to other nodes: of a partition by
    number the grants tell which.
    """
    if entry.absent:
        return _present(pool)
    kept = entry if entry.release_after_s is None else replace(entry, release_after_s=None)
    if is_current(kept, pool):
        return kept if kept.policy == pool.policy else replace(kept, policy=pool.policy)
    if pool.name in view.granted:
        return _present(pool)
    if pool_ready(node, hmn, entry) or not may_begin(pool, node):
        return kept
    return _present(pool)


def _given_up(view: NodeView, entry: PoolEntry, pool: PoolRecord | None) -> PoolEntry:
    """Return the entry of a pool that does not ask for this node, by all that is known."""
    after = leaving(entry, pool, view.now_s)
    if entry.name in view.granted and is_due(entry, view.now_s):
        return absent(entry)
    return after


def _present(pool: PoolRecord) -> PoolEntry:
    return PoolEntry(name=pool.name, uid=pool.uid, generation=pool.generation, policy=pool.policy)


def _memory(policy: object) -> object:
    """Return the part of a policy that memory depends on."""
    if not isinstance(policy, dict):
        return policy
    return {name: policy[name] for name in policy if name not in OPERATORS_FIELDS}


def _has_released(hmn: HostMemoryNodeRecord | None, entry: PoolEntry) -> bool:
    """Whether the agent has read that the pool is to go, and holds nothing of it any more."""
    return (
        hmn is not None
        and hmn.status.observed_generation >= hmn.generation
        and hmn.status.pool(entry.name) is None
    )


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
