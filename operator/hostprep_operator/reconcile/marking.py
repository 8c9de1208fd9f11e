"""From a verdict to what is written on the Node: labels, taint, marks and conditions, in order.

Closing: taint, labels and marks first, the condition after. Opening: the condition first. Killed
between the two, a node is never more open than both of them say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hostprep.api.conditions import Condition, merged
from hostprep.api.names import HOST_MEMORY_READY, ready_label
from hostprep.api.times import format_time
from hostprep_operator.marks import Marks
from hostprep_operator.reconcile.accounting import accounts, unaccounted
from hostprep_operator.reconcile.changes import NodeView, PatchNode, Write
from hostprep_operator.reconcile.removal import (
    delete_conditions,
    managed_taint,
    node_patch,
    status_patch,
    without_taints,
)
from hostprep_operator.reconcile.transition import LabelMove, Transition, transition
from hostprep_operator.reconcile.verdict import Judged, Verdict, away, judge
from hostprep_operator.records import NodeRecord, PoolRecord

__all__ = ["Marking", "mark", "mark_labels_only"]

_NUMBER = re.compile(r"\b\d+(?:\.\d+)?\b", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marking:
    """The writes to the Node, and why."""

    writes: tuple[Write, ...]
    verdict: Verdict
    transition: Transition


def mark(view: NodeView, judged: Judged, chosen: tuple[PoolRecord, ...]) -> Marking:
    """Mark a node with required pools."""
    accounting = accounts(judged)
    verdict = away(view, judged.node) or judge(judged, unaccounted=unaccounted(judged, accounting))
    move = transition(view, judged, verdict)
    said = _with_deadline(judged, verdict, move)
    condition = Condition(
        type=HOST_MEMORY_READY, status=said.status, reason=said.reason, message=said.message
    )
    status = _status_patch(view, judged.node, (condition, *accounting))
    patch = _patch(judged, chosen, move)
    condition_first = verdict.status == "True" or move.without
    order = (status, patch) if condition_first else (patch, status)
    writes = tuple(write for write in order if write is not None)
    return Marking(writes=writes, verdict=said, transition=move)


def mark_labels_only(
    view: NodeView, judged: Judged, chosen: tuple[PoolRecord, ...]
) -> tuple[Write, ...]:
    """Mark a node whose pools are all not required: ready labels, and nothing else of ours."""
    node = judged.node
    move: LabelMove = "leave" if away(view, node) else "set"
    labels, keys = _labels(judged, chosen, move)
    patch = node_patch(
        node,
        labels=labels,
        taints=without_taints(node, managed_taint(node, judged.marks)),
        marks=Marks(labels=keys).to_text(),
    )
    return tuple(write for write in (patch, delete_conditions(node)) if write is not None)


def _with_deadline(judged: Judged, verdict: Verdict, move: Transition) -> Verdict:
    if not move.without or verdict.status != "False":
        return verdict
    within_s = judged.required[0].readiness.deadline_s
    return Verdict(
        "False",
        "DeadlineExceeded",
        f"Not ready within {within_s:.0f} s: the node is open without it. {verdict.message}",
    )


def _patch(judged: Judged, chosen: tuple[PoolRecord, ...], move: Transition) -> PatchNode | None:
    labels, keys = _labels(judged, chosen, move.labels)
    taints, key = _taints(judged, move)
    marks = replace(move.marks, labels=keys, taint=key)
    return node_patch(judged.node, labels=labels, taints=taints, marks=marks.to_text())


def _labels(
    judged: Judged, chosen: tuple[PoolRecord, ...], move: LabelMove
) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Return the changes of labels, and the keys that are then on the node."""
    node = judged.node
    by_key = {ready_label(pool.name): pool for pool in chosen}
    changes: dict[str, str | None] = {}
    keys: list[str] = []
    for key in sorted({*by_key, *judged.marks.labels}):
        pool, there = by_key.get(key), key in node.labels
        ready = pool is not None and judged.is_ready(pool)
        wanted = {
            "set": ready,
            "only remove": ready and there,
            "leave": pool is not None and there,
        }[move]
        if wanted:
            keys.append(key)
        if wanted and node.labels.get(key) != "true":
            changes[key] = "true"
        elif there and not wanted:
            changes[key] = None
    return changes, tuple(keys)


def _taints(judged: Judged, move: Transition) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """Return the node's taints as they are to be, and the key that the marks record."""
    node, key = judged.node, judged.required[0].readiness.taint
    former = managed_taint(node, judged.marks)
    if key is None and not judged.marks.taint and move.taint != "remove":
        former = None  # nothing says that a taint of the usual key is of our making
    renamed = former is not None and former != key
    marked = move.marks.opened_s is not None or move.marks.closed_s is not None
    recorded = key or "" if marked or renamed else move.marks.taint
    if move.taint == "remove":
        return without_taints(node, key, former), recorded
    there = {taint.get("key") for taint in node.taints}
    kept = without_taints(node, former) if renamed else node.taints
    wanted = move.taint == "add" or (renamed and former in there)
    if wanted and key is not None and key not in there:
        return (*kept, {"key": key, "effect": "NoSchedule"}), recorded
    return kept, recorded


def _status_patch(view: NodeView, node: NodeRecord, wanted: tuple[Condition, ...]) -> Write | None:
    """Return the patch of the conditions that have something new to say; None where none has."""
    conditions = merged(node.conditions.values(), wanted, now_s=view.now_s)
    changed = [c for c in conditions if not _is_said(node.conditions.get(c.type), c)]
    if not changed:
        return None
    now = format_time(view.now_s)
    return status_patch(node, [c.to_json() | {"lastHeartbeatTime": now} for c in changed])


def _is_said(before: Condition | None, now: Condition) -> bool:
    """Whether the condition says this already; another number in a complaint is no news."""
    if before is None or (before.status, before.reason) != (now.status, now.reason):
        return False
    if now.status == "True":
        return before.message == now.message
    return _NUMBER.sub("#", before.message) == _NUMBER.sub("#", now.message)
