"""One node: its HostMemoryNode's entries, and its marks. A pure function of what is there.

Writes come in an order in which every prefix is safe: what closes a node precedes what changes
its memory, and a reconcile that starts again after any of them ends where this one would have.
"""

from __future__ import annotations

from collections.abc import Mapping

from hostprep.api.conditions import ConditionStatus
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
from hostprep_operator.reconcile.node_conditions import NodeContext, detect_reboot, unreachable_at_s
from hostprep_operator.reconcile.taint_and_labels import (
    Marking,
    closed_since_s,
    mark,
    mark_labels_only,
    strip_node,
)

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
    chosen, released = selecting(view.pools, node), _released(assignment)
    if not chosen:
        return NodeChanges(writes=(*strip_node(node, view.settings), *write), events=released)
    context = NodeContext(
        view=view,
        node=node,
        hmn=usable(node, view.hmn),
        assignment=assignment,
        chosen=chosen,
        required=tuple(pool for pool in chosen if pool.readiness.required),
        marks=marks,
    )
    if not context.required:
        return NodeChanges(
            writes=(*mark_labels_only(context), *write),
            events=released,
            recheck_at_s=unreachable_at_s(context),
        )
    marking = mark(context)
    return NodeChanges(
        writes=(*marking.writes, *write),
        events=(*released, *_events(context, marking)),
        recheck_at_s=_recheck_at_s(context, marking),
        facts=_facts(context, marking),
    )


def _unknown_labels(view: NodeView, marks: Marks) -> frozenset[str]:
    """Return the pools whose ready labels are on the node, and which the cache lacks."""
    named = {key.removeprefix(READY_LABEL_PREFIX) for key in marks.labels}
    return frozenset(named - {pool.name for pool in view.pools} - view.gone_pools)


def _recheck_at_s(context: NodeContext, marking: Marking) -> float | None:
    unreachable_s, move = unreachable_at_s(context), marking.transition
    times = [] if unreachable_s is None else [unreachable_s]
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


def _released(assignment: Assignment) -> tuple[EventNote, ...]:
    if not assignment.released:
        return ()
    names = ", ".join(assignment.released)
    message = f"The memory of {names} was given back to the node."
    return (EventNote("Normal", "MemoryReleased", message),)


def _events(context: NodeContext, marking: Marking) -> tuple[EventNote, ...]:
    move, message = marking.transition, marking.condition.message
    if move.opened:
        return (EventNote("Normal", "MemoryReady", f"Host memory is ready: {message}"),)
    if move.cause is not None:
        key = context.readiness.taint
        tainted = any(taint.get("key") == key for taint in context.node.taints)
        closed = move.taint == "add" or tainted
        reason = "MemoryClosed" if closed else "MemoryNotReady"
        message = f"{_why(move.cause, closed=closed)} {message}"
        return (EventNote("Normal" if move.cause == "join" else "Warning", reason, message),)
    if move.deadline:
        within_s = context.readiness.deadline_s
        late = f"Host memory is not ready after {within_s:.0f} s; the node stays closed."
        state = "Opened without host memory." if move.without else late
        return (EventNote("Warning", "DeadlineExceeded", f"{state} {message}"),)
    return ()


def _why(cause: Cause, *, closed: bool) -> str:
    """Return why, without saying that a node is closed which takes pods as before."""
    state = "Closed" if closed else "Not closed to pods, but without its host memory"
    return {
        "join": "Closed until its host memory is ready." if closed else f"{state} so far.",
        "reboot": f"{state}: the node was booted again, and its memory with it.",
        "repair": f"{state}: it needs repair.",
        "resize": f"{state}: it is being changed.",
    }[cause]
