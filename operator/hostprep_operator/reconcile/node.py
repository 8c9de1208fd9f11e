"""One node: its HostMemoryNode's entries, and its marks. A pure function of what is there.

Writes come in an order in which every prefix is safe: what closes a node precedes what changes
its memory, and a reconcile that starts again after any of them ends where this one would have.
"""

from __future__ import annotations

from collections.abc import Mapping

from hostprep.api.conditions import ConditionStatus, format_time
from hostprep.api.names import READY_LABEL_PREFIX
from hostprep_operator.marks import Marks
from hostprep_operator.reconcile.assign import Assignment, assign, selecting, usable
from hostprep_operator.reconcile.changes import (
    Cause,
    EventNote,
    NodeChanges,
    NodeFacts,
    NodeState,
    NodeView,
)
from hostprep_operator.reconcile.node_conditions import (
    NodeContext,
    detect_reboot,
    unreachable,
    unreachable_at_s,
)
from hostprep_operator.reconcile.release import releasing_condition
from hostprep_operator.reconcile.taint_and_labels import (
    Marking,
    closed_since_s,
    labels_of_deleted_pools,
    mark,
    mark_labels_only,
    mark_waiting,
    strip_node,
)
from hostprep_operator.records import HostMemoryNodeRecord, NodeRecord, PoolRecord

_STATES: Mapping[ConditionStatus, NodeState] = {
    "True": "ready",
    "False": "closed",
    "Unknown": "unknown",
}


def reconcile_node(view: NodeView) -> NodeChanges:
    """Return what is to be written for this node; nothing where all is as it is to be.

    A node that does not exist, or is on its way out, is left alone: its HostMemoryNode goes with
    it by its ownerReference.
    """
    node = view.node
    if node is None or node.deleting:
        return NodeChanges()
    marks, assignment = Marks.parse(node.marks), assign(view, node)
    unknown = assignment.unknown | _unknown_labels(view, marks)
    if unknown:
        return NodeChanges(unknown_pools=unknown)
    write = () if assignment.write is None else (assignment.write,)
    hmn, news = usable(node, view.hmn), _release_events(view.hmn, assignment)
    facts = NodeFacts(state="releasing" if _is_releasing(assignment) else None)
    chosen, away = _marked_by(view, node, assignment), unreachable(view, node)
    if not chosen:
        releasing = releasing_condition(
            assignment.entries, pools=view.pools, hmn=hmn, away=away, now_s=view.now_s
        )
        left = () if releasing is None else (releasing,)
        labels = labels_of_deleted_pools(view, marks, node, hmn, assignment)
        stripped = strip_node(node, view.settings, left=left, left_labels=labels, now_s=view.now_s)
        return NodeChanges(
            writes=(*stripped, *write),
            events=news,
            recheck_at_s=min(_changes_at_s(view, node, assignment), default=None),
            facts=facts,
        )
    required = tuple(pool for pool in chosen if pool.readiness.required)
    context = NodeContext(
        view=view,
        node=node,
        hmn=hmn,
        assignment=assignment,
        chosen=chosen,
        required=tuple(pool for pool in required if assignment.entry(pool.name)),
        marks=marks,
        waiting=tuple(pool for pool in required if not assignment.entry(pool.name)),
    )
    if not context.required:
        marked = mark_waiting(context) if context.waiting else mark_labels_only(context)
        waiting = NodeFacts(state="unknown" if away else "waiting")
        return NodeChanges(
            writes=(*marked, *write),
            events=news,
            recheck_at_s=min(_changes_at_s(view, node, assignment), default=None),
            facts=waiting if context.waiting else facts,
        )
    marking = mark(context)
    return NodeChanges(
        writes=(*marking.writes, *write),
        events=(*news, *_events(context, marking)),
        recheck_at_s=_recheck_at_s(context, marking),
        facts=_facts(context, marking),
    )


def _marked_by(view: NodeView, node: NodeRecord, assignment: Assignment) -> tuple[PoolRecord, ...]:
    """Return the pools that the node is marked by, the ruling first.

    Those that select it, and those that do so no more while their memory is kept: a label that
    comes back within the grace period finds the node as it was, open and labelled.
    """
    chosen = selecting(view.pools, node)
    kept = {
        (entry.name, entry.uid)
        for entry in assignment.entries
        if entry.release_after_s is not None and not entry.absent
    }
    leaving = [pool for pool in view.pools if (pool.name, pool.uid) in kept]
    return tuple(sorted((*chosen, *leaving), key=lambda pool: pool.rank))


def _is_releasing(assignment: Assignment) -> bool:
    """Whether memory is there that nothing asks for."""
    return any(entry.absent or entry.release_after_s is not None for entry in assignment.entries)


def _unknown_labels(view: NodeView, marks: Marks) -> frozenset[str]:
    """Return the pools whose ready labels are on the node, and which the cache lacks."""
    named = {key.removeprefix(READY_LABEL_PREFIX) for key in marks.labels}
    return frozenset(named - {pool.name for pool in view.pools} - view.gone_pools)


