"""The Node's three conditions: HostMemoryReady, MemoryAccounted, HugePagesAccounted.

HostMemoryReady follows the table of docs/control-plane.md: the first row that holds.

Accounting: does the scheduler know that the memory is taken? Kubelet subtracts the huge pages that
it saw at its start from `allocatable.memory` (pkg/kubelet/nodestatus/setters.go, MachineInfo). Of
pages made later, and of tmpfs, it knows only what --system-reserved or --kube-reserved set aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hostprep.api.conditions import Condition, ConditionStatus
from hostprep.api.names import (
    DEVICE_RESOURCE_PREFIX,
    HOST_MEMORY_READY,
    HUGE_PAGES_ACCOUNTED,
    MEMORY_ACCOUNTED,
    ready_label,
)
from hostprep.api.node_resource import HugePageStatus, NodeStatus, Phase, PoolStatus
from hostprep.units import format_bytes, format_quantity
from hostprep_operator.marks import Marks
from hostprep_operator.reconcile.assign import (
    SERVING,
    Assignment,
    may_begin,
    pool_ready,
    report_of,
)
from hostprep_operator.reconcile.changes import NodeView
from hostprep_operator.records import HostMemoryNodeRecord, NodeRecord, PoolRecord, Readiness

_SHOWN = 10
_WORST = (Phase.FAILED, Phase.DEGRADED, Phase.RESIZING)
_UNSETTLED = (Phase.PENDING, Phase.PREPARING)
_WAITING = "Not known until the node's memory is prepared."


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """A managed node and all that its conditions rest on."""

    view: NodeView
    node: NodeRecord
    hmn: HostMemoryNodeRecord | None
    """Only if it is this Node's."""
    assignment: Assignment
    chosen: tuple[PoolRecord, ...]
    """Pools that select the node, the ruling first; never empty."""
    required: tuple[PoolRecord, ...]
    """Those of them that are required, and have their entry or what is left of it."""
    marks: Marks
    waiting: tuple[PoolRecord, ...] = ()
    """Those that are required and wait for their turn, without an entry so far."""

    @property
    def readiness(self) -> Readiness:
        """How a node with required pools is marked: as the ruling one says."""
        return self.required[0].readiness

    @property
    def may_write_taint(self) -> bool:
        """Whether the ruling pool's taint may be set and removed here."""
        return self.view.settings.may_write_taint(self.readiness.taint)

    @property
    def placeholder(self) -> Mapping[str, int] | None:
        """Huge pages that the agent's Pod asks for, by resource; None between two Pods."""
        if self.view.agent is not None:
            return self.view.agent.huge_pages_bytes
        return {} if self.view.settings.liveness == "off" else None

    @property
    def status_boot(self) -> str:
        """The boot that the agent reports; empty while it has reported nothing."""
        return self.hmn.status.boot_id if self.hmn else ""

    @property
    def is_open_this_boot(self) -> bool:
        """Whether the node was opened in this boot, and not closed since."""
        return self.marks.is_open and self.marks.opened_boot == self.node.boot_id

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
        labelled = ready_label(pool.name) in self.marks.labels
        if pool_ready(self.node, self.hmn, self.assignment.entry(pool.name)):
            return self.is_observed or labelled
        # A pool that is not required closes no node, and its labels alone say that it was ready.
        was_open = self.is_open_this_boot or not pool.readiness.required
        return labelled and was_open and self._is_held_as_it_was(pool.name)

    def _is_held_as_it_was(self, pool: str) -> bool:
        """Whether engines hold what a change is about that the agent has not answered yet.

        It answers that the change is blocked, mostly: to close the node for that second would
        take the ready labels off a whole fleet, and put them back.
        """
        hmn, entry = self.hmn, self.assignment.entry(pool)
        if hmn is None or entry is None or entry.absent:
            return False
        report = hmn.status.pool(pool)
        return (
            hmn.status.boot_id == self.node.boot_id
            and report is not None
            and report.phase in SERVING
            and report.uid == entry.uid
            and report.generation != entry.generation
            and report.regions_leased > 0
        )

    def report(self, pool: str) -> PoolStatus | None:
        """Return what the agent reports in this boot of exactly the pool's entry."""
        return report_of(self.node, self.hmn, self.assignment.entry(pool))


def derive_ready(context: NodeContext, accounting: Iterable[Condition]) -> Condition:
    """Return HostMemoryReady of a node whose agent is alive, and whose accounting is this."""
    waiting = [pool for pool in context.required if not context.is_ready(pool)]
    if _rebooted(context):
        names = _names(context)
        return _ready("False", "Rebooted", f"The node was booted again; being prepared: {names}.")
    if waiting or not (context.is_observed or context.is_open_this_boot):
        # For an opening the status must answer the newest spec.
        return _preparing(context, waiting)
    missing = _not_advertised(context)
    if missing is not None:
        return missing
    unaccounted = [condition for condition in accounting if condition.status != "True"]
    if unaccounted and any(pool.accounting_require for pool in context.required):
        return _ready("False", "NotAccounted", unaccounted[0].message)
    return _ready("True", "Ready", _sizes(context))


