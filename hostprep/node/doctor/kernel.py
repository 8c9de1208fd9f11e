"""The kernel: what it is too old for, and which of its settings stall or refuse."""

from __future__ import annotations

from collections.abc import Iterator

from hostprep.backing import GIB, KIB, MIB
from hostprep.node.doctor.finding import Finding, Severity, all_well
from hostprep.node.doctor.memory import fragmented_nodes
from hostprep.node.facts import Facts
from hostprep.units import format_bytes

__all__ = [
    "check_base_pages",
    "check_huge_page_sizes",
    "check_kernel",
    "check_shmem",
    "check_swap",
    "check_thp",
]

_NVIDIA = 0x10DE
_LONG_TERM_PIN_BUG = ((6, 11), (6, 14))
"""From, and below. Fixed by aa6f8b2593b5 and 94efde1d1539 in mm/gup.c."""
_THP_FOLDER = "/sys/kernel/mm/transparent_hugepage"


def check_kernel(facts: Facts) -> Iterator[Finding]:
    """Linux 5.14 populates, 6.4 keeps tmpfs out of swap, 6.9 maps ids on hugetlbfs."""
    kernel, name = facts.kernel, "kernel"
    if kernel.version == (0, 0):
        yield Finding(
            Severity.WARNING,
            name,
            "the kernel's version is unknown",
            "see: uname -r; it needs 5.14",
        )
        return
    if not kernel.has_populate_write:
        what = f"Linux {kernel.release} has no MADV_POPULATE_WRITE: nothing can be populated"
        yield Finding(Severity.ERROR, name, what, "use Linux 5.14 or newer")
    if _LONG_TERM_PIN_BUG[0] <= kernel.version < _LONG_TERM_PIN_BUG[1]:
        what = (
            f"Linux {kernel.release}: 6.11 to 6.13 may refuse long-term pins of more than 2 GiB "
            "at a time, as registering with CUDA makes them"
        )
        remedy = "use Linux 6.14, or a distribution's kernel with commit aa6f8b2593b5; else let"
        yield Finding(Severity.WARNING, name, what, f"{remedy} engines register 1 GiB at a time")
    if kernel.has_populate_write and not kernel.has_idmapped_hugetlbfs:
        what = f"Linux {kernel.release}: pods with hostUsers: false cannot mount hugetlbfs (6.9)"
        yield Finding(Severity.INFO, name, what, "leave hostUsers unset for engines, or use 6.9")
    if kernel.has_idmapped_hugetlbfs:
        yield all_well(name, f"Linux {kernel.release} can do all that is needed")


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
    """Tell what hugetlbfs can be mounted with here."""
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
