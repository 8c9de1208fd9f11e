"""What is written on a Node: label, taint, annotation and conditions; and how they are removed.

First what becomes of a node (opened, kept open, closed, kept closed, or let go unprepared), then
the writes. Closing: taint, labels and marks first, the condition after. Opening: the condition
first. Killed between the two, a node is never more open than both of them say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hostprep.api.conditions import Condition, format_time, merged
from hostprep.api.names import (
    CLUSTER_AUTOSCALER_TAINT,
    HOST_MEMORY_READY,
    KARPENTER_LABEL,
    MARKS_ANNOTATION,
    ready_label,
)
from hostprep.api.node_resource import Phase
from hostprep_operator.marks import Marks, policy_mark
from hostprep_operator.reconcile.assign import WAITING_REASONS, Assignment, pool_ready
from hostprep_operator.reconcile.changes import (
    Cause,
    NodeView,
    PatchNode,
    PatchNodeStatus,
    Settings,
    Write,
)
from hostprep_operator.reconcile.node_conditions import (
    NodeContext,
    accounting_conditions,
    derive_ready,
    detect_reboot,
    unreachable,
    waiting_condition,
)
from hostprep_operator.reconcile.release import releasing_condition
from hostprep_operator.records import OUR_CONDITIONS, HostMemoryNodeRecord, NodeRecord

_NUMBER = re.compile(r"\b\d+(?:\.\d+)?\b", re.ASCII)

TaintMove = Literal["leave", "add", "remove"]
LabelMove = Literal["set", "only remove", "leave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What is to become of the node."""

    marks: Marks
    """Less labels and taint, which follow."""
    taint: TaintMove = "leave"
    labels: LabelMove = "only remove"
    """Set: as the pools are; only remove: those of pools that are not ready; leave: none."""
    opened: bool = False
    cause: Cause | None = None
    """Of a closing."""
    deadline: bool = False
    """The deadline passes now."""
    without: bool = False
    """Closed, and open to pods without memory all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marking:
    """The writes to the Node, and why."""

    writes: tuple[Write, ...]
    condition: Condition
    """HostMemoryReady."""
    transition: Transition


def mark(context: NodeContext) -> Marking:
    """Mark a node with required pools."""
    releasing, now_s = _releasing(context), context.view.now_s
    accounting = accounting_conditions(context)
    condition = unreachable(context.view, context.node) or derive_ready(context, accounting)
    move = transition(context, condition)
    if move.without and condition.status == "False":
        within_s = context.readiness.deadline_s
        late = f"Not ready within {within_s:.0f} s: the node is open without it."
        condition = replace(
            condition, reason="DeadlineExceeded", message=f"{late} {condition.message}"
        )
    labels, keys = _labels(context, move.labels)
    taints, key = _taints(context, move)
    marks = replace(move.marks, labels=keys, taint=key)
    patch = _node_patch(context.node, labels=labels, taints=taints, marks=marks.to_text())
    conditions = _changed_conditions(context.node, (condition, *accounting, *releasing), now_s)
    status = _status_patch(context.node, conditions)
    condition_first = condition.status == "True" or move.without
    writes = _writes(status, patch) if condition_first else _writes(patch, status)
    return Marking(writes=writes, condition=condition, transition=move)


def mark_waiting(context: NodeContext) -> tuple[Write, ...]:
    """Mark a node whose required pools all wait for their turn: why, and nothing to hold it by.

    Its taint stays as it is: what joined tainted goes on waiting, what serves goes on serving.
    """
    away = unreachable(context.view, context.node)
    labels, keys = _labels(context, "leave" if away else "set")
    marks = replace(context.marks, labels=keys)
    if not context.is_open_this_boot:
        marks = Marks(labels=keys, taint=context.marks.taint)
    node = context.node
    patch = _node_patch(node, labels=labels, taints=node.taints, marks=marks.to_text())
    wanted = (away or waiting_condition(context), *_releasing(context))
    conditions = _changed_conditions(node, wanted, context.view.now_s)
    return _writes(patch, _status_patch(node, conditions))


def mark_labels_only(context: NodeContext) -> tuple[Write, ...]:
    """Mark a node whose pools are all not required: ready labels, and no more than those."""
    away = unreachable(context.view, context.node)
    labels, keys = _labels(context, "leave" if away else "set")
    return _strip(
        context.node,
        context.view.settings,
        labels=labels,
        kept=Marks(labels=keys),
        conditions=_changed_conditions(context.node, _releasing(context), context.view.now_s),
    )


def _releasing(context: NodeContext) -> tuple[Condition, ...]:
    """Return HostMemoryReleasing where memory is on its way out; nothing elsewhere."""
    view = context.view
    condition = releasing_condition(
        context.assignment.entries,
        pools=view.pools,
        hmn=context.hmn,
        away=unreachable(view, context.node),
        now_s=view.now_s,
    )
    return () if condition is None else (condition,)


def _labels(context: NodeContext, move: LabelMove) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Return the changes of labels, and the keys that are then on the node."""
    node = context.node
    kept = labels_of_deleted_pools(
        context.view, context.marks, node, context.hmn, context.assignment
    )
    by_key = {ready_label(pool.name): pool for pool in context.chosen}
    changes: dict[str, str | None] = {}
    keys: list[str] = []
    for key in sorted({*by_key, *context.marks.labels}):
        pool, there = by_key.get(key), key in node.labels
        ready = pool is not None and context.is_ready(pool)
        wanted = {
            "set": ready,
            "only remove": ready and there,
            "leave": pool is not None and there,
        }[move] or key in kept
        if wanted:
            keys.append(key)
        if wanted and node.labels.get(key) != "true":
            changes[key] = "true"
        elif there and not wanted:
            changes[key] = None
    return changes, tuple(keys)


