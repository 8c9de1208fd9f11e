"""A rank's share of a region, and where an engine's host buffers lie in it: pure arithmetic.

An engine allocates a few large buffers as it starts, each host pool one or more, and frees them
together or not at all: so they follow one another, and space that is freed can be allocated again
once all that was allocated after it is free as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.errors import BadInputError
from hostprep.units import format_bytes, format_exact


@dataclass(frozen=True)
class Share:
    """The part of a region that is one rank's, in bytes from the region's start; whole pages."""

    offset_bytes: int
    size_bytes: int
    page_bytes: int
    ranks: int
    """How many ranks of this node share the region."""


def share_of(region_size_bytes: int, page_bytes: int, *, ranks: int, index: int) -> Share:
    """Return the part of a region for one of the node's ranks, counted from 0.

    Raises BadInputError for an index that is not among them.
    """
    if not 0 <= index < ranks:
        raise BadInputError(f"rank {index} of {ranks} ranks on this node cannot be")
    size_bytes = region_size_bytes // ranks // page_bytes * page_bytes
    return Share(index * size_bytes, size_bytes, page_bytes, ranks)


@dataclass(frozen=True)
class Requester:
    """The engine that allocates, for error messages."""

    engine: str
    lower: str
    """Its options by which it asks for less."""


@dataclass(frozen=True)
class Allocation:
    """The place of one buffer, in bytes from the region's start; whole pages."""

    offset_bytes: int
    size_bytes: int


class Allocator:
    """Hands out a share of a region from its start to its end. Not for several threads at once.

    Every allocation begins and ends on a page, since it is registered as a slice of its own.
    """

    def __init__(self, share: Share, *, requester: Requester) -> None:
        self._share = share
        self._requester = requester
        self._top_bytes = share.offset_bytes
        self._allocations: list[Allocation] = []
        self._freed: set[int] = set()

    @property
    def free_bytes(self) -> int:
        """What can still be allocated, in one piece."""
        return self._share.offset_bytes + self._share.size_bytes - self._top_bytes

    def allocate(self, size_bytes: int) -> Allocation:
        """Return an allocation of at least this size.

        Raises BadInputError where it does not fit: the size and what is left are named.
        """
        if size_bytes <= 0:
            raise BadInputError(f"a buffer of {size_bytes} bytes cannot be", reason="BadSize")
        page_bytes = self._share.page_bytes
        whole_bytes = -(-size_bytes // page_bytes) * page_bytes
        if whole_bytes > self.free_bytes:
            raise self.too_small(size_bytes)
        allocation = Allocation(self._top_bytes, whole_bytes)
        self._allocations.append(allocation)
        self._top_bytes += whole_bytes
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Free an allocation; one that is free already is no harm."""
        if allocation in self._allocations:
            self._freed.add(allocation.offset_bytes)
        while self._allocations and self._allocations[-1].offset_bytes in self._freed:
            last = self._allocations.pop()
            self._freed.remove(last.offset_bytes)
            self._top_bytes = last.offset_bytes

    def too_small(self, size_bytes: int) -> BadInputError:
        """Return the error for that many bytes."""
        share = self._share
        return BadInputError(
            f"{self._requester.engine} asks for {format_exact(size_bytes)} of host memory, and "
            f"this rank's part of the region has {format_exact(self.free_bytes)} left of "
            f"{format_exact(share.size_bytes)} (pages of {format_bytes(share.page_bytes)})",
            reason="RegionTooSmall",
            remedy=f"lower {self._requester.lower}, or claim a larger region "
            "(`hostprep exec --size`)",
        )
