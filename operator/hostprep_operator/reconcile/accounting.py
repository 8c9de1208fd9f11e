"""Does the scheduler know that the memory is taken? Two Node conditions, and what to do about it.

Kubelet subtracts the huge pages that it saw at its start from `allocatable.memory`
(pkg/kubelet/nodestatus/setters.go, MachineInfo). Of pages made later, and of tmpfs, it knows only
what the administrator set aside with --system-reserved or --kube-reserved.
"""

from __future__ import annotations

from collections.abc import Mapping

from hostprep.api.conditions import Condition
from hostprep.api.names import HUGE_PAGES_ACCOUNTED, MEMORY_ACCOUNTED
from hostprep.api.node_resource import HugePageStatus, Phase
from hostprep.units import format_bytes
from hostprep_operator.reconcile.verdict import Judged, answered

__all__ = ["accounts", "unaccounted"]

_UNSETTLED = (Phase.PENDING, Phase.PREPARING)
_WAITING = "Not known until the node's memory is prepared."
_SUFFIXES = ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))


def accounts(judged: Judged) -> tuple[Condition, Condition]:
    """Return MemoryAccounted and HugePagesAccounted.

    While memory is being prepared the numbers move: then the conditions say what they said, or
    that it is not known yet.
    """
    if judged.hmn is None or not judged.status_boot or judged.status_boot != judged.node.boot_id:
        return _unknown(MEMORY_ACCOUNTED), _unknown(HUGE_PAGES_ACCOUNTED)
    before = judged.node.conditions
    if judged.placeholder is None and HUGE_PAGES_ACCOUNTED in before:
        # An upgrade replaces the agent's Pod, and for a second nobody asks for the pages.
        return _memory(judged), before[HUGE_PAGES_ACCOUNTED]
    if any(_is_unsettled(judged, pool.name) for pool in judged.required):
        return (
            before.get(MEMORY_ACCOUNTED) or _unknown(MEMORY_ACCOUNTED),
            before.get(HUGE_PAGES_ACCOUNTED) or _unknown(HUGE_PAGES_ACCOUNTED),
        )
    return _memory(judged), _huge_pages(judged, judged.placeholder)


def unaccounted(judged: Judged, conditions: tuple[Condition, ...]) -> Condition | None:
    """Return the first condition that is not True where a required pool asks for it."""
    if not any(pool.accounting_require for pool in judged.required):
        return None
    return next((condition for condition in conditions if condition.status != "True"), None)


def _unknown(name: str) -> Condition:
    return Condition(type=name, status="Unknown", reason="Preparing", message=_WAITING)


def _is_unsettled(judged: Judged, pool: str) -> bool:
    report = answered(judged, judged.assignment.entry(pool))
    return report is None or report.phase in _UNSETTLED


def _memory(judged: Judged) -> Condition:
    """Compare what is set aside beyond the pages that kubelet knows with what it does not know."""
    node, hmn = judged.node, judged.hmn
    known = sum(size for name, size in node.capacity.items() if name.startswith("hugepages-"))
    total, free = node.capacity.get("memory", 0), node.allocatable.get("memory", 0)
    set_aside = max(total - free - known, 0)
    pages = hmn.status.huge_pages if hmn else ()
    unseen = sum(
        max(size.held * size.page_bytes - node.capacity.get(_resource(size), 0), 0)
        for size in pages
    )
    unseen += sum(report.shared_bytes for report in hmn.status.pools) if hmn else 0
    if unseen <= set_aside:
        return Condition(
            type=MEMORY_ACCOUNTED,
            status="True",
            reason="Accounted",
            message="Kubelet does not offer the pools' memory to pods.",
        )
    return Condition(
        type=MEMORY_ACCOUNTED,
        status="False",
        reason="Overcommitted",
        message=(
            f"Kubelet offers {format_bytes(unseen - set_aside)} of the pools' memory to pods: "
            "reserve huge pages before kubelet starts (hostprep boot --script), "
            f"or add {format_bytes(unseen)} to kubelet's systemReserved.memory."
        ),
    )


def _huge_pages(judged: Judged, placeholder: Mapping[str, int] | None) -> Condition:
    for size in judged.hmn.status.huge_pages if judged.hmn else ():
        resource = _resource(size)
        # What the agent's own Pod asks for is promised to it, and used by nobody but the pools.
        promised = (placeholder or {}).get(resource, 0)
        offered = max(judged.node.allocatable.get(resource, 0) - promised, 0)
        if size.held and offered + size.held * size.page_bytes > size.total * size.page_bytes:
            return Condition(
                type=HUGE_PAGES_ACCOUNTED,
                status="False",
                reason="Offered",
                message=(
                    f"Kubelet offers {format_bytes(offered)} of {resource} to pods, the pools' "
                    "pages among them: pods that get them fail. Let the agent ask for the pools' "
                    "(the chart's agent.resources.limits), or let no pod ask for that resource."
                ),
            )
    return Condition(
        type=HUGE_PAGES_ACCOUNTED,
        status="True",
        reason="Accounted",
        message="Kubelet does not offer the pools' huge pages to pods.",
    )


def _resource(size: HugePageStatus) -> str:
    """Return kubelet's name of a page size, such as hugepages-2Mi."""
    for unit, suffix in _SUFFIXES:
        if size.page_bytes >= unit and size.page_bytes % unit == 0:
            return f"hugepages-{size.page_bytes // unit}{suffix}"
    return f"hugepages-{size.page_bytes}"
