"""One pool: counts, conditions and the rollout, over the nodes that it selects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hostprep.api.node_resource import Phase
from hostprep_operator.reconcile.assign import usable
from hostprep_operator.reconcile.changes import EventNote, PoolChanges
from hostprep_operator.reconcile.pool_status import Tally, conditions_of, status_patch_of
from hostprep_operator.reconcile.rollout import Member, grant, member_of, waits
from hostprep_operator.records import HostMemoryNodeRecord, NodeRecord, PoolRecord

__all__ = ["PoolChanges", "reconcile_pool"]

_TROUBLE = {Phase.DEGRADED: "degraded", Phase.FAILED: "failed"}


def reconcile_pool(
    pool: PoolRecord,
    members: Iterable[tuple[NodeRecord, HostMemoryNodeRecord | None]],
    *,
    pools: Iterable[PoolRecord],
    grants: frozenset[str],
    now_s: float,
) -> PoolChanges:
    """Return the pool's status, if it says something new, and the nodes that may change now.

    `members` are the nodes that the pool selects and those with an entry of its name; others
    are passed over. `pools` are all pools, this one among them or not.
    """
    selected: list[tuple[NodeRecord, Member]] = []
    releasing = 0
    for node, hmn in members:
        if node.deleting:
            continue
        if pool.selects(node.labels):
            selected.append((node, member_of(pool, node, hmn)))
        elif _is_releasing(pool, node, hmn):
            releasing += 1
    granted = grant(pool, [member for _, member in selected], grants)
    tally = _tally(selected, granted, releasing)
    tally.ruled_by.update(_ruled_by(pool, (node for node, _ in selected), pools))
    patch = None if pool.deleting else status_patch_of(pool, tally, now_s=now_s)
    return PoolChanges(
        status_patch=patch,
        grants=granted,
        events=() if patch is None else _events(pool, tally),
        counts=tally.counts,
    )


def _is_releasing(pool: PoolRecord, node: NodeRecord, hmn: HostMemoryNodeRecord | None) -> bool:
    hmn = usable(node, hmn)
    entry = hmn.entry(pool.name) if hmn else None
    return entry is not None and entry.absent


def _tally(
    selected: list[tuple[NodeRecord, Member]],
    granted: frozenset[str],
    releasing: int,
) -> Tally:
    counts = dict.fromkeys(("ready", "preparing", "degraded", "failed", "updated"), 0)
    reasons: Counter[str] = Counter()
    ready_bytes = rolling = 0
    for _, member in selected:
        state = _state(member)
        if state in counts:
            counts[state] += 1
        if member.report is not None:
            ready_bytes += member.report.ready_bytes
            if state in _TROUBLE.values():
                reasons[member.report.reason or member.report.phase.value] += 1
        counts["updated"] += member.current
        rolling += member.name in granted or waits(member)
    total = len(selected)
    counts |= {"selected": total, "releasing": releasing, "unavailable": total - counts["ready"]}
    return Tally(counts=counts, ready_bytes=ready_bytes, rolling=rolling, reasons=reasons)


def _state(member: Member) -> str:
    """Return the count that the node belongs to; `unknown` is only unavailable."""
    if member.ready:
        return "ready" if member.known else "unknown"
    phase = member.report.phase if member.report else Phase.PENDING
    return _TROUBLE.get(phase, "preparing")


def _ruled_by(
    pool: PoolRecord, nodes: Iterable[NodeRecord], pools: Iterable[PoolRecord]
) -> Counter[str]:
    """Return which pools rule nodes of this one in another way; the nodes are mostly not asked."""
    ruled: Counter[str] = Counter()
    above = sorted(
        (p for p in pools if p.readiness.required and p.rank < pool.rank), key=lambda p: p.rank
    )
    policy = pool.readiness.policy
    if not pool.readiness.required or all(p.readiness.policy == policy for p in above):
        return ruled
    for node in nodes:
        ruling = next((p for p in above if p.selects(node.labels)), None)
        if ruling is not None and ruling.readiness.policy != policy:
            ruled[ruling.name] += 1
    return ruled


def _events(pool: PoolRecord, tally: Tally) -> tuple[EventNote, ...]:
    """Say what is new since the status that the pool shows."""
    conditions = {condition.type: condition for condition in conditions_of(tally)}
    notes: list[EventNote] = []
    was, now = pool.conditions.get("Progressing"), conditions["Progressing"]
    was_rolling = was is not None and was.reason == "RollingOut"
    if now.reason == "RollingOut" and not was_rolling:
        notes.append(_note("Normal", "RolloutStarted", f"A change is rolled out: {now.message}"))
    elif was_rolling and now.reason != "RollingOut":
        updated = f"{tally.counts['updated']} of {tally.counts['selected']} nodes are updated."
        notes.append(_note("Normal", "RolloutFinished", updated))
    before = pool.conditions.get("Ready")
    if conditions["Ready"].reason == "NothingSelected" and (
        before is None or before.reason != "NothingSelected"
    ):
        notes.append(_note("Warning", "NothingSelected", conditions["Ready"].message))
    failed = tally.counts["failed"]
    if failed > 0 and failed >= 2 * pool.counts.get("failed", 0):
        notes.append(_note("Warning", "NodeFailed", conditions["Degraded"].message))
    return tuple(notes)


def _note(kind: str, reason: str, message: str) -> EventNote:
    return EventNote(
        "HostMemoryPool", "Warning" if kind == "Warning" else "Normal", reason, message
    )