def labels_of_deleted_pools(
    view: NodeView,
    marks: Marks,
    node: NodeRecord,
    hmn: HostMemoryNodeRecord | None,
    assignment: Assignment,
) -> frozenset[str]:
    """Return the ready labels of pools that were deleted, while the node serves their memory.

    So a pool that is applied again within the grace period finds the node labelled. All that this
    takes is on the objects: an operator that restarts, and knows no such pool, says the same.
    """
    there = {pool.name for pool in view.pools}
    marked = {*marks.labels} & node.labels.keys()
    return frozenset(
        ready_label(entry.name)
        for entry in assignment.entries
        if entry.release_after_s is not None
        and entry.name not in there
        and ready_label(entry.name) in marked
        and pool_ready(node, hmn, entry)
    )


def _taints(context: NodeContext, move: Transition) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """Return the node's taints as they are to be, and the key that the marks record."""
    node, key = context.node, context.readiness.taint
    if not context.may_write_taint:
        # The write would be refused with all that it carries. What is closed stays closed.
        return node.taints, move.marks.taint
    former = managed_taint(node, context.marks, context.view.settings)
    if key is None and not context.marks.taint and move.taint != "remove":
        former = None  # nothing says that a taint of the usual key is of our making
    elif key is None and former is None and move.opened and context.marks.is_fresh:
        # A process that was killed between the condition and this would have taken it off.
        former = CLUSTER_AUTOSCALER_TAINT
    renamed = former is not None and former != key
    recorded = key or "" if not move.marks.is_fresh or renamed else move.marks.taint
    if move.taint == "remove":
        return without_taints(node, key, former), recorded
    there = {taint.get("key") for taint in node.taints}
    kept = without_taints(node, former) if renamed else node.taints
    wanted = move.taint == "add" or (renamed and former in there)
    if wanted and key is not None and key not in there:
        return (*kept, {"key": key, "effect": "NoSchedule"}), recorded
    return kept, recorded


def _changed_conditions(
    node: NodeRecord, wanted: tuple[Condition, ...], now_s: float
) -> list[dict[str, Any]]:
    """Return the conditions that the node does not have yet, and the ends of those it has."""
    before, types = node.conditions, {condition.type for condition in wanted}
    changed = [
        condition.to_json() | {"lastHeartbeatTime": format_time(now_s)}
        for condition in merged(before.values(), wanted, now_s=now_s)
        if not _is_said(before.get(condition.type), condition)
    ]
    ended = [name for name in OUR_CONDITIONS if name in before and name not in types]
    return changed + [{"type": name, "$patch": "delete"} for name in ended]


