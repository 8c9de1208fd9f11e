"""Where vLLM's chunks lie in a region: a slice for each rank, and a row in it for each chunk.

A rank has one contiguous slice, so that it registers what it copies and nothing else. In a slice
there are rows, one for each chunk of vLLM's: that rank's part of it, padded. All sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from hostprep.backing import MIB
from hostprep.cuda.board_layout import Holes
from hostprep.errors import BadInputError
from hostprep.units import format_exact

LAYOUT_VERSION = 1
"""Of where a chunk's bytes lie in its row, and rows in slices: what is kept rests on it."""
_SMALLEST_ALIGNMENT = 512
_STEP_BYTES = 256 * MIB
_STEP_PAGES = 8


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
    row_bytes = row_bytes_of(chunk_bytes, page_bytes)
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


def row_bytes_of(chunk_bytes: int, page_bytes: int) -> int:
    """Return the size of a row that holds `chunk_bytes`.

    Registered pieces end where a page and a row end together. Padding a row to a multiple of a
    power of two makes these places frequent: every 256 MiB at least, or every 8 pages where those
    are huge. It costs 1/128 of a row with pages up to 32 MiB, and up to 1/8 with 1 GiB pages.
    """
    most = max(_STEP_BYTES, _STEP_PAGES * page_bytes)
    alignment = _SMALLEST_ALIGNMENT
    while alignment < page_bytes:
        row = _round_up(chunk_bytes, alignment)
        if row // gcd(row, page_bytes) * page_bytes <= most:
            return row
        alignment *= 2
    return _round_up(chunk_bytes, alignment)


def _round_up(size_bytes: int, to: int) -> int:
    return -(-size_bytes // to) * to
