"""Whom a registration tells how far it is: the rank board, and the engine's own display."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hostprep.cuda.progress import Progress, Tally

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Board(Protocol):
        """What a registration tells the other ranks (hostprep.register.board)."""

        def initializing(self) -> None: ...
        def progress(
            self, done_bytes: int, size_bytes: int, longest_chunk_s: float = 0.0
        ) -> None: ...
        def ready(self) -> None: ...
        def failed(self, reason: str) -> None: ...


__all__ = ["Teller"]


class Teller:
    """Tells both, either or none. What the board raises is a failure: nobody would see us READY."""

    def __init__(
        self, tally: Tally, board: Board | None, show: Callable[[Progress], object] | None
    ) -> None:
        self._tally = tally
        self._board = board
        self._show = show

    def initializing(self) -> None:
        """Say that work begins."""
        if self._board is not None:
            self._board.initializing()

    def chunk(self) -> None:
        """Say that one more chunk is registered."""
        if self._board is not None:
            now = self._tally.progress()
            self._board.progress(now.done_bytes, now.size_bytes, now.longest_chunk_s)
        self.show()

    def ready(self) -> None:
        """Say that all is registered, and that the engine has done its part."""
        if self._board is not None:
            self._board.ready()

    def failed(self, reason: str) -> None:
        """Say that it will not be ready in this run."""
        if self._board is not None:
            # The board may be what failed: the others see a rank that never got ready.
            with contextlib.suppress(Exception):
                self._board.failed(reason)

    def withdrawn(self) -> None:
        """Say that what was ready is not any more: a gate that is still closed must not open."""
        if self._board is not None:
            with contextlib.suppress(Exception):  # as above; or the engine closed it before
                self._board.initializing()
                self._board.progress(0, self._tally.progress().size_bytes)

    def show(self) -> None:
        """Show progress; a display that fails must not cost the engine its memory."""
        if self._show is None:
            return
        try:
            self._show(self._tally.progress())
        except Exception:
            import logging

            self._show = None
            logging.getLogger("hostprep.register").exception("on_progress failed: not called again")
