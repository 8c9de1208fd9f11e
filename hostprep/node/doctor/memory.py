"""Memory: fragmentation, huge pages of others, zones, and how it lies over the NUMA nodes."""

from __future__ import annotations

from collections.abc import Iterator

from hostprep.backing import GIB, MIB
from hostprep.node.doctor.finding import Finding, Severity, all_well
from hostprep.node.facts import Facts, HugePageTotals, NumaNode
from hostprep.units import format_bytes

__all__ = [
    "check_bad_memory",
    "check_cma",
    "check_fragmentation",
    "check_huge_pages",
    "check_movable",
    "check_numa",
    "fragmented_nodes",
]

_FRAGMENTED_SHARE = 0.5
"""Below it the planner passes huge pages over; above, one compaction is worth trying."""
_UNEVEN = 0.9
_CMA_WORTH_SAYING_BYTES = 256 * MIB


def fragmented_nodes(facts: Facts) -> tuple[NumaNode, ...]:
    """Return nodes with CPUs where less than half of what is free is in blocks of 2 MiB."""
    return tuple(
        node
        for node in facts.nodes
        if node.cpus and _grantable(facts, node) < _free_fixed(node) * _FRAGMENTED_SHARE
    )


def check_bad_memory(facts: Facts) -> Iterator[Finding]:
    """Tell what the hardware reported: such a page ends whoever touches it, and its region."""
    name, bad = "bad-memory", facts.memory.corrupted_bytes
    if bad:
        what = f"the kernel took {format_bytes(bad)} with hardware errors out of use since the boot"
        remedy = "hostprep verify --pages (agents do it by themselves); dmesg names the module"
        yield Finding(Severity.WARNING, name, what, remedy)
    else:
        yield all_well(name, "no page was reported bad since the boot")


def check_fragmentation(facts: Facts) -> Iterator[Finding]:
    """How much could be had as pages of 2 MiB at once, without moving anything."""
    name, crumbled = "fragmentation", fragmented_nodes(facts)
    for node in crumbled:
        free, grantable = _free_fixed(node), _grantable(facts, node)
        what = (
            f"node {node.node_id} is fragmented: {format_bytes(grantable)} of the "
            f"{format_bytes(free)} free ({grantable * 100 // free} %) in blocks of 2 MiB or more"
        )
        remedy = (
            "prepare at boot (hostprep boot --script); now: "
            f"echo 1 > /sys/devices/system/node/node{node.node_id}/compact"
        )
        yield Finding(Severity.WARNING, name, what, remedy)
    nodes = [node for node in facts.nodes if node.cpus]
    total = sum(_grantable(facts, node) for node in nodes)
    each = ", ".join(f"node {n.node_id}: {format_bytes(_grantable(facts, n))}" for n in nodes)
    what = f"{format_bytes(total)} could be had in pages of 2 MiB now ({each})"
    if crumbled:
        yield Finding(Severity.INFO, name, what, "ask for less than that, or allow Base as well")
    else:
        yield all_well(name, what)


def _free_fixed(node: NumaNode) -> int:
    movable = sum(zone.free_bytes for zone in node.zones if zone.is_movable)
    return max(0, node.free_bytes - movable - node.free_cma_bytes)


def _grantable(facts: Facts, node: NumaNode) -> int:
    # buddyinfo does not say which free blocks are CMA's: all of them may be large ones.
    return max(0, node.contiguous_bytes(facts.memory.page_bytes) - node.free_cma_bytes)


def check_huge_pages(facts: Facts) -> Iterator[Finding]:
    """Tell what of the huge-page pools is somebody else's, or is not to be counted on."""
    name = "huge-pages"
    found = False
    for pool in facts.huge_pages:
        for what, remedy, severity in _others(facts, pool):
            found = True
            shown = f"pages of {format_bytes(pool.page_bytes)}: {what}"
            yield Finding(severity, name, shown, remedy)
    if facts.huge_pages and not found:
        idle = sum(pool.free * pool.page_bytes for pool in facts.huge_pages)
        yield all_well(name, f"no huge page is in others' use; {format_bytes(idle)} lie ready")


