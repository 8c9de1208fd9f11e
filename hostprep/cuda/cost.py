"""What registering host memory with CUDA takes beside the memory itself.

Pure arithmetic over what the caller has observed. The sizes are read in the source of NVIDIA's
open kernel modules (535 to 595) and are not yet confirmed by a measurement;
`python -m benchmarks.gpu_day OUT rates` measures them. What goes wrong: hostprep.known_issues.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.backing import KIB
from hostprep.errors import BadInputError
from hostprep.known_issues import ONE_TABLE_ALLOCATION, parse_driver_version
from hostprep.units import format_bytes

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


@dataclass(frozen=True)
class Cost:
    """What registering takes beside the registered memory. All sizes in bytes."""

    size_bytes: int
    """What each process registers."""
    vram_bytes_per_gpu: int
    """GPU page tables: of each GPU, for each process that registers with it."""
    vram_bytes: int
    """The same, over all GPUs and processes."""
    kernel_bytes: int
    """Memory of the host's kernel, over all GPUs and processes. Charged to no cgroup's limit."""
    page_table_bytes: int
    """CPU page tables over all processes; counts in each one's own memory limit. 0 for huge
    pages."""
    notes: tuple[str, ...]
    """What to know about these figures, as text."""


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
    old = version is not None and version < ONE_TABLE_ALLOCATION
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