def _changes_at_s(view: NodeView, node: NodeRecord, assignment: Assignment) -> list[float]:
    """Return when time alone changes what any node says: its agent is given up, a grace ends."""
    unreachable_s = unreachable_at_s(view, node)
    return ([] if unreachable_s is None else [unreachable_s]) + [
        entry.release_after_s
        for entry in assignment.entries
        if entry.release_after_s is not None and entry.release_after_s > view.now_s
    ]


def _recheck_at_s(context: NodeContext, marking: Marking) -> float | None:
    times, move = _changes_at_s(context.view, context.node, context.assignment), marking.transition
    if not move.marks.is_open and not move.marks.deadline:
        times.append(_closed_since_s(context, marking) + context.readiness.deadline_s)
    return min(times, default=None)


def _closed_since_s(context: NodeContext, marking: Marking) -> float:
    closing = marking.transition.cause is not None
    return context.view.now_s if closing else closed_since_s(context)


def _facts(context: NodeContext, marking: Marking) -> NodeFacts:
    move, seconds = marking.transition, None
    if move.opened and not context.marks.is_open:
        seconds = max(context.view.now_s - closed_since_s(context), 0.0)
    return NodeFacts(
        state=_STATES[marking.condition.status],
        opened=move.opened,
        closed_cause=move.cause,
        closed_since_s=None if move.marks.is_open else _closed_since_s(context, marking),
        seconds_to_ready=seconds,
        deadline_exceeded=move.deadline,
        reboot_detected=detect_reboot(context) != "",
    )


def _release_events(
    hmn: HostMemoryNodeRecord | None, assignment: Assignment
) -> tuple[EventNote, ...]:
    """Return what becomes of memory that nothing asks for: kept, given back, or wanted again."""
    notes: list[EventNote] = []
    if assignment.released:
        message = f"The memory of {', '.join(assignment.released)} was given back to the node."
        notes.append(EventNote("Normal", "MemoryReleased", message))
    for before in hmn.entries if hmn else ():
        entry = assignment.entry(before.name)
        if entry is None or entry == before:
            continue
        left, leaves = before.release_after_s is not None, entry.release_after_s is not None
        if leaves and not left and entry.release_after_s is not None:
            after = format_time(entry.release_after_s)
            message = f"No pool asks for the memory of {entry.name} any more: kept until {after}."
            notes.append(EventNote("Warning", "ReleaseScheduled", message))
        elif entry.absent and not before.absent:
            message = f"The memory of {entry.name} is given back: the agent was told to."
            notes.append(EventNote("Normal", "ReleaseStarted", message))
        elif (left or before.absent) and not leaves and not entry.absent:
            message = f"{entry.name} is asked for again: its memory stays."
            notes.append(EventNote("Normal", "ReleaseCancelled", message))
    return tuple(notes)


def _events(context: NodeContext, marking: Marking) -> tuple[EventNote, ...]:
    move, message = marking.transition, marking.condition.message
    if move.opened:
        return (EventNote("Normal", "MemoryReady", f"Host memory is ready: {message}"),)
    if move.cause is not None:
        closed = move.taint == "add" or _is_tainted(context)
        reason = "MemoryClosed" if closed else "MemoryNotReady"
        by_rule = context.readiness.profile == "NodeReadinessController"
        message = f"{_why(move.cause, closed=closed, by_rule=by_rule)} {message}"
        return (EventNote("Normal" if move.cause == "join" else "Warning", reason, message),)
    if move.deadline:
        within_s = context.readiness.deadline_s
        late = f"Host memory is not ready after {within_s:.0f} s."
        if _is_tainted(context):
            late = f"Host memory is not ready after {within_s:.0f} s; the node stays closed."
        state = "Opened without host memory." if move.without else late
        return (EventNote("Warning", "DeadlineExceeded", f"{state} {message}"),)
    return ()


def _is_tainted(context: NodeContext) -> bool:
    """Whether the taint that the ruling pool names keeps pods away."""
    key = context.readiness.taint
    return any(taint.get("key") == key for taint in context.node.taints)


def _why(cause: Cause, *, closed: bool, by_rule: bool) -> str:
    """Return why, without saying that a node is closed which takes pods as before.

    `by_rule`: node-readiness-controller closes it once it has read the condition, or has no rule
    for this node: nobody here can say which.
    """
    state = "Closed" if closed else "Not closed to pods, but without its host memory"
    if by_rule:
        state = "Without its host memory (closed to pods where a NodeReadinessRule asks for it)"
    return {
        "join": "Closed until its host memory is ready." if closed else f"{state} so far.",
        "reboot": f"{state}: the node was booted again, and its memory with it.",
        "repair": f"{state}: it needs repair.",
        "resize": f"{state}: it is being changed.",
    }[cause]
