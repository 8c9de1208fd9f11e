"""The known faults of registering, of the machine and the process that this is.

Looked up when asked for: attaching itself reads none of it.
"""

from __future__ import annotations

import os

from hostprep.backing import Backing
from hostprep.cuda.known_issues import Fault, known_faults
from hostprep.linux.zones import MOVABLE, parse_zoneinfo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.handoff import Region

__all__ = ["VERSION_FILES", "driver_words", "faults_here", "faults_of"]

VERSION_FILES = ("/proc/driver/nvidia/version", "/sys/module/nvidia/version")
"""The first one also tells the open module from the proprietary one; containers may lack it."""
_ZONEINFO = "/proc/zoneinfo"
_LONGEST_BYTES = 4096
_LONGEST_ZONEINFO_BYTES = 16 << 20


def driver_words() -> str | None:
    """Return what the loaded NVIDIA module says of itself; None where none is loaded."""
    for path in VERSION_FILES:
        text = _read(path, _LONGEST_BYTES)
        if text:
            return text.partition("\n")[0]
    return None


def faults_of(region: Region) -> tuple[Fault, ...]:
    """Return the known faults that registering a region meets here, in calls as it advises.

    Worst first. None where nothing is registered: no NVIDIA driver can be seen from here, or its
    GPUs use the host's page tables (ATS).
    """
    if region.attach.skip_register or driver_words() is None:
        return ()
    call_bytes = max(region.attach.register_chunk_bytes, region.page_bytes)
    return faults_here(region.size_bytes, call_bytes, region)


def faults_here(
    size_bytes: int, chunk_bytes: int | None = None, region: Region | None = None
) -> tuple[Fault, ...]:
    """Return the known faults that registering meets on this kernel and driver, worst first.

    `chunk_bytes` is the largest single call; None is one call over everything. With `region` the
    zones of its NUMA nodes count too, which takes longest: the kernel prints lines for each CPU.
    Never fails.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    machine = os.uname()
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return known_faults(
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
        kernel_release=machine.release,
        driver_version=driver_words(),
        arch=machine.machine,
        base_page_bytes=page_bytes,
        movable_bytes=_movable_pages(region) * page_bytes if region is not None else 0,
        memlock_limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
    )


def _movable_pages(region: Region) -> int:
    """Return how many pages of ZONE_MOVABLE the nodes have that a region's pages may be from.

    Pages of 1 GiB are never from there (mm/hugetlb.c), and regions never on nodes that have no
    other zone: those are the memory of GPUs and CXL expanders.
    """
    if region.backing is Backing.HUGETLB_1GI:
        return 0
    zones = parse_zoneinfo(_read(_ZONEINFO, _LONGEST_ZONEINFO_BYTES))
    fixed = {node for (node, name), zone in zones.items() if zone.managed and name != MOVABLE}
    wanted = fixed if region.numa_node is None else fixed & {region.numa_node}
    return sum(zones[node, MOVABLE].managed for node in wanted if (node, MOVABLE) in zones)


def _read(path: str, limit_bytes: int) -> str:
    """Return a file's text, at most so much of it; nothing where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit_bytes).decode("utf-8", "replace")
    except OSError:
        return ""
