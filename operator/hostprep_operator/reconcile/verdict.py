"""Is the memory of this node ready? The table of docs/control-plane.md, first row that holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hostprep.api.conditions import Condition, ConditionStatus
from hostprep.api.names import DEVICE_RESOURCE_PREFIX, HOST_MEMORY_READY, ready_label
from hostprep.api.node_resource import Phase, PoolEntry
from hostprep.units import format_bytes
from hostprep_operator.marks import Marks
from hostprep_operator.reconcile.assign import Assignment, pool_ready
from hostprep_operator.reconcile.changes import NodeView
from hostprep_operator.records import HostMemoryNodeRecord, NodeRecord, PoolRecord, PoolReport

__all__ = [
    "Judged",
    "Verdict",
    "answered",
    "away",
    "away_at_s",
    "judge",
    "reboot_seen",
    "with_names",
]

_SHOWN = 10
_WORST = (Phase.FAILED, Phase.DEGRADED, Phase.RESIZING)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the condition HostMemoryReady is to say."""

    status: ConditionStatus
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A managed node and all that the verdict on it rests on."""

    node: NodeRecord
    hmn: HostMemoryNodeRecord | None
    """Only if it is this Node's."""
    assignment: Assignment
    required: tuple[PoolRecord, ...]
    """Required pools that select the node, the ruling first; never empty."""
    marks: Marks
    placeholder: Mapping[str, int] | None = field(default_factory=dict)
    """Huge pages that the agent's Pod asks for, in bytes by resource; None between two Pods."""

    @property
    def status_boot(self) -> str:
        """The boot that the agent speaks of; empty while it has said nothing."""
        return self.hmn.status.boot_id if self.hmn else ""

    @property
    def is_observed(self) -> bool:
        """Whether the agent has read the spec as it is to be."""
        hmn = self.hmn
        return (
            hmn is not None
            and self.assignment.write is None
            and hmn.status.observed_generation >= hmn.generation
        )

    def is_ready(self, pool: PoolRecord) -> bool:
        """Whether the pool is verified on the node for this boot, as it is to be there.

        A status older than the spec is believed only of pools that were found ready before: one
        that was given up and is wanted again may be on its way out, and reports nothing yet.
        """
        known = self.is_observed or ready_label(pool.name) in self.marks.labels
        return known and pool_ready(self.node, self.hmn, self.assignment.entry(pool.name))


def judge(judged: Judged, *, unaccounted: Condition | None) -> Verdict:
    """Return the verdict on a node whose agent is alive.

    `unaccounted` is the accounting condition that a required pool asks for and that is not True.
    """
    waiting = [pool for pool in judged.required if not judged.is_ready(pool)]
    if _rebooted(judged):
        names = with_names(judged.required)
        return Verdict("False", "Rebooted", f"The node was booted again; being prepared: {names}.")
    if waiting or not _settled(judged):
        return _preparing(judged, waiting)
    missing = _not_advertised(judged)
    if missing is not None:
        return missing
    if unaccounted is not None:
        return Verdict("False", "NotAccounted", unaccounted.message)
    return Verdict("True", "Ready", _sizes(judged))


def away(view: NodeView, node: NodeRecord) -> Verdict | None:
    """Return the verdict Unknown where nobody can speak for the node; None where somebody can."""
    grace_s = view.settings.agent_grace_s
    if node.ready != "True" and view.now_s - node.ready_since_s >= grace_s:
        return Verdict("Unknown", "NodeNotReady", "Kubelet does not say that the node is Ready.")
    since_s = _agent_away_since_s(view, node)
    if since_s is None or (view.now_s - since_s < grace_s and not _was_away(node)):
        return None
    if view.agent is None:
        return Verdict("Unknown", "NoAgent", "No agent Pod runs on the node.")
    return Verdict(
        "Unknown", "AgentNotReady", "The agent's Pod is not Ready: its last verification failed."
    )


def away_at_s(view: NodeView, node: NodeRecord) -> float | None:
    """Return when the verdict becomes Unknown if nothing else happens."""
    since_s = [_agent_away_since_s(view, node)]
    if node.ready != "True":
        since_s.append(node.ready_since_s)
    ends_s = [since + view.settings.agent_grace_s for since in since_s if since is not None]
    return min((end for end in ends_s if end > view.now_s), default=None)