def _others(facts: Facts, pool: HugePageTotals) -> Iterator[tuple[str, str, Severity]]:
    size_kib = pool.page_bytes // 1024
    folder = f"/sys/kernel/mm/hugepages/hugepages-{size_kib}kB"
    who = "grep -l huge /proc/*/numa_maps shows who; the plan leaves them alone"
    used = pool.total - pool.free - _ours(facts, pool.page_bytes)
    if used > 0:
        yield f"{used} are in use by others", who, Severity.INFO
    if pool.reserved:
        yield f"{pool.reserved} of those free are reserved by others", who, Severity.INFO
    if pool.surplus:
        what = f"{pool.surplus} are surplus: they vanish when whoever uses them lets go"
        yield what, f"cat {folder}/nr_overcommit_hugepages shows who may make them", Severity.INFO
    if pool.overcommit:
        what = f"{pool.overcommit} more may be taken from memory at any time (overcommit)"
        yield what, f"echo 0 > {folder}/nr_overcommit_hugepages", Severity.WARNING


def _ours(facts: Facts, page_bytes: int) -> int:
    return sum(
        region.resident_bytes // page_bytes
        for pool in facts.pools
        for region in pool.regions
        if region.backing.is_hugetlb and region.backing.page_bytes == page_bytes
    )


def check_movable(facts: Facts) -> Iterator[Finding]:
    """FOLL_LONGTERM migrates pages out of ZONE_MOVABLE (mm/gup.c): no place for regions."""
    nodes = [node for node in facts.nodes if node.cpus]
    for node in nodes:
        if node.movable_bytes:
            what = (
                f"node {node.node_id} has {format_bytes(node.movable_bytes)} of ZONE_MOVABLE: "
                "registering would migrate every page; only HugeTLB1Gi is not taken from there"
            )
            remedy = (
                "boot without movablecore= and kernelcore=; online memory as online_kernel "
                "(/sys/devices/system/memory/auto_online_blocks)"
            )
            yield Finding(Severity.WARNING, "movable", what, remedy)
    if nodes and not any(node.movable_bytes for node in nodes):
        yield all_well("movable", "no node with CPUs has a ZONE_MOVABLE")


def check_cma(facts: Facts) -> Iterator[Finding]:
    """CMA memory too is migrated out of by every long-term pin."""
    size = sum(node.free_cma_bytes for node in facts.nodes)
    if size >= _CMA_WORTH_SAYING_BYTES:
        what = f"{format_bytes(size)} free are CMA's: counted as not to be had"
        remedy = "boot with a smaller cma=, and without hugetlb_cma="
        yield Finding(Severity.INFO, "cma", what, remedy)
    else:
        yield all_well("cma", f"{format_bytes(size)} free are CMA's")


def check_numa(facts: Facts) -> Iterator[Finding]:
    """Memory without CPUs is left out; equal regions end where the smallest node does."""
    with_cpus = [node for node in facts.nodes if node.cpus]
    without = [node for node in facts.nodes if not node.cpus and node.total_bytes]
    if without:
        ids = ", ".join(str(node.node_id) for node in without)
        what = f"nodes without CPUs ({ids}) are memory of GPUs or CXL expanders: left out"
        remedy = "nothing to do; keep others' memory off them with numactl or cpuset.mems"
        yield Finding(Severity.INFO, "numa", what, remedy)
    sizes = {node.node_id: node.total_bytes for node in with_cpus}
    if not sizes:
        remedy = "see: numactl --hardware; boot without maxcpus= and with all memory"
        yield Finding(Severity.ERROR, "numa", "no node has both CPUs and memory", remedy)
    elif min(sizes.values()) < max(sizes.values()) * _UNEVEN:
        each = ", ".join(f"node {n}: {format_bytes(size)}" for n, size in sizes.items())
        what = f"memory is uneven ({each}): equal regions end where the smallest node does"
        remedy = "populate the sockets' memory slots evenly, or ask for regions: Single"
        yield Finding(Severity.WARNING, "numa", what, remedy)
    else:
        each = format_bytes(min(sizes.values()) // GIB * GIB or min(sizes.values()))
        yield all_well("numa", f"nodes with CPUs: {len(sizes)}, of {each} or more")
