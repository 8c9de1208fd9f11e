"""Known issues of kernels, zones and drivers that registering host memory with CUDA meets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hostprep.backing import GIB, KIB, MIB, Backing
from hostprep.linux.numa import MOVABLE, parse_zoneinfo
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.handoff import Region

ONE_TABLE_ALLOCATION = (580,)
"""The release from which the driver's table is one allocation."""
_SHARED_LOCK = (565,)
"""The release from which registering takes the driver's global lock shared (RS_FLAGS)."""
ONE_CALL_LIMIT_BYTES = 512 * GIB
"""Drivers from 580 on fail a call of this size or more: kvzalloc refuses more than INT_MAX, and the
table has 16 bytes for each 4 KiB (nvos_create_alloc; vllm #51080, maru #64)."""
_STALLING_CALL_BYTES = 512 * MIB
"""From here the table is 2 MiB and more: vmalloc asks for huge pages and may compact memory with
the lock held, Linux 5.18 and later (open-gpu-kernel-modules #1383)."""
LONG_TERM_PIN_BUG = ((6, 11), (6, 14))
"""From, and below; fixed by aa6f8b2593b5 and 94efde1d1539 in mm/gup.c."""
_LONG_TERM_PIN_LIMIT_BYTES = 2 * GIB
_LARGE_ARM_PAGES = ((595,), 4 * GIB)
"""595 and 610 fault below each 4 GiB of mappings from there on (open-gpu-kernel-modules #1269)."""

_RELEASE = re.compile(r"(?<![\d.])(\d{3})\.(\d{1,3})(?:\.(\d{1,3}))?(?![\d.])", re.ASCII)
_KERNEL = re.compile(r"(\d{1,4})\.(\d{1,4})", re.ASCII)


@dataclass(frozen=True)
class KnownIssue:
    """A known issue of a kernel, a zone or a driver that meets this registration.

    `severity` is `error` (it will fail), `warning` (it stalls somebody or may fail) or `info`
    (harmless as it is registered now; not for a larger call).
    """

    severity: str
    name: str
    """CamelCase and stable, for machines."""
    what: str
    remedy: str


def parse_driver_version(text: str | None) -> tuple[int, ...] | None:
    """Return the release of NVIDIA's driver in a text, such as (580, 65, 6); None if there is none.

    Takes `580.65.06` and /proc/driver/nvidia/version, whose lines also name a compiler and a date.
    """
    match = _RELEASE.search(text or "")
    return tuple(int(part) for part in match.groups() if part is not None) if match else None


def known_issues_of(
    *,
    size_bytes: int,
    chunk_bytes: int | None = None,
    kernel_release: str | None = None,
    driver_version: str | None = None,
    arch: str = "x86_64",
    base_page_bytes: int = 4 * KIB,
    movable_bytes: int = 0,
    memlock_limit_bytes: int | None = None,
) -> tuple[KnownIssue, ...]:
    """Return the known issues that registering `size_bytes` meets here, worst first.

    `chunk_bytes` is the largest single call; None is one call over everything. `movable_bytes` is
    what of the machine's memory lies in ZONE_MOVABLE; `memlock_limit_bytes` is RLIMIT_MEMLOCK, None
    unlimited. What is not known (None) is no issue.
    """
    call_bytes = min(size_bytes, chunk_bytes or size_bytes)
    version = parse_driver_version(driver_version)
    issues = [
        *_kernel_issues(kernel_release, size_bytes, call_bytes),
        *_driver_issues(version, size_bytes, call_bytes),
        *_arm_issues(version, arch, base_page_bytes, size_bytes),
        *_zone_issues(movable_bytes),
        *_limit_issues(memlock_limit_bytes, size_bytes),
    ]
    order = ("error", "warning", "info")
    return tuple(sorted(issues, key=lambda issue: order.index(issue.severity)))


def _kernel_issues(release: str | None, size_bytes: int, call_bytes: int) -> Iterator[KnownIssue]:
    match = _KERNEL.match(release or "")
    version = (int(match[1]), int(match[2])) if match else None
    first, after = LONG_TERM_PIN_BUG
    if version is None or not first <= version < after or size_bytes < _LONG_TERM_PIN_LIMIT_BYTES:
        return
    small = call_bytes < _LONG_TERM_PIN_LIMIT_BYTES
    what = f"Linux {release}: 6.11 to 6.13 may refuse to pin 2 GiB or more in one call"
    remedy = (
        f"nothing to do: calls are of at most {format_bytes(call_bytes)}"
        if small
        else "register less than 2 GiB at a time, or use Linux 6.14 (commit aa6f8b2593b5)"
    )
    yield KnownIssue("info" if small else "error", "LongTermPinLimit", what, remedy)


