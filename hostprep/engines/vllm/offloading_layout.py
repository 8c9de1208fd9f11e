"""Where vLLM's chunks lie in a region: a slice for each rank, and a row in it for each chunk.

A rank has one contiguous slice, so that it registers what it copies and nothing else. In a slice
there are rows, one for each chunk of vLLM's: that rank's part of it, padded. All sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from hostprep.backing import KIB, MIB
from hostprep.cuda.board_layout import Holes
from hostprep.errors import BadInputError
from hostprep.units import format_exact

LAYOUT_VERSION = 1
"""Of where a chunk's bytes lie in its row, and rows in slices: what is kept rests on it."""
_SMALLEST_ALIGNMENT = 512
_BASE_PAGE_BYTES = 64 * KIB
"""The largest that a kernel has: so a layout is the same on each."""
_STEP_BYTES = 256 * MIB


@dataclass(frozen=True)
class Layout:
    """What all ranks and the scheduler agree on."""

    rows: int
    row_bytes: int
    slice_bytes: int

    def offset_of(self, number: int) -> int:
        """Return where a slice begins in the region."""
        return number * self.slice_bytes

    def rows_in(self, holes: Holes) -> tuple[range, ...]:
        """Return the rows that holes of a slice touch, in ascending order, apart from each other.

        `holes`: begin and end of each in bytes from the slice's start, ascending.
        """
        found: list[range] = []
        for begin, end in holes:
            first = max(begin // self.row_bytes, found[-1].stop if found else 0)
            rows = range(first, min(-(-end // self.row_bytes), self.rows))
            found += [rows] if rows else []
        return tuple(found)


def layout_of(
    usable_bytes: int, *, page_bytes: int, chunk_bytes: int, slices: int, region: str = "the region"
) -> Layout:
    """Divide the first `usable_bytes` of a region into slices of whole pages, and those into rows.

    Raises BadInputError where not a single chunk fits, with both numbers.
    """
    row_bytes = row_bytes_of(chunk_bytes)
    slice_bytes = usable_bytes // slices // page_bytes * page_bytes
    rows = slice_bytes // row_bytes
    if rows < 1:
        raise BadInputError(
            f"one chunk takes {row_bytes} bytes for each of {slices} rank(s), and {region} has "
            f"{format_exact(usable_bytes)}",
            reason="RegionTooSmall",
            remedy="claim a larger region, or make chunks smaller (blocks_per_chunk)",
        )
    return Layout(rows, row_bytes, slice_bytes)


def row_bytes_of(chunk_bytes: int) -> int:
    """Return the size of a row that holds `chunk_bytes`, and some bytes more.

    Those are never copied: a release of vLLM that makes one copy of blocks side by side cannot
    make one of two rows, and what is registered in two calls is no range for one copy. Registered
    pieces end where a base page and a row end together, every 256 MiB at least: rows are padded to
    a multiple of a power of two, by 512 bytes or, where that is more, a 512th of a row.
    """
    alignment = _SMALLEST_ALIGNMENT
    while alignment < _BASE_PAGE_BYTES:
        row = _round_up(chunk_bytes + 1, alignment)
        if row // gcd(row, _BASE_PAGE_BYTES) * _BASE_PAGE_BYTES <= _STEP_BYTES:
            return row
        alignment *= 2
    return _round_up(chunk_bytes + 1, alignment)


def _round_up(size_bytes: int, to: int) -> int:
    return -(-size_bytes // to) * to
