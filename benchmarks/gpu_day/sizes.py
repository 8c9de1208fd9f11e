"""How much memory the parts use, from what there is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hostprep.backing import GIB, MIB
from hostprep.units import format_bytes

_LEAST_BYTES = 64 * MIB
_MOST_BYTES = 8 * GIB
_MOST_STALL_BYTES = 4 * GIB
_MOST_LARGE_BYTES = 32 * GIB
_SHARE = 8
"""A case holds the region twice at most (cold memory beside resident); the rest is for huge pages
that are reserved beside the page cache, and for others."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of memory by what they are for; whole GiB from one on, for pages of 1 GiB."""

    region_bytes: int
    """Of most cases."""
    large_bytes: int
    """Of the case that shows whether rates hold; the region's size where there is too little."""
    stall_bytes: int
    """Registered again and again while stalls are counted."""
    copy_bytes: int
    """Of one copy: also as much of the GPU's memory."""


def sizes_from(available_bytes: int, gpu_bytes: int, asked_bytes: int | None = None) -> Sizes:
    """Return sizes that fit; `asked_bytes` is the region's. Raises ValueError for too little."""
    region = _whole(asked_bytes or min(_MOST_BYTES, available_bytes // _SHARE))
    if region < _LEAST_BYTES:
        raise ValueError(f"{format_bytes(region)} is too little to measure with: at least 64Mi")
    large = _whole(min(_MOST_LARGE_BYTES, available_bytes * 3 // _SHARE))
    return Sizes(
        region_bytes=region,
        large_bytes=large if asked_bytes is None and large >= 2 * region else region,
        stall_bytes=min(_MOST_STALL_BYTES, region),
        copy_bytes=max(2 * MIB, _whole(min(GIB, region, gpu_bytes // _SHARE))),
    )


def available_bytes(meminfo: str, limit: str = "", used: str = "", stat: str = "") -> int:
    """Return the memory that can be had: MemAvailable, or what a cgroup's limit leaves.

    From the texts of /proc/meminfo, memory.max, memory.current and memory.stat (inactive_file).
    """
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    available = int(found[1]) * 1024 if found else 0
    if not limit.strip().isdigit():
        return available
    taken = int(used.strip() or 0)
    cache = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
    return max(0, min(available, int(limit) - taken + (int(cache[1]) if cache else 0)))


def available_here() -> int:
    """Return the memory that this process can have."""
    group = Path("/sys/fs/cgroup")
    texts = [text_of(group / name) for name in ("memory.max", "memory.current", "memory.stat")]
    return available_bytes(text_of(Path("/proc/meminfo")), *texts)


def text_of(path: Path) -> str:
    """Return a file's text; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _whole(size_bytes: int) -> int:
    page = GIB if size_bytes >= GIB else 2 * MIB
    return size_bytes // page * page
