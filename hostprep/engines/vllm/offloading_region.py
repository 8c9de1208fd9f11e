"""A rank's slice of the region: where its KV cache lies, and its registration with CUDA.

A rank has one contiguous slice, so that it registers what it copies and nothing else. In a slice
there are rows, one for each chunk of vLLM's: that rank's part of it, padded. All sizes in bytes.

vLLM's own worker registers in its constructor, before the engine serves
(vllm/v1/kv_offload/cpu/gpu_worker.py, pin_mmap_region). Here the constructor enters the rank on
the board and no more; the first poll begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from hostprep.backing import MIB
from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.registration import register
from hostprep.errors import BadInputError, HostprepError
from hostprep.units import format_exact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.attach import Attachment
    from hostprep.cuda.registration import Registration
    from hostprep.engines.vllm.settings import Settings

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


class RankRegistration:
    """One rank's registration, in its process. `poll` is called at each step, and is cheap.

    `slice_number`: which slice of the layout is the rank's. `registers`: with CUDA; without, the
    rank is ready at the first poll. `obstacle`: why the gate can never open for this rank, which
    is reported at once.
    """

    def __init__(
        self,
        memory: Attachment,
        layout: Layout,
        settings: Settings,
        *,
        rank: int,
        world: int,
        slice_number: int,
        registers: bool,
        obstacle: str = "",
    ) -> None:
        """Enter the rank on the board; register only where that is to be done at once.

        Raises BadInputError where the rank is taken (two engines on one region), HostprepError.
        """
        self._memory = memory
        self._layout = layout
        self._settings = settings
        self._slice_number = slice_number
        self._registers = registers
        self._registration: Registration | None = None
        self._has_begun = False
        self._board = RankBoard.open(
            board_path(memory), generation=memory.lease_id, world=world, rank=rank
        )
        try:
            if obstacle:
                self._has_begun = True
                self._board.failed(obstacle)
            elif settings.mode == "sync":
                self.poll()
        except BaseException:
            self._board.close()
            raise

    def poll(self) -> None:
        """Begin, at the first call."""
        if self._has_begun:
            return
        self._has_begun = True
        if not self._registers:
            self._board.initializing()
            self._board.ready()
            return
        try:
            self._registration = register(
                self._memory,
                mode=self._settings.mode,
                offset_bytes=self._layout.offset_of(self._slice_number),
                size_bytes=self._layout.slice_bytes,
                row_bytes=self._layout.row_bytes,
                deadline_s=self._settings.deadline_s,
                board=self._board,
            )
        except HostprepError as error:
            self._board.failed(str(error))
            if self._settings.mode == "sync":
                raise

    def close(self) -> None:
        """Take the registration back and leave the board, once copies are done.

        Raises FailedError where the driver did not take all of it back.
        """
        try:
            if self._registration is not None:
                self._registration.close()
        finally:
            self._board.close()
