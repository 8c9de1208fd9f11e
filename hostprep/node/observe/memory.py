"""The whole machine's memory, from /proc/meminfo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostprep.linux.procfs import parse_meminfo
from hostprep.node.facts import MemoryFacts

if TYPE_CHECKING:
    from hostprep.node.observe.host import HostRoot, Warn

__all__ = ["observe_memory", "reclaimable_bytes"]


def observe_memory(host: HostRoot, page_bytes: int, warn: Warn) -> MemoryFacts:
    """Return the machine's memory; zeros, hence nothing to be had, where it does not say."""
    info = parse_meminfo(host.read_text("/proc/meminfo") or "")
    missing = [key for key in ("MemTotal", "MemFree", "MemAvailable") if key not in info]
    if missing:
        warn(f"/proc/meminfo does not tell {', '.join(missing)}")
    free = info.get("MemFree", 0)
    return MemoryFacts(
        total_bytes=info.get("MemTotal", 0),
        available_bytes=info.get("MemAvailable", free),
        free_bytes=free,
        swap_total_bytes=info.get("SwapTotal", 0),
        swap_free_bytes=info.get("SwapFree", 0),
        shmem_bytes=info.get("Shmem", 0),
        page_bytes=page_bytes,
        corrupted_bytes=info.get("HardwareCorrupted", 0),
    )


def reclaimable_bytes(info: dict[str, int]) -> int:
    """Return what the kernel could drop: the file cache, and half of the reclaimable slab.

    An estimate, as si_mem_available() in mm/show_mem.c makes one. Shmem is on the anonymous
    lists, so it is not counted.
    """
    file_cache = info.get("Active(file)", 0) + info.get("Inactive(file)", 0)
    return file_cache + info.get("SReclaimable", 0) // 2