def _is_said(before: Condition | None, now: Condition) -> bool:
    """Whether the condition says this already; another number in a complaint is no news."""
    if before is None or (before.status, before.reason) != (now.status, now.reason):
        return False
    if now.status == "True":
        return before.message == now.message
    return _NUMBER.sub("#", before.message) == _NUMBER.sub("#", now.message)


# --- what becomes of a node


def transition(context: NodeContext, condition: Condition) -> Transition:
    """Return what becomes of the node."""
    marks = context.marks
    if condition.status == "True":
        return _open(context)
    cause = _closing_cause(context, condition)
    if cause is not None:
        return _close(context, cause)
    if marks.is_open:  # Unknown: no report says that the memory is gone
        return Transition(marks=marks, taint="remove", labels="leave")
    return _stay_closed(context, condition)


def closed_since_s(context: NodeContext) -> float:
    """Return since when a node that is not open is closed.

    A node's first closing needs no marks where it comes with its HostMemoryNode: that object's
    creation is the same moment.
    """
    if context.marks.closed_s is not None:
        return context.marks.closed_s
    if context.hmn is not None and context.hmn.created_s:
        return context.hmn.created_s
    before = context.node.conditions.get(HOST_MEMORY_READY)
    since_s = before.since_s if before is not None else None
    return context.view.now_s if since_s is None else since_s


def _open(context: NodeContext) -> Transition:
    marks, node, hmn = context.marks, context.node, context.hmn
    if hmn is None or context.is_open_this_boot:
        return Transition(marks=marks, taint="remove", labels="set")
    opened = Marks(
        opened_s=context.view.now_s,
        opened_boot=node.boot_id,
        hmn=f"{hmn.uid}/{hmn.resource_version}",
        policies={
            entry.name: policy_mark(entry.policy)
            for entry in context.assignment.entries
            if not entry.absent
        },
    )
    return Transition(marks=opened, taint="remove", labels="set", opened=True)


def _closing_cause(context: NodeContext, condition: Condition) -> Cause | None:
    """Return why the node is to be closed now; None where it is closed, or stays as it is."""
    marks = context.marks
    if detect_reboot(context):
        return "reboot"
    if marks.is_open:
        return _change_cause(context) if condition.status == "False" else None
    before = context.node.conditions.get(HOST_MEMORY_READY)
    is_new = before is None or before.status == "True" or before.reason in WAITING_REASONS
    if marks.closed_s is None and is_new:
        return "join"
    return None


def _change_cause(context: NodeContext) -> Cause:
    """Return `resize` where a pool is changing as its entry asks, else `repair`."""
    resizing = False
    for pool in context.required:
        if context.is_ready(pool):
            continue
        report = context.report(pool.name)
        if report is not None and report.phase in (Phase.DEGRADED, Phase.FAILED):
            return "repair"
        is_this_boot = context.status_boot == context.node.boot_id
        changing = report is not None and report.phase in (Phase.RESIZING, Phase.READY)
        resizing |= changing or (report is None and is_this_boot)
    return "resize" if resizing else "repair"


def _close(context: NodeContext, cause: Cause) -> Transition:
    readiness, marks, node = context.readiness, context.marks, context.node
    closed = replace(
        marks,
        closed_s=context.view.now_s,
        closed_boot=detect_reboot(context) or node.boot_id,
        deadline=False,
    )
    if cause == "join":
        wanted = _taints_at_join(context)
        usual = readiness.taint in (None, CLUSTER_AUTOSCALER_TAINT)
        if not wanted and usual and context.hmn is None:
            # The new HostMemoryNode's age and the usual key tell what marks would.
            return Transition(marks=marks, cause=cause)
    else:
        wanted = readiness.taint is not None and getattr(readiness.reclose, cause) == "Taint"
    wanted = wanted and context.may_write_taint
    return Transition(marks=closed, taint="add" if wanted else "leave", cause=cause)


def _taints_at_join(context: NodeContext) -> bool:
    """Whether a node that joins without our taint gets it from us.

    Not a node that was there before its pools: it serves already. Nor one of Karpenter's: it puts
    a taint of its NodePool's startupTaints there itself, and for one that is not listed there it
    makes another node every ten seconds (seen with 1.14.0, see docs/autoscalers.md).
    """
    key, node = context.readiness.taint, context.node
    if key is None or KARPENTER_LABEL in node.labels:
        return False
    oldest_s = min(pool.created_s for pool in context.required)
    return node.created_s > oldest_s and all(taint.get("key") != key for taint in node.taints)


