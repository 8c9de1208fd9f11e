"""What happens to a managed node: opened, kept open, closed, kept closed, or let go unprepared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT, HOST_MEMORY_READY, KARPENTER_LABEL
from hostprep.api.node_resource import Phase
from hostprep_operator.marks import Marks
from hostprep_operator.reconcile.changes import Cause, NodeView
from hostprep_operator.reconcile.verdict import Judged, Verdict, answered, reboot_seen
from hostprep_operator.records import Readiness

__all__ = ["Transition", "closed_since_s", "transition"]

TaintMove = Literal["leave", "add", "remove"]
LabelMove = Literal["set", "only remove", "leave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What is to become of the node."""

    marks: Marks
    """Less the labels, which follow from `labels`."""
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


def transition(view: NodeView, judged: Judged, verdict: Verdict) -> Transition:
    """Return what becomes of the node."""
    marks = judged.marks
    if verdict.status == "True":
        return _open(view, judged)
    cause = _closing_cause(judged, verdict)
    if cause is not None:
        return _close(view, judged, cause)
    if marks.is_open:  # Unknown: nobody says that the memory is gone
        return Transition(marks=marks, taint="remove", labels="leave")
    return _stay_closed(view, judged, verdict)


def closed_since_s(view: NodeView, judged: Judged) -> float:
    """Return since when a node that is not open is closed.

    A node's first closing needs no marks where it comes with its HostMemoryNode: that object's
    creation is the same moment.
    """
    if judged.marks.closed_s is not None:
        return judged.marks.closed_s
    if judged.hmn is not None and judged.hmn.created_s:
        return judged.hmn.created_s
    before = judged.node.conditions.get(HOST_MEMORY_READY)
    return before.since_s if before is not None and before.since_s is not None else view.now_s


def _open(view: NodeView, judged: Judged) -> Transition:
    marks, node, hmn = judged.marks, judged.node, judged.hmn
    if hmn is None or (marks.is_open and marks.opened_boot == node.boot_id):
        return Transition(marks=marks, taint="remove", labels="set")
    opened = marks.opened(
        now_s=view.now_s,
        boot_id=node.boot_id,
        hmn=f"{hmn.uid}/{hmn.resource_version}",
        taint=_ruling(judged).taint or "",
    )
    return Transition(marks=opened, taint="remove", labels="set", opened=True)


def _closing_cause(judged: Judged, verdict: Verdict) -> Cause | None:
    """Return why the node is to be closed now; None where it is closed, or stays as it is."""
    marks = judged.marks
    if reboot_seen(judged):
        return "reboot"
    if marks.is_open:
        return _change_cause(judged) if verdict.status == "False" else None
    before = judged.node.conditions.get(HOST_MEMORY_READY)
    if marks.closed_s is None and (before is None or before.status == "True"):
        return "join"
    return None


def _change_cause(judged: Judged) -> Cause:
    """Return `resize` where a pool is changing as it was told to, else `repair`."""
    resizing = False
    for pool in judged.required:
        if judged.is_ready(pool):
            continue
        report = answered(judged, judged.assignment.entry(pool.name))
        if report is not None and report.phase in (Phase.DEGRADED, Phase.FAILED):
            return "repair"
        told = judged.status_boot == judged.node.boot_id
        changing = report is not None and report.phase in (Phase.RESIZING, Phase.READY)
        resizing |= changing or (report is None and told)
    return "resize" if resizing else "repair"


def _close(view: NodeView, judged: Judged, cause: Cause) -> Transition:
    readiness, marks, node = _ruling(judged), judged.marks, judged.node
    closed = marks.closed(
        now_s=view.now_s,
        boot_id=reboot_seen(judged) or node.boot_id,
        taint=readiness.taint or "",
    )
    if cause != "join":
        wanted = readiness.taint is not None and getattr(readiness.reclose, cause) == "Taint"
        return Transition(marks=closed, taint="add" if wanted else "leave", cause=cause)
    wanted = _taints_at_join(judged)
    if wanted or _join_needs_marks(judged):
        return Transition(marks=closed, taint="add" if wanted else "leave", cause=cause)
    return Transition(marks=marks, cause=cause)


def _taints_at_join(judged: Judged) -> bool:
    """Whether a node that joins without our taint gets it from us.

    Not a node that was there before its pools: it serves already. Nor one of Karpenter's: it puts
    a taint of its NodePool's startupTaints there itself, and for one that is not listed there it
    makes another node every ten seconds (seen with 1.14.0, see docs/autoscalers.md).
    """
    key, node = _ruling(judged).taint, judged.node
    if key is None or KARPENTER_LABEL in node.labels:
        return False
    oldest_s = min(pool.created_s for pool in judged.required)
    return node.created_s > oldest_s and all(taint.get("key") != key for taint in node.taints)


def _join_needs_marks(judged: Judged) -> bool:
    """Whether neither the HostMemoryNode's age nor the usual key tells what marks would."""
    key = _ruling(judged).taint
    return judged.hmn is not None or key not in (None, CLUSTER_AUTOSCALER_TAINT)


def _stay_closed(view: NodeView, judged: Judged, verdict: Verdict) -> Transition:
    readiness, marks = _ruling(judged), judged.marks
    due = view.now_s >= closed_since_s(view, judged) + readiness.deadline_s
    over = marks.deadline or due
    without = over and readiness.on_deadline == "OpenWithout"
    return Transition(
        marks=replace(marks, deadline=over),
        taint="remove" if without else "leave",
        labels="only remove" if verdict.status == "False" else "leave",
        deadline=due and not marks.deadline,
        without=without,
    )


def _ruling(judged: Judged) -> Readiness:
    return judged.required[0].readiness
