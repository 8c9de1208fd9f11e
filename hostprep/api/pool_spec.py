"""What an administrator asks for, as plain values; where regions lie; mounts and reserve."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from hostprep.api.slot_layout import GROUP_ALIGN_BYTES, SlotLayout, round_up
from hostprep.backing import GIB, MIB, Backing

_NAME = re.compile(r"(?:node(?P<node>\d{1,5})|interleave)-(?P<index>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """On one NUMA node, or spread over all of them page by page (`node` is None)."""

    node: int | None

    def __str__(self) -> str:
        return "interleave" if self.node is None else f"node:{self.node}"

    def region_name(self, index: int) -> str:
        """Return the name of the index-th region with this placement, such as node0-1."""
        return f"{'interleave' if self.node is None else f'node{self.node}'}-{index}"

    @classmethod
    def of_region(cls, name: str) -> tuple[Placement, int] | None:
        """Return placement and index that a region's name tells; None if it is none of ours."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        node = match["node"]
        return cls(None if node is None else int(node)), int(match["index"])


INTERLEAVE = Placement(None)


DEFAULT_PERCENT = 4
DEFAULT_LEAST_BYTES = 512 * MIB
DEFAULT_MOST_BYTES = 16 * GIB


def reserve_of(asked_bytes: int | None, total_bytes: int) -> int:
    """Return the bytes to keep of a machine with `total_bytes`: as asked, else enough to live on.

    A pool that took all that is available would leave the first page fault to the OOM killer.
    """
    if asked_bytes is not None:
        return asked_bytes
    share = total_bytes * DEFAULT_PERCENT // 100
    return min(max(share, DEFAULT_LEAST_BYTES), DEFAULT_MOST_BYTES)


MOUNT_SOURCE = "hostprep"
"""What the mount table calls our mounts."""
MOUNT_FLAGS = ("nosuid", "nodev", "noexec")

ROOT_BYTES = 64 * MIB
ROOT_INODES = 65_536
"""Bounds of the root's own tmpfs, ample for 128 regions; more regions get a multiple of them."""


def root_options(factor: int = 1) -> str:
    """Return the bounds of the root's tmpfs as mount options, `factor` times the usual ones."""
    return f"size={factor * ROOT_BYTES},nr_inodes={factor * ROOT_INODES}"


def mount_options(
    backing: Backing,
    *,
    gid: int | None,
    size_bytes: int = 0,
    noswap: bool = False,
    large_folios: bool = False,
) -> str:
    """Return the data string of mount(2) for a pool's memory folder.

    `size_bytes` is what all files on it may hold: without it an engine that enlarges its region's
    file takes every free page of the machine. 0 leaves it out, for whoever adds it. `noswap` and
    `large_folios` concern tmpfs only: huge pages are never swapped. The folder's mode lets the
    pool's group in, and lets nobody make files of their own.
    """
    options = [f"mode={'0750' if gid is not None else '0755'}"]
    if gid is not None:
        options.append(f"gid={gid}")
    if backing.is_hugetlb:
        options.append(f"pagesize={backing.page_bytes}")
    if size_bytes:
        options.append(f"size={size_bytes}")
    if backing.is_hugetlb:
        return ",".join(options)
    if backing is Backing.THP:
        options.append("huge=always")
    elif large_folios:
        # Not a THP mount (that one says always): base pages in the largest pieces that lie free.
        options.append("huge=within_size")
    if noswap:
        options.append("noswap")
    return ",".join(options)


DEFAULT_BACKINGS = (Backing.HUGETLB_2MI, Backing.THP, Backing.BASE)


class PoolState(StrEnum):
    """Whether the node must hold the pool, or give it back."""

    PRESENT = "Present"
    ABSENT = "Absent"


class RegionLayout(StrEnum):
    """How a pool is cut into regions."""

    PER_NUMA_NODE = "PerNUMANode"
    """One for each NUMA node that has CPUs and memory, equal in size."""
    PER_GPU = "PerGPU"
    """One for each GPU, on the GPU's NUMA node, equal in size."""
    SINGLE = "Single"
    """One, interleaved over the NUMA nodes."""
    COUNT = "Count"
    """A fixed number of equal ones, dealt out over the NUMA nodes in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One pool as one node must hold it.

    Exactly one of `size_bytes`, `percent`, `region_size_bytes` and `sizing` is set.
    """

    name: str
    uid: str = ""
    """The custom resource's UID; empty for a pool made by hand."""
    state: PoolState = PoolState.PRESENT
    size_bytes: int | None = None
    percent: float | None = None
    """Of the memory of NUMA nodes that have CPUs, 0 < percent <= 100."""
    region_size_bytes: int | None = None
    """Of each region, not yet rounded up to whole pages: the regions' number makes the size."""
    sizing: SlotLayout | None = None
    """What each region holds, one beside the other: the regions' number makes the size."""
    priority: int = 0
    """Higher ones are planned first."""
    backings: tuple[Backing, ...] = DEFAULT_BACKINGS
    layout: RegionLayout = RegionLayout.PER_NUMA_NODE
    region_count: int | None = None
    """With RegionLayout.COUNT only."""
    reserve_bytes: int | None = 0
    """What the node must keep available after the pool is prepared; None leaves it to the plan."""
    gid: int | None = None
    """Group of the region files; None leaves the preparing user's."""
    mode: int = 0o660
    max_kept_s: int | None = None
    """Seconds for which a region keeps an owner's contents; None: until somebody waits."""
    force: bool = False
    """With ABSENT: release even what is leased."""

    @property
    def region_bytes(self) -> int | None:
        """Size of every region where it is given, whichever of its backings the pool gets.

        Regions of base pages are cut at 2 MiB as well, so that another backing may follow.
        """
        page_bytes = max(GROUP_ALIGN_BYTES, *(backing.page_bytes for backing in self.backings))
        if self.sizing is not None:
            return self.sizing.region_bytes(page_bytes)
        if self.region_size_bytes is not None:
            return round_up(self.region_size_bytes, page_bytes)
        return None
