"""What registering host memory with CUDA takes beside the memory itself, and where it goes wrong.

Pure arithmetic over what the caller has observed. The sizes are read in the source of NVIDIA's
open kernel modules (535 to 595) and are not yet confirmed by a measurement;
`python -m benchmarks.register` measures them.
"""

from __future__ import annotations

import re

from hostprep.backing import GIB, KIB, MIB
from hostprep.errors import BadInputError
from hostprep.units import format_bytes
from hostprep.values import value

__all__ = [
    "Cost",
    "Fault",
    "known_faults",
    "parse_driver_version",
    "registration_cost",
]

_GPU_PAGE_BYTES = 4 * KIB
"""Registered memory is in entries of 4 KiB on the GPU and in the driver's tables, also where the
host's pages are huge (uvm_map_external.c; nv.c and mem_desc.c)."""
_GPU_ENTRY_BYTES = 8
"""Hopper's page table entry; the tables lie in the GPU's own memory (uvm_page_table_location)."""
_PINNED_ENTRY_BYTES = 8
"""os_lock_user_pages keeps an array of `struct page *` as long as the pin lasts (os-mlock.c)."""
_DRIVER_ENTRY_BYTES = 16
"""nvos_create_alloc's table, r580 and later."""
_OLD_DRIVER_ENTRY_BYTES = 8 + 32
"""Up to r575: a table of pointers, and a slab object for each page. Its size depends on the
build; 32 is the least it can be with what it holds."""
_ADDRESS_ENTRY_BYTES = 8
"""The memory descriptor's list of bus addresses (mem_desc.c)."""
_CPU_ENTRY_BYTES = 8
"""An entry of the process's own page tables, for base pages."""

_ONE_TABLE_ALLOCATION = (580,)
"""The release from which the driver's table is one allocation."""
_SHARED_LOCK = (565,)
"""The release from which registering takes the driver's global lock shared (RS_FLAGS)."""
_LARGEST_CALL_BYTES = 512 * GIB
"""kvzalloc refuses more than INT_MAX: 512 GiB / 4 KiB * 16 bytes (vllm #51080, maru #64)."""
_STALLING_CALL_BYTES = 512 * MIB
"""From here the table is 2 MiB and more: vmalloc asks for huge pages and may compact memory with
the lock held, Linux 5.18 and later (open-gpu-kernel-modules #1383)."""
_LONG_TERM_PIN_BUG = ((6, 11), (6, 14))
"""From, and below; fixed by aa6f8b2593b5 and 94efde1d1539 in mm/gup.c."""
_LONG_TERM_PIN_LIMIT_BYTES = 2 * GIB
_LARGE_ARM_PAGES = ((595,), 4 * GIB)
"""595 and 610 fault below each 4 GiB of mappings from there on (open-gpu-kernel-modules #1269)."""

_RELEASE = re.compile(r"(?<![\d.])(\d{3})\.(\d{1,3})(?:\.(\d{1,3}))?(?![\d.])", re.ASCII)
_KERNEL = re.compile(r"(\d{1,4})\.(\d{1,4})", re.ASCII)


@value
class Cost:
    """What registering takes beside the registered memory. All sizes in bytes."""

    size_bytes: int
    """What each process registers."""
    vram_bytes_per_gpu: int
    """GPU page tables: of each GPU, for each process that registers with it."""
    vram_bytes: int
    """The same, over all GPUs and processes."""
    kernel_bytes: int
    """Memory of the host's kernel, over all GPUs and processes. Charged to nobody's limit."""
    page_table_bytes: int
    """CPU page tables over all processes; counts in each one's own memory limit. 0 for huge
    pages."""
    notes: tuple[str, ...]
    """What to know about these figures, in words."""


