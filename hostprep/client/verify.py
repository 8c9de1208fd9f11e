"""Holding a handoff's claims against the kernel: nothing in it is believed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from hostprep.client.handoff import Handoff, Region
from hostprep.errors import BadInputError, HostprepError, NotReadyError
from hostprep.linux.files import closing_fd, from_os_error, open_beneath, open_folder
from hostprep.paths import PoolPaths

__all__ = ["bad_pages", "check_region", "open_region", "verify_handoff", "walk_region"]

_WALK_BYTES = 64 << 20
_WINDOW_BYTES = 1 << 30
"""Mapped at once: page tables of 4 KiB pages count against the limit of the walker's cgroup, and
go with the mapping only."""


def open_region(paths: PoolPaths, region: Region, *, writable: bool) -> int:
    """Open a region's file by its checked path. Raises NotReadyError, BadInputError."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK
    with closing_fd(open_folder(paths.folder)) as folder:
        try:
            return open_beneath(folder, region.path, flags)
        except FileNotFoundError as error:
            raise _off(region, f"has no file at {region.path}", "RegionMissing") from error
        except PermissionError as error:
            raise _no_right(paths.region_of(region.path), region.path, folder) from error
        except OSError as error:
            raise from_os_error(error, f"open {paths.region_of(region.path)}") from error


def _no_right(path: str, relative: str, folder: int) -> BadInputError:
    """Say which group the user lacks, by the file, or by the folder where it is out of sight."""
    try:
        gid = os.stat(relative, dir_fd=folder, follow_symlinks=False).st_gid
    except OSError:
        gid = os.fstat(folder).st_gid
    return BadInputError(
        f"cannot open {path}: no permission",
        reason="NoPermission",
        remedy=f"run it as root, or as the pool's group {gid} (in Kubernetes supplementalGroups)",
    )


def check_region(region: Region, fd: int) -> None:
    """Check an open region file against the handoff: identity, size, every block resident.

    st_blocks counts resident pages on hugetlbfs and tmpfs; swapped-out ones too, which is why
    `Base` and `THP` are never published without noswap or on a node with swap.
    Raises NotReadyError with what is off.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise _off(region, "is not a regular file", "RegionSwapped")
    if (status.st_dev, status.st_ino) != (region.st_dev, region.st_ino):
        raise _off(region, "is another file than the one published", "RegionSwapped")
    if status.st_size != region.size_bytes:
        raise _off(region, f"has {status.st_size} bytes, not {region.size_bytes}", "RegionResized")
    resident = status.st_blocks * 512
    if resident < region.size_bytes:
        missing = region.size_bytes - resident
        raise _off(region, f"lacks {missing} bytes of its memory", "RegionNotResident")


def verify_handoff(
    paths: PoolPaths, handoff: Handoff, *, pages: bool = False
) -> Iterator[tuple[Region, HostprepError | None]]:
    """Yield every region with what is wrong with it, or None; one bad region stops no other.

    With `pages` every page is touched, so that one which the hardware reported bad is named.
    """
    for region in handoff.regions:
        try:
            with closing_fd(open_region(paths, region, writable=False)) as fd:
                check_region(region, fd)
                if pages:
                    walk_region(region, fd)
        except HostprepError as error:
            yield region, error
        else:
            yield region, None


def walk_region(region: Region, fd: int) -> None:
    """Touch all pages of an open region. Raises NotReadyError naming the first bad ones."""
    from hostprep.linux.memory import address_of, map_shared

    bad: list[int] = []
    for start in range(0, region.size_bytes, _WINDOW_BYTES):
        size = min(_WINDOW_BYTES, region.size_bytes - start)
        with map_shared(fd, size, writable=False, offset_bytes=start) as mapping:
            found = bad_pages(address_of(mapping), size, region.page_bytes)
            bad.extend(start + offset for offset in found)
    if bad:
        shown = ", ".join(f"{offset:#x}" for offset in bad[:8])
        raise _off(
            region,
            f"has {len(bad)} bad page(s) of {region.page_bytes} bytes, at offset {shown}",
            "PoisonedPage",
        )


def bad_pages(address: int, size_bytes: int, page_bytes: int) -> Iterator[int]:
    """Yield the offsets of pages in a mapping that cannot be read, by halving what fails.

    MADV_POPULATE_READ reports them as EHWPOISON where a plain read would end the process
    with SIGBUS. Raises NotReadyError or FailedError when populating fails for all pages alike.
    """
    from hostprep.linux.memory import EHWPOISON, explain, populate

    ranges = [
        (offset, min(_WALK_BYTES, size_bytes - offset))
        for offset in range(0, size_bytes, max(_WALK_BYTES, page_bytes))
    ]
    if page_bytes > _WALK_BYTES:
        ranges = [(offset, page_bytes) for offset in range(0, size_bytes, page_bytes)]
    while ranges:
        offset, length = ranges.pop(0)
        try:
            populate(address + offset, length, write=False)
        except OSError as error:
            if error.errno != EHWPOISON:
                raise explain(error.errno, f"reading pages at {offset:#x}") from error
            if length <= page_bytes:
                yield offset
                continue
            half = length // 2 // page_bytes * page_bytes or page_bytes
            ranges[:0] = [(offset, half), (offset + half, length - half)]


def _off(region: Region, what: str, reason: str) -> NotReadyError:
    return NotReadyError(
        f"region {region.name} {what}",
        reason=reason,
        remedy="run `hostprep prepare` again: it rebuilds this region alone",
    )
