"""GPUs: where they sit, and whether there is memory beside them."""

from __future__ import annotations

from collections.abc import Iterator

from hostprep.node.doctor.finding import Finding, Severity, all_well
from hostprep.node.facts import Facts, Gpu, NumaNode
from hostprep.units import format_bytes

__all__ = ["check_gpus"]

_SHORT = 0.1
"""Of a node's memory free or reclaimable: below it there is hardly anything to prepare."""


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Regions per GPU lie on the GPU's node: it has to be known, and to have memory."""
    problems = [*_without_node(facts), *_short_nodes(facts), *_without_driver(facts.gpus)]
    yield from problems
    if not facts.gpus:
        yield Finding(
            Severity.INFO,
            "gpus",
            "no GPU of NVIDIA or AMD on the PCI bus: regions: PerGPU is refused",
            "use regions: PerNUMANode, or see: lspci -d 10de:",
        )
    elif not problems:
        nodes = {gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None}
        where = f"on NUMA node {', '.join(map(str, sorted(nodes)))}" if nodes else "on one node"
        yield all_well("gpus", f"GPUs: {len(facts.gpus)}, {where}")


def _without_node(facts: Facts) -> Iterator[Finding]:
    lost = [gpu.pci_address for gpu in facts.gpus if gpu.numa_node is None]
    if lost and len([node for node in facts.nodes if node.cpus]) > 1:
        what = f"the firmware tells no NUMA node for GPU {', '.join(lost)}: regions interleaved"
        remedy = "update the BIOS, or pass the topology on to the virtual machine (vNUMA)"
        yield Finding(Severity.WARNING, "gpus", what, remedy)


def _short_nodes(facts: Facts) -> Iterator[Finding]:
    for node_id in sorted({gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None}):
        node = facts.node(node_id)
        count = sum(gpu.numa_node == node_id for gpu in facts.gpus)
        if node is None or not node.total_bytes:
            what = f"node {node_id}, where GPUs sit ({count}), has no memory"
            remedy = f"populate the memory slots of the socket of node {node_id}"
            yield Finding(Severity.WARNING, "gpus", what, remedy)
        elif (left := _left(node)) < node.total_bytes * _SHORT:
            what = (
                f"node {node_id}, where GPUs sit ({count}), has {format_bytes(left)} left of "
                f"{format_bytes(node.total_bytes)}"
            )
            remedy = f"see who took it: numastat -m; cat /sys/devices/system/node/node{node_id}/"
            yield Finding(Severity.WARNING, "gpus", what, f"{remedy}meminfo")


def _left(node: NumaNode) -> int:
    """Return what a node could still give: free, reclaimable, and free huge pages."""
    huge = sum(pool.free * pool.page_bytes for pool in node.huge_pages)
    return node.free_bytes + node.reclaimable_bytes + huge


def _without_driver(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    bare = [gpu.pci_address for gpu in gpus if gpu.driver is None]
    if bare:
        what = f"no driver is bound to GPU {', '.join(bare)}: no engine can register with it"
        remedy = "modprobe nvidia (or amdgpu); in a cluster see the GPU operator's driver pods"
        yield Finding(Severity.WARNING, "gpus", what, remedy)