@value
class Fault:
    """A known fault of a kernel, a zone or a driver that meets this registration.

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


def registration_cost(
    size_bytes: int,
    *,
    page_bytes: int,
    gpus: int = 1,
    processes: int = 1,
    driver_version: str | None = None,
    base_page_bytes: int = 4 * KIB,
) -> Cost:
    """Return what `processes` processes pay that register `size_bytes` each with `gpus` GPUs each.

    A registration is made once in a process and mapped by every GPU that it has a context on
    (mapped and portable under unified addressing). Raises BadInputError for sizes that are not
    positive, or not whole pages.
    """
    _check(size_bytes, page_bytes, base_page_bytes, gpus, processes)
    version = parse_driver_version(driver_version)
    gpu_pages = -(-size_bytes // _GPU_PAGE_BYTES)
    base_pages = -(-size_bytes // base_page_bytes)
    old = version is not None and version < _ONE_TABLE_ALLOCATION
    entry_bytes = _OLD_DRIVER_ENTRY_BYTES if old else _DRIVER_ENTRY_BYTES
    kernel_bytes = base_pages * (_PINNED_ENTRY_BYTES + entry_bytes)
    kernel_bytes += gpu_pages * _ADDRESS_ENTRY_BYTES
    vram_bytes = gpu_pages * _GPU_ENTRY_BYTES
    is_base = page_bytes <= base_page_bytes
    return Cost(
        size_bytes=size_bytes,
        vram_bytes_per_gpu=vram_bytes,
        vram_bytes=vram_bytes * gpus * processes,
        kernel_bytes=kernel_bytes * gpus * processes,
        page_table_bytes=base_pages * _CPU_ENTRY_BYTES * processes if is_base else 0,
        notes=_notes(is_base=is_base, old=old, version=version, processes=processes),
    )


def known_faults(
    *,
    size_bytes: int,
    chunk_bytes: int | None = None,
    kernel_release: str | None = None,
    driver_version: str | None = None,
    arch: str = "x86_64",
    base_page_bytes: int = 4 * KIB,
    movable_bytes: int = 0,
    cma_bytes: int = 0,
    memlock_limit_bytes: int | None = None,
) -> tuple[Fault, ...]:
    """Return the known faults that registering `size_bytes` meets here, worst first.

    `chunk_bytes` is the largest single call; None is one call over everything. `movable_bytes`
    and `cma_bytes` are what of the machine's memory lies in ZONE_MOVABLE and CMA areas;
    `memlock_limit_bytes` is RLIMIT_MEMLOCK, None unlimited. What is not known (None) is not held
    against anybody.
    """
    call_bytes = min(size_bytes, chunk_bytes or size_bytes)
    version = parse_driver_version(driver_version)
    faults = [
        *_kernel_faults(kernel_release, size_bytes, call_bytes),
        *_driver_faults(version, size_bytes, call_bytes),
        *_arm_faults(version, arch, base_page_bytes, size_bytes),
        *_zone_faults(movable_bytes, cma_bytes),
        *_limit_faults(memlock_limit_bytes, size_bytes),
    ]
    order = ("error", "warning", "info")
    return tuple(sorted(faults, key=lambda fault: order.index(fault.severity)))


def _check(
    size_bytes: int, page_bytes: int, base_page_bytes: int, gpus: int, processes: int
) -> None:
    if size_bytes <= 0 or gpus <= 0 or processes <= 0:
        raise BadInputError(
            f"cannot reckon {size_bytes} bytes, {gpus} GPUs, {processes} processes",
            remedy="give a size, a number of GPUs and of processes above zero",
        )
    for page in (page_bytes, base_page_bytes):
        if page <= 0 or page & (page - 1):
            raise BadInputError(
                f"{page} bytes are no page size", remedy="give 4096, 65536, 2097152 or 1073741824"
            )
    if size_bytes % page_bytes:
        raise BadInputError(
            f"{size_bytes} bytes are not whole pages of {format_bytes(page_bytes)}",
            remedy="registrations begin and end on page boundaries",
        )


def _notes(
    *, is_base: bool, old: bool, version: tuple[int, ...] | None, processes: int
) -> tuple[str, ...]:
    notes = [
        "read in the driver's source, not measured; with IOMMU translation its tables add to it"
    ]
    if version is None:
        notes.append("the driver's release is unknown: reckoned as for 580 and later")
    if old:
        notes.append(
            "drivers before 580 keep an object for each page: the kernel's part is a least"
        )
    if not is_base:
        notes.append("huge pages save the process's page tables, not the driver's or the GPU's")
    if processes > 1:
        notes.append("each process pays in full for what it registers: register slices, not all")
    return tuple(notes)


def _kernel_faults(release: str | None, size_bytes: int, call_bytes: int) -> list[Fault]:
    match = _KERNEL.match(release or "")
    version = (int(match[1]), int(match[2])) if match else None
    first, after = _LONG_TERM_PIN_BUG
    if version is None or not first <= version < after or size_bytes < _LONG_TERM_PIN_LIMIT_BYTES:
        return []
    small = call_bytes < _LONG_TERM_PIN_LIMIT_BYTES
    what = f"Linux {release}: 6.11 to 6.13 may refuse to pin 2 GiB or more in one call"
    remedy = (
        f"nothing to do: calls are of at most {format_bytes(call_bytes)}"
        if small
        else "register less than 2 GiB at a time, or use Linux 6.14 (commit aa6f8b2593b5)"
    )
    return [Fault("info" if small else "error", "LongTermPinLimit", what, remedy)]


def _driver_faults(
    version: tuple[int, ...] | None, size_bytes: int, call_bytes: int
) -> list[Fault]:
    faults = []
    # Unknown counts as new: the releases that are installed today have the limit.
    if (version is None or version >= _ONE_TABLE_ALLOCATION) and size_bytes >= _LARGEST_CALL_BYTES:
        fails = call_bytes >= _LARGEST_CALL_BYTES
        faults.append(
            Fault(
                "error" if fails else "info",
                "SingleCallLimit",
                "NVIDIA drivers from 580 on fail calls of 512 GiB and more (out of memory)",
                "register in chunks"
                if fails
                else f"nothing to do: calls are of at most {format_bytes(call_bytes)}",
            )
        )
    if call_bytes >= _STALLING_CALL_BYTES:
        what = (
            f"calls of {format_bytes(call_bytes)}: from 512 MiB on the driver's own table may "
            "compact memory under its lock, and other CUDA processes and nvidia-smi wait"
        )
        faults.append(
            Fault("warning", "LargeCall", what, "register at most 480 MiB at a time (our default)")
        )
    if version is not None and version < _SHARED_LOCK:
        what = (
            f"NVIDIA driver {'.'.join(map(str, version))} registers with its global lock held "
            "exclusively: every other CUDA process waits for the length of each call"
        )
        faults.append(Fault("warning", "ExclusiveLock", what, "use driver 565 or newer"))
    return faults


def _arm_faults(
    version: tuple[int, ...] | None, arch: str, base_page_bytes: int, size_bytes: int
) -> list[Fault]:
    first, least_bytes = _LARGE_ARM_PAGES
    affected = version is None or version >= first
    if arch != "aarch64" or base_page_bytes != 64 * KIB or not affected or size_bytes < least_bytes:
        return []
    what = (
        "base pages of 64 KiB on arm64: NVIDIA drivers 595 and 610 were seen to fault just below "
        "each 4 GiB in mappings of 4 GiB and more"
    )
    remedy = "boot the kernel with 4 KiB pages (linux-nvidia, not -64k), or use driver 580"
    return [Fault("warning", "LargeArmPages", what, remedy)]


def _zone_faults(movable_bytes: int, cma_bytes: int) -> list[Fault]:
    faults = []
    if movable_bytes:
        what = (
            f"{format_bytes(movable_bytes)} of this machine are ZONE_MOVABLE: pages from there "
            "are migrated while they are registered"
        )
        remedy = "boot without movablecore= and kernelcore=; online memory as online_kernel"
        faults.append(Fault("warning", "MovableZone", what, remedy))
    if cma_bytes:
        what = f"{format_bytes(cma_bytes)} are CMA's: pages from there are migrated, too"
        remedy = "boot with a smaller cma=, and without hugetlb_cma="
        faults.append(Fault("info", "ContiguousAreas", what, remedy))
    return faults


def _limit_faults(memlock_limit_bytes: int | None, size_bytes: int) -> list[Fault]:
    if memlock_limit_bytes is None or memlock_limit_bytes >= size_bytes:
        return []
    what = (
        f"RLIMIT_MEMLOCK is {format_bytes(memlock_limit_bytes)}: NVIDIA's module pins without "
        "counting against it (os-mlock.c); mlock and registering the same memory with RDMA do"
    )
    remedy = "ulimit -l unlimited, if the engine uses RDMA (LimitMEMLOCK=infinity in its unit)"
    return [Fault("info", "LockedMemoryLimit", what, remedy)]
