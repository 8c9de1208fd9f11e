"""Memory: fragmentation, huge pages, zones, NUMA, and kernel settings that stall or refuse."""

from __future__ import annotations

from collections.abc import Iterator

from hostprep.backing import GIB, KIB, MIB
from hostprep.node.doctor.finding import Finding, Severity, all_well
from hostprep.node.facts import Facts, HugePageTotals, NumaNode
from hostprep.units import format_bytes

_FRAGMENTED_SHARE = 0.5
"""Below it the planner passes huge pages over; above, one compaction is worth trying."""
_UNEVEN = 0.9
_CMA_WORTH_SAYING_BYTES = 256 * MIB
_NVIDIA = 0x10DE
_THP_FOLDER = "/sys/kernel/mm/transparent_hugepage"


def fragmented_nodes(facts: Facts) -> tuple[NumaNode, ...]:
    """Return nodes with CPUs where less than half of what is free is in blocks of 2 MiB."""
    return tuple(
        node
        for node in facts.nodes
        if node.cpus and _grantable(facts, node) < node.free_fixed_bytes * _FRAGMENTED_SHARE
    )


def check_bad_memory(facts: Facts) -> Iterator[Finding]:
    """Report hardware errors: such a page kills the process that touches it, and its region."""
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
        free, grantable = node.free_fixed_bytes, _grantable(facts, node)
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


def _grantable(facts: Facts, node: NumaNode) -> int:
    return node.contiguous_fixed_bytes(facts.memory.page_bytes)


def check_huge_pages(facts: Facts) -> Iterator[Finding]:
    """Report huge pages that others use, or that cannot be counted on."""
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
    ours = sum(held.huge_pages(pool.page_bytes) for held in facts.pools)
    used = pool.total - pool.free - ours
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


def check_swap(facts: Facts) -> Iterator[Finding]:
    """Tmpfs stays out of swap with noswap (6.4, by a mount of our own), or where there is none."""
    size = format_bytes(facts.memory.swap_total_bytes)
    if facts.memory.swap_total_bytes == 0:
        yield all_well("swap", "no swap is on: tmpfs stays in memory")
    elif not facts.kernel.has_tmpfs_noswap:
        what = f"{size} of swap is on, and tmpfs has no noswap before Linux 6.4"
        remedy = "swapoff -a, or ask for HugeTLB2Mi: huge pages are never swapped"
        yield Finding(Severity.WARNING, "swap", f"{what}: THP and Base are refused", remedy)
    elif not facts.process.can_mount:
        what = f"{size} of swap is on, and noswap needs the right to mount: Base is refused"
        yield Finding(Severity.WARNING, "swap", what, "run it as root, or swapoff -a")
    else:
        yield all_well("swap", f"{size} of swap is on; our mounts are made noswap")


def check_thp(facts: Facts) -> Iterator[Finding]:
    """Direct compaction in page faults stalls for minutes where memory is fragmented."""
    defrag = facts.thp.defrag
    crumbled = fragmented_nodes(facts)
    remedy = f"echo defer > {_THP_FOLDER}/defrag"
    if defrag == "always":
        what = "THP defrag=always: every page fault may compact memory, and stall its process"
        yield Finding(Severity.WARNING, "thp", what, remedy)
    elif defrag in ("madvise", "defer+madvise"):
        nodes = ", ".join(str(node.node_id) for node in crumbled)
        what = f"THP defrag={defrag}: engines that use MADV_HUGEPAGE compact memory in page faults"
        severity = Severity.WARNING if crumbled else Severity.INFO
        if crumbled:
            what += f"; with node {nodes} fragmented their start may take minutes"
        yield Finding(severity, "thp", what, remedy)
    else:
        yield all_well("thp", f"THP defrag={defrag}: page faults do not compact memory")


def check_shmem(facts: Facts) -> Iterator[Finding]:
    """`deny` overrides the huge= option of every tmpfs mount (transhuge.rst)."""
    knob = facts.thp.shmem_enabled
    if knob == "deny":
        what = "shmem_enabled=deny: the backing THP is refused"
        remedy = f"echo never > {_THP_FOLDER}/shmem_enabled (own mounts ask for themselves)"
        yield Finding(Severity.WARNING, "shmem", what, remedy)
    elif knob == "unknown":
        what = "this kernel has no transparent huge pages for tmpfs: the backing THP is refused"
        yield Finding(Severity.INFO, "shmem", what, "ask for HugeTLB2Mi or Base")
    else:
        yield all_well("shmem", f"shmem_enabled={knob}: our tmpfs mounts may have huge pages")


def check_huge_page_sizes(facts: Facts) -> Iterator[Finding]:
    """Report what hugetlbfs can be mounted with here."""
    name, sizes = "huge-page-sizes", facts.kernel.hugepage_sizes
    shown = ", ".join(format_bytes(size) for size in sizes) or "none"
    if 2 * MIB not in sizes:
        what = f"hugetlbfs has no pages of 2 MiB here (it has: {shown})"
        remedy = "use a kernel with CONFIG_HUGETLBFS (and, on arm64, base pages of 4 KiB)"
        yield Finding(Severity.WARNING, name, what, remedy)
    elif GIB not in sizes:
        what = f"no pages of 1 GiB (it has: {shown}): HugeTLB1Gi is refused"
        remedy = "give a virtual machine a CPU model with pdpe1gb, or ask for HugeTLB2Mi"
        yield Finding(Severity.INFO, name, what, remedy)
    else:
        yield all_well(name, f"hugetlbfs offers {shown}")


def check_base_pages(facts: Facts) -> Iterator[Finding]:
    """NVIDIA's driver on arm64 with 64 KiB pages: open-gpu-kernel-modules #1269."""
    page, name = facts.memory.page_bytes, "base-pages"
    nvidia = any(gpu.vendor_id == _NVIDIA for gpu in facts.gpus)
    if facts.kernel.arch == "aarch64" and page == 64 * KIB and nvidia:
        what = (
            "base pages of 64 KiB on arm64: NVIDIA drivers 595 and 610 were seen to fault just "
            "below each 4 GiB in mappings of 4 GiB and more"
        )
        remedy = "boot the kernel with 4 KiB pages (linux-nvidia, not -64k), or use driver 580"
        yield Finding(Severity.WARNING, name, what, remedy)
    else:
        yield all_well(name, f"base pages of {format_bytes(page)}")
