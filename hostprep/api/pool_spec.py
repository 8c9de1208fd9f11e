"""What an administrator asks for, as plain values: the policy half of a HostMemoryPool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hostprep.api.slot_layout import GROUP_ALIGN_BYTES, SlotLayout
from hostprep.backing import Backing

__all__ = ["DEFAULT_BACKINGS", "PoolSpec", "PoolState", "RegionLayout"]

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

    Exactly one of `size_bytes`, `percent` and `sizing` is set.
    """

    name: str
    uid: str = ""
    """The custom resource's UID; empty for a pool made by hand."""
    state: PoolState = PoolState.PRESENT
    size_bytes: int | None = None
    percent: float | None = None
    """Of the machine's MemTotal, 0 < percent <= 100."""
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
    force: bool = False
    """With ABSENT: release even what is leased."""

    @property
    def region_bytes(self) -> int | None:
        """Size of every region of a pool with a sizing, whichever of its backings it gets.

        Regions of base pages are cut at 2 MiB as well, so that another backing may follow.
        """
        if self.sizing is None:
            return None
        pages = (backing.page_bytes for backing in self.backings)
        return self.sizing.region_bytes(max(GROUP_ALIGN_BYTES, *pages))