def waiting_condition(context: NodeContext) -> Condition:
    """Return HostMemoryReady of a node whose pools all wait for their turn.

    Unknown where the node is open: it lost its HostMemoryNode, and the agent keeps what it has.
    """
    status: ConditionStatus = "Unknown" if context.is_open_this_boot else "False"
    names = listed([pool.name for pool in context.waiting], _SHOWN)
    paused = [pool.name for pool in context.waiting if pool.rollout.paused]
    if paused:
        message = f"{names}: nothing begins while spec.rollout.paused of {listed(paused, _SHOWN)}."
        return _ready(status, "Paused", message)
    outside = [
        pool.name
        for pool in context.waiting
        if pool.rollout.partition is not None and not may_begin(pool, context.node)
    ]
    if outside:
        message = f"{names}: only nodes of spec.rollout.partition of {listed(outside, _SHOWN)}."
        return _ready(status, "Partitioned", message)
    message = f"{names}: prepared when its turn comes within spec.rollout.maxUnavailable."
    return _ready(status, "WaitingForTurn", message)


def unreachable(view: NodeView, node: NodeRecord) -> Condition | None:
    """Return HostMemoryReady as Unknown where no agent can report for the node; else None."""
    grace_s = view.settings.agent_grace_s
    if node.ready != "True" and view.now_s - node.ready_since_s >= grace_s:
        return _ready("Unknown", "NodeNotReady", "Kubelet does not say that the node is Ready.")
    since_s = _agent_unreachable_since_s(view, node)
    before = node.conditions.get(HOST_MEMORY_READY)
    # Then the grace is over: a restarted operator, or a new Pod, proves no life.
    was_unreachable = before is not None and before.reason in ("NoAgent", "AgentNotReady")
    if since_s is None or (view.now_s - since_s < grace_s and not was_unreachable):
        return None
    if view.agent is None:
        return _ready("Unknown", "NoAgent", "No agent Pod runs on the node.")
    return _ready(
        "Unknown", "AgentNotReady", "The agent's Pod is not Ready: its last verification failed."
    )


def unreachable_at_s(view: NodeView, node: NodeRecord) -> float | None:
    """Return when the node becomes unreachable if nothing else happens."""
    ends_s = [since + view.settings.agent_grace_s for since in _unreachable_since_s(view, node)]
    return min((end for end in ends_s if end > view.now_s), default=None)


def unreachable_since_s(view: NodeView, node: NodeRecord) -> float | None:
    """Return since when no agent can act on the node; None where one can."""
    return min(_unreachable_since_s(view, node), default=None)


def detect_reboot(context: NodeContext) -> str:
    """Return the id of a boot that came after the one in the marks, or nothing.

    Kubelet or the agent may be the first to report it: either closes the node.
    """
    marks, node = context.marks, context.node
    if marks.opened_s is None:
        return ""
    known = {marks.opened_boot, marks.closed_boot, ""}
    if node.boot_id not in known:
        return node.boot_id
    if marks.is_open and context.status_boot not in known:
        return context.status_boot
    return ""


