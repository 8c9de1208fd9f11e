"""One pool's rollout: a change reaches as many serving nodes at once as `maxUnavailable` says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hostprep.api.names import HOST_MEMORY_READY
from hostprep.api.node_resource import Phase, PoolEntry, PoolStatus
from hostprep_operator.reconcile.assign import is_current, pool_ready, usable
from hostprep_operator.records import HostMemoryNodeRecord, NodeRecord, PoolRecord

_SERVED = (Phase.READY, Phase.RESIZING)


@dataclass(frozen=True, slots=True)
class Member:
    """A selected node, as one pool sees it."""

    node: NodeRecord
    current: bool
    """Its entry says what the pool says."""
    ready: bool
    changing: bool
    """It served, its entry was changed, and it does not serve again yet."""
    report: PoolStatus | None
    """Of this boot, whichever entry it answers."""

    @property
    def name(self) -> str:
        """The node's."""
        return self.node.name

    @property
    def known(self) -> bool:
        """Its HostMemoryReady is not Unknown. Where it is, a change would hold up all others."""
        condition = self.node.conditions.get(HOST_MEMORY_READY)
        return condition is None or condition.status != "Unknown"


def member_of(pool: PoolRecord, node: NodeRecord, hmn: HostMemoryNodeRecord | None) -> Member:
    """Return how the pool stands on a node that it selects."""
    hmn = usable(node, hmn)
    entry = hmn.entry(pool.name) if hmn else None
    report = hmn.status.pool(pool.name) if hmn and hmn.status.boot_id == node.boot_id else None
    current, ready = is_current(entry, pool), pool_ready(node, hmn, entry)
    return Member(
        node=node,
        current=current,
        ready=ready,
        changing=current and not ready and _served(entry, report),
        report=report,
    )


def grant(pool: PoolRecord, members: Iterable[Member], grants: frozenset[str]) -> frozenset[str]:
    """Return all nodes that may change now: those that are changing, and as many more as fit.

    A node keeps its grant until the pool is Ready there as it is to be. Those that change without
    a grant in memory (the operator was restarted) are found by what they are doing.
    """
    members = sorted(members, key=lambda member: member.name)
    busy = {
        member.name
        for member in members
        if member.changing or (member.name in grants and not (member.current and member.ready))
    }
    waiting = [m.name for m in members if waits(m) and m.name not in busy]
    room = max_unavailable(pool, len(members)) - len(busy)
    return frozenset(busy) | frozenset(waiting[: max(room, 0)])


def waits(member: Member) -> bool:
    """Return whether the pool serves there by an entry that is out of date."""
    return member.ready and member.known and not member.current


def max_unavailable(pool: PoolRecord, selected: int) -> int:
    """Return the number of nodes; a share is of the selected ones, rounded up, at least 1."""
    limit = pool.max_unavailable
    if isinstance(limit, int):
        return max(limit, 1)
    digits = limit.removesuffix("%")
    percent = int(digits) if digits.isdigit() else 0
    return max(-(-selected * percent // 100), 1)


def _served(entry: PoolEntry | None, report: PoolStatus | None) -> bool:
    """Return whether the report is of a pool that was Ready before the entry, or is resized."""
    if entry is None or report is None or report.phase not in _SERVED:
        return False
    return report.phase is Phase.RESIZING or (report.uid, report.generation) != (
        entry.uid,
        entry.generation,
    )