def _stay_closed(context: NodeContext, condition: Condition) -> Transition:
    readiness, marks = context.readiness, context.marks
    due = context.view.now_s >= closed_since_s(context) + readiness.deadline_s
    over = marks.deadline or due
    without = over and readiness.on_deadline == "OpenWithout"
    return Transition(
        marks=replace(marks, deadline=over),
        taint="remove" if without else "leave",
        labels="only remove" if condition.status == "False" else "leave",
        deadline=due and not marks.deadline,
        without=without,
    )


# --- patches, and taking everything away


def strip_node(
    node: NodeRecord,
    settings: Settings,
    *,
    left: tuple[Condition, ...] = (),
    left_labels: frozenset[str] = frozenset(),
    now_s: float = 0.0,
) -> tuple[Write, ...]:
    """Return the writes that leave no trace of ours on the node but the conditions `left`.

    And those labels. None where there is none. And a taint that may not be written stays.
    """
    ours = Marks.parse(node.marks).labels
    labels = {key: None for key in ours if key in node.labels and key not in left_labels}
    conditions = _changed_conditions(node, left, now_s)
    kept = Marks(labels=tuple(sorted(left_labels)))
    return _strip(node, settings, labels=labels, kept=kept, conditions=conditions)


def _strip(
    node: NodeRecord,
    settings: Settings,
    *,
    labels: Mapping[str, str | None],
    kept: Marks,
    conditions: list[dict[str, Any]],
) -> tuple[Write, ...]:
    """Return the writes that leave no more than those marks, changing these labels.

    Conditions go last: as long as one is there, a repetition knows that the node was managed.
    """
    taints = without_taints(node, managed_taint(node, Marks.parse(node.marks), settings))
    patch = _node_patch(node, labels=labels, taints=taints, marks=kept.to_text())
    return _writes(patch, _status_patch(node, conditions))


def managed_taint(node: NodeRecord, marks: Marks, settings: Settings) -> str | None:
    """Return the taint key that this operator answers for on the node, None where it does not.

    None too where it may not write it.

    A node that joined with the usual taint gets no marks until it is opened (one write less for
    every node): there the condition alone shows that it is managed.
    """
    if marks.taint:
        return marks.taint if settings.may_write_taint(marks.taint) else None
    condition = node.conditions.get(HOST_MEMORY_READY)
    # True: it was opened, and its marks went a moment ago.
    if marks.is_fresh and condition is not None and condition.status != "True":
        return CLUSTER_AUTOSCALER_TAINT
    return None


def without_taints(node: NodeRecord, *keys: str | None) -> tuple[Mapping[str, Any], ...]:
    """Return the node's taints less those of these keys, whatever their value and effect."""
    return tuple(taint for taint in node.taints if taint.get("key") not in keys)


def _node_patch(
    node: NodeRecord,
    *,
    labels: Mapping[str, str | None],
    taints: tuple[Mapping[str, Any], ...],
    marks: str,
) -> PatchNode | None:
    """Return the one patch that changes labels, taints and marks; None where nothing changes."""
    metadata: dict[str, Any] = {}
    if labels:
        metadata["labels"] = dict(labels)
    if marks != node.marks:
        metadata["annotations"] = {MARKS_ANNOTATION: marks or None}
    patch: dict[str, Any] = {}
    if taints != node.taints:
        patch["spec"] = {"taints": list(taints) or None}
    if not metadata and not patch:
        return None
    return PatchNode(patch | {"metadata": metadata | {"resourceVersion": node.resource_version}})


def _status_patch(node: NodeRecord, conditions: list[dict[str, Any]]) -> PatchNodeStatus | None:
    """Return the strategic merge patch of these conditions; None where there is none."""
    if not conditions:
        return None
    metadata = {"resourceVersion": node.resource_version}
    return PatchNodeStatus({"metadata": metadata, "status": {"conditions": conditions}})


def _writes(*writes: Write | None) -> tuple[Write, ...]:
    return tuple(write for write in writes if write is not None)