def _ready(status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(HOST_MEMORY_READY, status, reason, message)


def _unreachable_since_s(view: NodeView, node: NodeRecord) -> list[float]:
    since_s = [] if node.ready == "True" else [node.ready_since_s]
    agents_s = _agent_unreachable_since_s(view, node)
    return since_s if agents_s is None else [*since_s, agents_s]


def _agent_unreachable_since_s(view: NodeView, node: NodeRecord) -> float | None:
    if view.settings.liveness == "off":
        return None
    if view.agent is None:
        return max(node.created_s, view.agent_missing_since_s or 0.0)
    return None if view.agent.ready else view.agent.ready_since_s


def _rebooted(context: NodeContext) -> bool:
    marks, boot_id = context.marks, context.node.boot_id
    if context.status_boot == boot_id:
        return False
    return bool({marks.opened_boot, marks.closed_boot} - {"", boot_id} or detect_reboot(context))


def _not_advertised(context: NodeContext) -> Condition | None:
    """Return what keeps a node closed whose memory is ready while kubelet does not offer it yet.

    For an opening alone: a region between two owners is not allocatable for a moment, and while
    kubelet or the agent restarts none is, which is nothing to close an open node for. What the
    Node says is of this boot: kubelet writes the bootID and the devices at once, none at first.
    """
    if context.is_open_this_boot:
        return None
    for pool in context.required:
        entry = context.assignment.entry(pool.name)
        report = context.report(pool.name)
        if entry is None or report is None or not entry.uses_devices:
            continue
        device = DEVICE_RESOURCE_PREFIX + pool.name
        offered, wanted = context.node.allocatable.get(device, 0), max(len(report.regions), 1)
        if offered < wanted:
            message = (
                f"{pool.name}: kubelet offers {offered} of its {wanted} regions"
                f" as {device}. If it stays so, see the agent's log"
                " (device_plugin_*) and the chart's agent.devicePlugin and agent.kubeletDir."
            )
            return _ready("False", "DevicesNotAdvertised", message)
    return None


def _preparing(context: NodeContext, waiting: list[PoolRecord]) -> Condition:
    """Return the worst pool's own reason, else one sentence that holds until all are ready."""
    for phase in _WORST:
        for pool in waiting:
            report = context.report(pool.name)
            if report is not None and report.phase is phase:
                message = report.message or "see its HostMemoryNode"
                return _ready("False", report.reason or phase.value, f"{pool.name}: {message}")
    return _ready("False", "Preparing", f"Being prepared: {_names(context)}.")


def _names(context: NodeContext) -> str:
    return listed([pool.name for pool in context.required], _SHOWN)


def _sizes(context: NodeContext) -> str:
    parts = []
    for pool in context.required:
        report = context.report(pool.name)
        if report is not None:
            backing = f" in {report.backing}" if report.backing else ""
            blocked = " (a change waits for leases)" if report.phase is Phase.BLOCKED else ""
            parts.append(f"{pool.name} {format_bytes(report.ready_bytes)}{backing}{blocked}")
    return listed(parts, _SHOWN) + "."


def listed(names: Sequence[str], most: int) -> str:
    """Return the names as a list for people, cut where it would be endless."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nodes_of(count: int) -> str:
    """Return `1 node`, or `2 nodes`."""
    return f"{count} node" + ("" if count == 1 else "s")


# --- accounting


def accounting_conditions(context: NodeContext) -> tuple[Condition, Condition]:
    """Return MemoryAccounted and HugePagesAccounted.

    While memory is being prepared the numbers move: then the conditions stay as they are, or are
    Unknown.
    """
    before = context.node.conditions
    memory = Condition(MEMORY_ACCOUNTED, "Unknown", "Preparing", _WAITING)
    pages = replace(memory, type=HUGE_PAGES_ACCOUNTED)
    status = context.hmn.status if context.hmn else NodeStatus()
    if not status.boot_id or status.boot_id != context.node.boot_id:
        return memory, pages
    if context.placeholder is None and HUGE_PAGES_ACCOUNTED in before:
        # An upgrade replaces the agent's Pod, and for a second no Pod asks for the pages.
        return _memory(context.node, status), before[HUGE_PAGES_ACCOUNTED]
    reports = [context.report(pool.name) for pool in context.required]
    if any(report is None or report.phase in _UNSETTLED for report in reports):
        return before.get(MEMORY_ACCOUNTED, memory), before.get(HUGE_PAGES_ACCOUNTED, pages)
    return (
        _memory(context.node, status),
        _huge_pages(context.node, status, context.placeholder or {}),
    )


def _memory(node: NodeRecord, status: NodeStatus) -> Condition:
    """Compare what is set aside beyond the pages that kubelet knows with what it does not know."""
    known = sum(size for name, size in node.capacity.items() if name.startswith("hugepages-"))
    total, free = node.capacity.get("memory", 0), node.allocatable.get("memory", 0)
    set_aside = max(total - free - known, 0)
    unseen = sum(
        max(size.held * size.page_bytes - node.capacity.get(_resource(size), 0), 0)
        for size in status.huge_pages
    )
    # In tmpfs: ordinary memory, which no count of huge pages shows.
    unseen += sum(
        region.size_bytes
        for report in status.pools
        for region in report.regions
        if not region.backing.startswith("HugeTLB")
    )
    if unseen <= set_aside:
        message = "Kubelet does not offer the pools' memory to pods."
        return Condition(MEMORY_ACCOUNTED, "True", "Accounted", message)
    message = (
        f"Kubelet offers {format_bytes(unseen - set_aside)} of the pools' memory to pods: "
        "reserve huge pages before kubelet starts (hostprep boot --script), "
        f"or add {format_bytes(unseen)} to kubelet's systemReserved.memory."
    )
    return Condition(MEMORY_ACCOUNTED, "False", "Overcommitted", message)


def _huge_pages(node: NodeRecord, status: NodeStatus, placeholder: Mapping[str, int]) -> Condition:
    for size in status.huge_pages:
        resource = _resource(size)
        # What the agent's own Pod asks for is promised to it, and used by the pools only.
        offered = max(node.allocatable.get(resource, 0) - placeholder.get(resource, 0), 0)
        if size.held and offered + size.held * size.page_bytes > size.total * size.page_bytes:
            message = (
                f"Kubelet offers {format_bytes(offered)} of {resource} to pods, the pools' "
                "pages among them: pods that get them fail. Let the agent ask for the pools' "
                "(the chart's agent.resources.limits), or let no pod ask for that resource."
            )
            return Condition(HUGE_PAGES_ACCOUNTED, "False", "Offered", message)
    message = "Kubelet does not offer the pools' huge pages to pods."
    return Condition(HUGE_PAGES_ACCOUNTED, "True", "Accounted", message)


def _resource(size: HugePageStatus) -> str:
    """Return kubelet's name of a page size, such as hugepages-2Mi."""
    return f"hugepages-{format_quantity(size.page_bytes)}"
