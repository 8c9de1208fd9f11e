"""Where the host tensors of SimpleCPUOffloadConnector lie in a region, and their registration.

The engine allocates one host tensor for each of its KV tensors: as many rows as the tier has
blocks, one row a block. Copies are whole rows, and a copy across two registrations fails. Tensors
with rows of the same size therefore follow one another without a gap, so that the run of them is
one slice with one row size; a run begins on a page. Most models have a single run.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

from hostprep.cuda.chunks import pool_of
from hostprep.cuda.registration import Registration
from hostprep.cuda.turnstile import Turnstile
from hostprep.engines.rank_progress import RankProgress
from hostprep.errors import BadInputError, FailedError, HostprepError
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hostprep.client.attach import Attachment
    from hostprep.cuda.registration_state import Board
    from hostprep.engines.allocator import Share


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
        at = begin + -(-(at - begin) // share.page_bytes) * share.page_bytes
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


class RunRegistrations:
    """Registers the runs of a rank as if they were one: all of them are ready, or none.

    With a single run this is one `Registration` and nothing else. Further runs are registered by
    the first one's `on_registered`, in its thread: it reports READY after all of them and after
    `on_registered`, which is the engine's part; a failure in there takes all back.

    Make it where the engine's CUDA context is current. `deadline_s` is for all of them together.
    """

    def __init__(
        self,
        attachment: Attachment,
        runs: Sequence[Run],
        *,
        on_registered: Callable[[], object],
        board: Board | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._attachment = attachment
        self._runs = tuple(runs)
        self._on_registered = on_registered
        self._turnstile = Turnstile(pool_of(attachment).root)
        self._deadline_s = deadline_s
        self._ends_s: float | None = None
        self._is_closing = False
        progress = RankProgress(board) if board is not None else None
        self._boards = [
            # The first run's registration ends last.
            progress.part(run.offset_bytes, size_bytes=run.size_bytes, sets_state=at == 0)
            for at, run in enumerate(self._runs)
            if progress is not None
        ]
        self._parts = [self._part(0)]

    @property
    def state(self) -> str:
        """The state of it all, in a Registration's words."""
        return self._parts[0].state

    @property
    def error(self) -> HostprepError | None:
        """Why it failed."""
        return self._parts[0].error

    def start(self) -> None:
        """Begin in the background. Raises as Registration does."""
        self._begin()
        self._parts[0].start()

    def run(self) -> None:
        """Do all of it before returning. Raises what went wrong."""
        self._begin()
        self._parts[0].run()

    def close(self) -> None:
        """Take all back, the last run first; what is still in progress is cancelled."""
        self._is_closing = True
        parts = list(self._parts)
        for part in parts:
            part.cancel()
        for part in reversed(parts):
            part.close()

    def _begin(self) -> None:
        if self._deadline_s is not None:
            self._ends_s = time.monotonic() + self._deadline_s

    def _part(self, at: int) -> Registration:
        run = self._runs[at]
        left_s = self._deadline_s
        if self._ends_s is not None:
            left_s = max(0.001, self._ends_s - time.monotonic())
        return Registration(
            self._attachment,
            offset_bytes=run.offset_bytes,
            size_bytes=run.size_bytes,
            row_bytes=run.row_bytes,
            turnstile=self._turnstile,
            deadline_s=left_s,
            on_registered=functools.partial(self._register_next, at + 1),
            board=self._boards[at] if self._boards else None,
        )

    def _register_next(self, at: int) -> None:
        if at == len(self._runs):
            self._on_registered()
            return
        part = self._part(at)
        self._parts.append(part)
        if self._is_closing:
            raise FailedError("the engine is ending", reason="Cancelled")
        part.run()