def reboot_seen(judged: Judged) -> str:
    """Return the id of a boot that came after the one the marks speak of, or nothing.

    Kubelet or the agent may be the first to tell: either closes the node.
    """
    marks, node = judged.marks, judged.node
    if marks.opened_s is None:
        return ""
    known = {marks.opened_boot, marks.closed_boot, ""}
    if node.boot_id not in known:
        return node.boot_id
    if marks.is_open and judged.status_boot not in known:
        return judged.status_boot
    return ""


def answered(judged: Judged, entry: PoolEntry | None) -> PoolReport | None:
    """Return what the agent says in this boot of exactly this entry."""
    hmn = judged.hmn
    if hmn is None or entry is None or judged.status_boot != judged.node.boot_id:
        return None
    report = hmn.status.pool(entry.name)
    if report is None or (report.uid, report.generation) != (entry.uid, entry.generation):
        return None
    return report


def with_names(pools: Iterable[PoolRecord]) -> str:
    """Return the pools' names as a list for people, cut where it would be endless."""
    names = [pool.name for pool in pools]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _agent_away_since_s(view: NodeView, node: NodeRecord) -> float | None:
    if view.settings.liveness == "off":
        return None
    if view.agent is None:
        return max(node.created_s, view.agent_missing_since_s or 0.0)
    return None if view.agent.ready else view.agent.ready_since_s


def _was_away(node: NodeRecord) -> bool:
    """Return whether it was said already: a restarted operator, or a new Pod, proves no life."""
    before = node.conditions.get(HOST_MEMORY_READY)
    return before is not None and before.reason in ("NoAgent", "AgentNotReady")


def _rebooted(judged: Judged) -> bool:
    marks, boot_id = judged.marks, judged.node.boot_id
    if judged.status_boot == boot_id:
        return False
    others = {marks.opened_boot, marks.closed_boot} - {"", boot_id}
    return bool(others) or bool(reboot_seen(judged))


def _settled(judged: Judged) -> bool:
    """Return whether the status may be judged: for an opening it must answer the newest spec."""
    marks = judged.marks
    return judged.is_observed or (marks.is_open and marks.opened_boot == judged.node.boot_id)


def _not_advertised(judged: Judged) -> Verdict | None:
    """Return what keeps a node closed whose memory is ready while kubelet does not offer it yet.

    For an opening alone: a region between two owners is not allocatable for a moment, and while
    kubelet or the agent restarts none is, which is nothing to close an open node for. What the
    Node says is of this boot: kubelet writes the bootID and the devices at once, none at first.
    """
    marks = judged.marks
    if marks.is_open and marks.opened_boot == judged.node.boot_id:
        return None
    for pool in judged.required:
        entry = judged.assignment.entry(pool.name)
        report = answered(judged, entry)
        if entry is None or report is None or not entry.uses_devices:
            continue
        offered, wanted = judged.node.devices.get(pool.name, 0), max(report.regions, 1)
        if offered < wanted:
            message = (
                f"{pool.name}: kubelet offers {offered} of its {wanted} regions"
                f" as {DEVICE_RESOURCE_PREFIX}{pool.name}. If it stays so, see the agent's log"
                " (device_plugin_*) and the chart's agent.devicePlugin and agent.kubeletDir."
            )
            return Verdict("False", "DevicesNotAdvertised", message)
    return None


def _preparing(judged: Judged, waiting: list[PoolRecord]) -> Verdict:
    """Return the worst pool's own reason, else one sentence that holds until all are ready."""
    for phase in _WORST:
        for pool in waiting:
            report = answered(judged, judged.assignment.entry(pool.name))
            if report is not None and report.phase is phase:
                said = report.message or "see its HostMemoryNode"
                return Verdict("False", report.reason or phase.value, f"{pool.name}: {said}")
    return Verdict("False", "Preparing", f"Being prepared: {with_names(judged.required)}.")


def _sizes(judged: Judged) -> str:
    parts = []
    for pool in judged.required[:_SHOWN]:
        report = answered(judged, judged.assignment.entry(pool.name))
        if report is not None:
            backing = f" in {report.backing}" if report.backing else ""
            parts.append(f"{pool.name} {format_bytes(report.ready_bytes)}{backing}")
    more = len(judged.required) - _SHOWN
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "") + "."
