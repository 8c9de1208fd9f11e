"""Registering the runs of one rank as if they were one: all of them ready, or none.

With a single run, which most models have, this is one `Registration` and nothing else. Further
runs are registered by the first one's `on_registered`, in its thread: it says READY after all of
them and the engine's own part, and what fails in there takes all back.
"""

from __future__ import annotations

import functools
import time

from hostprep.cuda.registration import Registration
from hostprep.cuda.slices import pool_of
from hostprep.cuda.turnstile import Turnstile
from hostprep.errors import FailedError, HostprepError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hostprep.client.attachment import Attachment
    from hostprep.cuda.listeners import Board
    from hostprep.engines.vllm.simple_layout import Run

__all__ = ["RunRegistrations"]


class RunRegistrations:
    """All runs of a rank; `joined` is the engine's part, called when the last is registered.

    Make it where the engine's CUDA context is current. `deadline_s` is for all of them together.
    """

    def __init__(
        self,
        attachment: Attachment,
        runs: Sequence[Run],
        *,
        joined: Callable[[], object],
        board: Board | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._attachment = attachment
        self._runs = tuple(runs)
        self._joined = joined
        self._turnstile = Turnstile(pool_of(attachment).root)
        self._deadline_s = deadline_s
        self._ends_s: float | None = None
        self._is_closing = False
        sizes = [run.size_bytes for run in self._runs]
        self._boards = [
            _PartBoard(board, before=sum(sizes[:at]), whole=sum(sizes), is_first=at == 0)
            for at in range(len(sizes))
            if board is not None
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
        """Take all back, the last run first; whatever is still at work is cancelled."""
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
            on_registered=functools.partial(self._go_on, at + 1),
            board=self._boards[at] if self._boards else None,
        )

    def _go_on(self, at: int) -> None:
        if at == len(self._runs):
            self._joined()
            return
        part = self._part(at)
        self._parts.append(part)
        if self._is_closing:
            raise FailedError("the engine is ending", reason="Cancelled")
        part.run()


class _PartBoard:
    """A rank's place on the board, as one of several registrations of that rank sees it."""

    def __init__(self, board: Board, *, before: int, whole: int, is_first: bool) -> None:
        self._board = board
        self._before_bytes = before
        self._whole_bytes = whole
        self._is_first = is_first

    def initializing(self) -> None:
        if self._is_first:
            self._board.initializing()

    def progress(self, done_bytes: int, size_bytes: int, longest_chunk_s: float = 0.0) -> None:
        del size_bytes
        self._board.progress(self._before_bytes + done_bytes, self._whole_bytes, longest_chunk_s)

    def ready(self) -> None:
        if self._is_first:  # which comes to its end last
            self._board.ready()

    def failed(self, reason: str) -> None:
        if self._is_first:
            self._board.failed(reason)
