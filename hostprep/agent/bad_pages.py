"""Memory that goes bad under a region: found by the kernel's count, told by a walk.

A page that the hardware reported stays where it is in the file (hugetlbfs as of Linux 6.1, tmpfs
as of 5.16) and looks resident: neither size nor blocks tell. Reading everything every few seconds
is out of the question. But the kernel counts (`HardwareCorrupted` in /proc/meminfo), and touching
pages that are resident costs their page table entries only.
"""

from __future__ import annotations

import threading

from hostprep.client.handoff import Region
from hostprep.client.handoff_reader import read_handoff
from hostprep.client.sidecar import mark_bad
from hostprep.client.verify import check_region, open_region, walk_region
from hostprep.errors import HostprepError
from hostprep.linux.files import closing_fd
from hostprep.linux.threads import Stopped
from hostprep.node.observe.pools import pool_names
from hostprep.paths import PoolPaths

__all__ = ["mark_bad_regions"]


def mark_bad_regions(root: str, *, stop: threading.Event) -> tuple[tuple[str, str], ...]:
    """Touch every page of every published region, leased ones too; mark those with bad pages.

    Holders notice nothing: it maps for reading, and only what is resident. Returns (pool, why)
    of what could not be read or marked: a bad page may be there still, so walk again. One that
    fails stops no other. Raises Stopped between two regions.
    """
    failures: list[tuple[str, str]] = []
    for name in pool_names(root):
        paths = PoolPaths(root, name)
        try:
            regions = read_handoff(paths).regions
        except HostprepError as error:
            if error.reason != "NotPrepared":  # nothing is published: nobody can claim it
                failures.append((name, error.message))
            continue
        for region in regions:
            if stop.is_set():
                raise Stopped
            try:
                _mark_if_bad(paths, region)
            except HostprepError as error:
                failures.append((name, error.message))
    return tuple(failures)


def _mark_if_bad(paths: PoolPaths, region: Region) -> None:
    why = _why_bad(paths, region)
    if why:
        mark_bad(paths, region.name, why, size_bytes=region.size_bytes)


def _why_bad(paths: PoolPaths, region: Region) -> str:
    try:
        with closing_fd(open_region(paths, region, writable=False)) as fd:
            check_region(region, fd)
            walk_region(region, fd)
    except HostprepError as error:  # of any other kind, every round tells
        prefix = f"region {region.name} "
        return error.message.removeprefix(prefix) if error.reason == "PoisonedPage" else ""
    return ""
