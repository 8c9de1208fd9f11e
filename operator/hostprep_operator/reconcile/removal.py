"""Taking away from a Node exactly what was put on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT, HOST_MEMORY_READY, MARKS_ANNOTATION
from hostprep_operator.marks import Marks
from hostprep_operator.reconcile.changes import PatchNode, PatchNodeStatus, Write
from hostprep_operator.records import OUR_CONDITIONS, NodeRecord

__all__ = [
    "delete_conditions",
    "managed_taint",
    "node_patch",
    "status_patch",
    "strip_node",
    "without_taints",
]


def strip_node(node: NodeRecord) -> tuple[Write, ...]:
    """Return the writes that leave no trace of ours on the node; none where there is none.

    Conditions go last: as long as one is there, a repetition knows that the node was managed.
    """
    marks = Marks.parse(node.marks)
    taint = managed_taint(node, marks)
    patch = node_patch(
        node,
        labels={key: None for key in marks.labels if key in node.labels},
        taints=without_taints(node, taint),
        marks="",
    )
    return tuple(write for write in (patch, delete_conditions(node)) if write is not None)


def delete_conditions(node: NodeRecord) -> PatchNodeStatus | None:
    """Return the write that takes our conditions away; None where there is none."""
    ours = [name for name in OUR_CONDITIONS if name in node.conditions]
    if not ours:
        return None
    return status_patch(node, [{"type": name, "$patch": "delete"} for name in ours])


def managed_taint(node: NodeRecord, marks: Marks) -> str | None:
    """Return the taint key that this operator answers for on the node, None where it does not.

    A node that joined with the usual taint gets no marks until it is opened (one write less for
    every node): there the condition alone shows that it is managed.
    """
    if marks.taint:
        return marks.taint
    never_marked = marks.opened_s is None and marks.closed_s is None
    if never_marked and HOST_MEMORY_READY in node.conditions:
        return CLUSTER_AUTOSCALER_TAINT
    return None


def without_taints(node: NodeRecord, *keys: str | None) -> tuple[Mapping[str, Any], ...]:
    """Return the node's taints less those of these keys, whatever their value and effect."""
    return tuple(taint for taint in node.taints if taint.get("key") not in keys)


def node_patch(
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


def status_patch(node: NodeRecord, conditions: Iterable[Mapping[str, Any]]) -> PatchNodeStatus:
    """Return the strategic merge patch of these conditions, guarded by the node's version."""
    return PatchNodeStatus(
        {
            "metadata": {"resourceVersion": node.resource_version},
            "status": {"conditions": list(conditions)},
        }
    )
