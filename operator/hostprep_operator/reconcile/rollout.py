"""One pool's rollout: what may begin, and on which nodes.

Three things begin on a node: its first preparation, a change where the pool serves, and the
release. All three share `maxUnavailable`, so that no slip reaches a fleet faster than a change
would. Outside of the budget stand

- a node that joins (it serves nothing yet, and a burst waits for it),
- a change or a release that waits for leases (engines may run for weeks, and the memory serves),
- a first preparation that failed (nothing was lost there, and the others need not wait),
- and a first preparation or a release on a node without a living agent, which may be dead for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hostprep.api.node_resource import Phase, PoolEntry, PoolStatus
from hostprep_operator.marks import Marks
from hostprep_operator.reconcile.assign import (
    SERVING,
    is_current,
    is_joining,
    is_restored,
    pool_ready,
    usable,
)
from hostprep_operator.reconcile.changes import Grants, NodeView
from hostprep_operator.reconcile.node_conditions import (
    unreachable,
    unreachable_at_s,
    unreachable_since_s,
)
from hostprep_operator.reconcile.release import is_due, is_retained
from hostprep_operator.records import NodeRecord, PoolRecord

Beginning: TypeAlias = Literal["prepare", "change", "release"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node as one pool sees it: it selects the node, or the node still has an entry of it."""

    node: NodeRecord
    selected: bool
    entry: PoolEntry | None
    current: bool
    """Its entry asks for what the pool asks for."""
    ready: bool
    """The agent says that exactly this entry serves, blocked or not."""
    joining: bool
    restored: bool
    """Without its entry by a slip: it comes back without a turn."""
    report: PoolStatus | None
    """Of this boot, whichever entry it answers."""
    agent_since_s: Mapping[str, float] = field(default_factory=dict)
    """Since when conditions of the agent's hold, in this boot, by their type."""
    opened_for: bool = True
    """Whether this pool was there when the node was opened, as far as its marks tell."""
    reachable: bool = True
    """Whether an agent lives there. Where none does, what begins would hold up all others."""
    unreachable_at_s: float | None = None
    """When it becomes unreachable if nothing else happens."""
    unreachable_since_s: float | None = None
    """Since when no agent can act there; None where one can."""

    @property
    def name(self) -> str:
        """The node's."""
        return self.node.name

    @property
    def served(self) -> bool:
        """Whether the node was opened in this boot with this pool: what it lacks now, it had."""
        opened_boot = Marks.parse(self.node.marks).opened_boot
        return self.opened_for and opened_boot == self.node.boot_id != ""

    @property
    def leased(self) -> bool:
        """Whether an engine holds one of its regions."""
        return self.report is not None and self.report.regions_leased > 0

    @property
    def blocked(self) -> bool:
        """Whether a change waits there for leases, and for nothing else."""
        return self.ready and self.report is not None and self.report.phase is Phase.BLOCKED

    @property
    def changing(self) -> bool:
        """Whether it served, its entry was changed, and it does not serve again yet."""
        was = self.report.phase if self.report is not None else None
        return self.current and not self.ready and was in (*SERVING, Phase.RESIZING)

    @property
    def leaving(self) -> bool:
        """Whether nothing asks for its memory any more, which it still keeps."""
        return not self.selected and self.entry is not None and not self.entry.absent


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What a rollout lets begin, and what it does not."""

    grants: Grants
    waiting: Counter[Beginning] = field(default_factory=Counter)
    """Nodes where something is to begin, granted or not yet."""
    held: Counter[Beginning] = field(default_factory=Counter)
    """Nodes where something would begin were the rollout not paused, or partitioned."""
    changing: int = 0
    """Nodes that were told a change, and do not serve again yet."""


def member_of(pool: PoolRecord, view: NodeView) -> Member | None:
    """Return how the pool stands on a node; None where it has nothing to do with it."""
    node = view.node
    if node is None or node.deleting:
        return None
    hmn = usable(node, view.hmn)
    entry = hmn.entry(pool.name) if hmn else None
    selected = pool.selects(node.labels)
    if not selected and (entry is None or (not entry.absent and is_retained(entry, pool))):
        return None
    status = hmn.status if hmn and hmn.status.boot_id == node.boot_id else None
    marks = Marks.parse(node.marks)
    return Member(
        node=node,
        selected=selected,
        entry=entry,
        current=selected and is_current(entry, pool),
        ready=pool_ready(node, hmn, entry),
        joining=is_joining(pool, node, view.now_s),
        restored=hmn is None and selected and is_restored(pool, node, marks),
        report=status.pool(pool.name) if status else None,
        agent_since_s={c.type: c.since_s or 0.0 for c in status.conditions} if status else {},
        # Marks of an older version, or of a node that no required pool ruled, name no pool at all.
        opened_for=not marks.policies or pool.name in marks.policies,
        reachable=unreachable(view, node) is None,
        unreachable_at_s=unreachable_at_s(view, node),
        unreachable_since_s=unreachable_since_s(view, node),
    )


def turns(pool: PoolRecord, members: Sequence[Member], former: Grants, *, now_s: float) -> Turns:
    """Return what may begin now. `former`: what was granted before, of which some has begun.

    A grant is kept until what it lets begin has begun. What is under way is read off the objects,
    so that a restarted operator counts the same.
    """
    wants = {m.name: want for m in members if (want := beginning(m, now_s)) is not None}
    within = _within(pool, members)
    held = {name for name in wants if pool.rollout.paused or name not in within}
    by_name = {member.name: member for member in members}
    waiting = [by_name[name] for name in sorted(wants.keys() - held)]
    busy = {member.name for member in members if _is_under_way(member)}
    free = {
        m.name
        for m in waiting
        if m.name in busy
        # Where it does not serve, another change takes nothing from anybody, and may mend it.
        or (wants[m.name] == "change" and not m.ready)
        or (wants[m.name] == "prepare" and (m.joining or m.restored))
    }
    taken = {m.name for m in waiting if m.name in former.nodes} - free
    room = max_unavailable(pool, len(members)) - len(busy) - len(taken)
    # Without leases first: there it will be over soonest.
    queue = sorted(
        (m for m in waiting if m.name not in free and m.name not in taken and m.reachable),
        key=lambda m: (m.leased, m.name),
    )
    granted = free | taken | {m.name for m in queue[: max(room, 0)]}
    return Turns(
        grants=Grants(uid=pool.uid, generation=pool.generation, nodes=frozenset(granted)),
        waiting=Counter(wants[m.name] for m in waiting),
        held=Counter(wants[name] for name in held),
        changing=sum(member.changing for member in members),
    )


def beginning(member: Member, now_s: float) -> Beginning | None:
    """Return what would begin on a node, had it a turn."""
    entry = member.entry
    if not member.selected:
        due = entry is not None and not entry.absent and is_due(entry, now_s)
        return "release" if due else None
    if entry is None:
        return "prepare"
    return "change" if not member.current and not entry.absent else None


def max_unavailable(pool: PoolRecord, members: int) -> int:
    """Return the number of nodes; a share is of all that have to do with the pool, rounded up."""
    return max(_number_of(pool.rollout.max_unavailable, members), 1)


def _number_of(limit: int | str, count: int) -> int:
    """Return a number of nodes, or that share of `count`, rounded up."""
    if isinstance(limit, int):
        return limit
    digits = limit.removesuffix("%")
    percent = int(digits) if digits.isdigit() else 0
    return -(-count * percent // 100)


def _within(pool: PoolRecord, members: Iterable[Member]) -> set[str]:
    """Return the nodes of the pool's partition, all where it has none.

    A release is no part of a canary: nodes that the pool selects no more are within.
    """
    partition = pool.rollout.partition
    selected = sorted(member.name for member in members if member.selected)
    others = {member.name for member in members if not member.selected}
    if partition is None:
        return others | set(selected)
    if partition.selection is not None:
        chosen = [m.name for m in members if partition.selection.matches(m.node.labels)]
        return others | set(chosen)
    if partition.nodes is None:
        return others
    return others | set(selected[: _number_of(partition.nodes, len(selected))])


def _is_under_way(member: Member) -> bool:
    """Whether something has begun on the node that keeps, or may keep, memory from engines."""
    entry, report = member.entry, member.report
    if entry is None or member.ready:
        return False
    if member.leaving:
        return False  # nothing asks for what it lacks; its release takes a turn when it is due
    if entry.absent:
        return member.reachable and not member.leased
    if report is not None and report.phase in (Phase.FAILED, Phase.DEGRADED):
        return member.served
    return member.served or (member.reachable and not member.joining)