def _driver_issues(
    version: tuple[int, ...] | None, size_bytes: int, call_bytes: int
) -> Iterator[KnownIssue]:
    # Unknown counts as new: the releases that are installed today have the limit.
    if (version is None or version >= ONE_TABLE_ALLOCATION) and size_bytes >= ONE_CALL_LIMIT_BYTES:
        fails = call_bytes >= ONE_CALL_LIMIT_BYTES
        yield KnownIssue(
            "error" if fails else "info",
            "SingleCallLimit",
            "NVIDIA drivers from 580 on fail calls of 512 GiB and more (out of memory)",
            "register in chunks"
            if fails
            else f"nothing to do: calls are of at most {format_bytes(call_bytes)}",
        )
    if call_bytes >= _STALLING_CALL_BYTES:
        what = (
            f"calls of {format_bytes(call_bytes)}: from 512 MiB on the driver's own table may "
            "compact memory under its lock, and other CUDA processes and nvidia-smi wait"
        )
        remedy = "register at most 480 MiB at a time (our default)"
        yield KnownIssue("warning", "LargeCall", what, remedy)
    if version is not None and version < _SHARED_LOCK:
        what = (
            f"NVIDIA driver {'.'.join(map(str, version))} registers with its global lock held "
            "exclusively: every other CUDA process waits for the length of each call"
        )
        yield KnownIssue("warning", "ExclusiveLock", what, "use driver 565 or newer")


def _arm_issues(
    version: tuple[int, ...] | None, arch: str, base_page_bytes: int, size_bytes: int
) -> Iterator[KnownIssue]:
    first, least_bytes = _LARGE_ARM_PAGES
    affected = version is None or version >= first
    if arch != "aarch64" or base_page_bytes != 64 * KIB or not affected or size_bytes < least_bytes:
        return
    what = (
        "base pages of 64 KiB on arm64: NVIDIA drivers 595 and 610 were seen to fault just below "
        "each 4 GiB in mappings of 4 GiB and more"
    )
    remedy = "boot the kernel with 4 KiB pages (linux-nvidia, not -64k), or use driver 580"
    yield KnownIssue("warning", "LargeArmPages", what, remedy)


def _zone_issues(movable_bytes: int) -> Iterator[KnownIssue]:
    if movable_bytes:
        what = (
            f"{format_bytes(movable_bytes)} of this machine are ZONE_MOVABLE: pages from there "
            "are migrated while they are registered"
        )
        remedy = "boot without movablecore= and kernelcore=; online memory as online_kernel"
        yield KnownIssue("warning", "MovableZone", what, remedy)


def _limit_issues(memlock_limit_bytes: int | None, size_bytes: int) -> Iterator[KnownIssue]:
    if memlock_limit_bytes is None or memlock_limit_bytes >= size_bytes:
        return
    what = (
        f"RLIMIT_MEMLOCK is {format_bytes(memlock_limit_bytes)}: NVIDIA's module pins without "
        "counting against it (os-mlock.c); mlock and registering the same memory with RDMA do"
    )
    remedy = "ulimit -l unlimited, if the engine uses RDMA (LimitMEMLOCK=infinity in its unit)"
    yield KnownIssue("info", "LockedMemoryLimit", what, remedy)


VERSION_FILES = ("/proc/driver/nvidia/version", "/sys/module/nvidia/version")
"""The first one also tells the open module from the proprietary one; containers may lack it."""
_ZONEINFO = "/proc/zoneinfo"
_LONGEST_BYTES = 4096
_LONGEST_ZONEINFO_BYTES = 16 << 20


def driver_text() -> str | None:
    """Return what the loaded NVIDIA module says of itself; None where none is loaded."""
    for path in VERSION_FILES:
        text = _read(path, _LONGEST_BYTES)
        if text:
            return text.partition("\n")[0]
    return None


def issues_of(region: Region) -> tuple[KnownIssue, ...]:
    """Return the known issues that registering a region meets here, in calls as it advises.

    Worst first. None where nothing is registered: no NVIDIA driver can be seen from here, or its
    GPUs use the host's page tables (ATS).
    """
    if region.attach.skip_register or driver_text() is None:
        return ()
    return local_issues(region.size_bytes, region.attach.register_chunk_bytes, region)


def local_issues(
    size_bytes: int, chunk_bytes: int | None = None, region: Region | None = None
) -> tuple[KnownIssue, ...]:
    """Return the known issues that registering meets on this kernel and driver, worst first.

    `chunk_bytes` is the largest single call; None is one call over everything. With `region` the
    zones of its NUMA nodes count too, which takes longest: the kernel prints lines for each CPU.
    Never fails.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    machine = os.uname()
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return known_issues_of(
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
        kernel_release=machine.release,
        driver_version=driver_text(),
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


_logged: set[str] = set()


def warn_once(
    size_bytes: int, chunk_bytes: int | None = None, region: Region | None = None
) -> tuple[KnownIssue, ...]:
    """Log a warning of each issue that stalls or fails, once in a process; return those logged."""
    logged = tuple(
        issue
        for issue in local_issues(size_bytes, chunk_bytes, region)
        if issue.severity != "info" and issue.name not in _logged
    )
    if logged:
        import logging

        for issue in logged:
            _logged.add(issue.name)
            logging.getLogger("hostprep.register").warning("%s; %s", issue.what, issue.remedy)
    return logged
