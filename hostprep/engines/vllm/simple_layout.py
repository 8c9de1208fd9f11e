"""Where the host tensors of SimpleCPUOffloadConnector lie in a region: pure arithmetic.

The engine allocates one host tensor for each of its KV tensors: as many rows as the tier has
blocks, one row a block. Copies are whole rows, and a copy across two registrations fails. Tensors
with rows of the same size therefore follow one another without a gap, so that the run of them is
one slice with one row size; a run begins on a page. Most models have a single run.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.errors import BadInputError
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Layout", "Run", "Share", "lay_out", "share_of"]


@dataclass(frozen=True)
class Share:
    """The part of a region that is one rank's, in bytes from the region's start; whole pages."""

    offset_bytes: int
    size_bytes: int
    page_bytes: int
    ranks: int
    """How many ranks of this node share the region."""


@dataclass(frozen=True)
class Run:
    """Tensors with rows of one size, one after the other: what is registered as one slice."""

    offset_bytes: int
    size_bytes: int
    """Up to the end of the last page."""
    row_bytes: int


@dataclass(frozen=True)
class Layout:
    """Offsets count from the region's start."""

    offsets: tuple[tuple[str, int], ...]
    """Of each tensor, in the engine's order."""
    runs: tuple[Run, ...]

    @property
    def end_bytes(self) -> int:
        """Where the last page of the last run ends."""
        return max((run.offset_bytes + run.size_bytes for run in self.runs), default=0)


def share_of(region_size_bytes: int, page_bytes: int, *, ranks: int, index: int) -> Share:
    """Return the part of a region for one of the node's ranks, counted from 0.

    Raises BadInputError for an index that is not among them.
    """
    if not 0 <= index < ranks:
        raise BadInputError(f"rank {index} of {ranks} ranks on this node cannot be")
    size_bytes = _down(region_size_bytes // ranks, page_bytes)
    return Share(index * size_bytes, size_bytes, page_bytes, ranks)


def lay_out(row_bytes: Mapping[str, int], *, rows: int, share: Share) -> Layout:
    """Place tensors of `rows` rows each, named with the bytes of a row.

    Raises BadInputError where they do not fit, with both sizes and what would fit.
    """
    sizes = sorted(set(row_bytes.values()))
    if rows <= 0 or not sizes or sizes[0] <= 0:
        raise BadInputError(f"{len(row_bytes)} tensors of {rows} rows cannot be placed")
    offsets: dict[str, int] = {}
    runs = []
    at = share.offset_bytes
    for size in sizes:
        begin = at
        for name, row in row_bytes.items():
            if row == size:
                offsets[name] = at
                at += rows * row
        at = begin + _up(at - begin, share.page_bytes)
        runs.append(Run(begin, at - begin, size))
    needed_bytes = at - share.offset_bytes
    if needed_bytes > share.size_bytes:
        raise _too_small(needed_bytes, len(runs), share)
    return Layout(tuple((name, offsets[name]) for name in row_bytes), tuple(runs))


def _too_small(needed_bytes: int, runs: int, share: Share) -> BadInputError:
    # Each run but the last may leave most of a page unused.
    fits_bytes = (share.size_bytes - (runs - 1) * share.page_bytes) * share.ranks
    less = f"set cpu_bytes_to_use to {fits_bytes} or less, or " if fits_bytes > 0 else ""
    region_bytes = needed_bytes * share.ranks
    return BadInputError(
        f"the engine wants {needed_bytes} bytes of host memory for this rank, and its part of the "
        f"region has {share.size_bytes} ({share.ranks} ranks share it, pages of "
        f"{format_bytes(share.page_bytes)})",
        reason="RegionTooSmall",
        remedy=f"{less}claim a region of at least {region_bytes} bytes",
    )


def _up(size_bytes: int, step_bytes: int) -> int:
    return -(-size_bytes // step_bytes) * step_bytes


def _down(size_bytes: int, step_bytes: int) -> int:
    return size_bytes // step_bytes * step_bytes
