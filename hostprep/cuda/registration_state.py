"""What a registration is made of: its control, its progress, and its range of memory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hostprep.cuda.board_layout import MOST_HOLES, Holes, mark_bytes
from hostprep.cuda.driver import Driver, DriverError
from hostprep.errors import BadInputError, FailedError, HostprepError
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Board(Protocol):
        """Where a registration reports to the other ranks (hostprep.register.board)."""

        def initializing(self) -> None:
            """Begin to work."""

        def progress(
            self,
            done_bytes: int,
            size_bytes: int,
            longest_chunk_s: float = 0.0,
            holes: Holes = (),
        ) -> None:
            """Show how much is registered, and what is passed over."""

        def ready(self) -> None:
            """Be ready: all is registered, and the engine has done its part."""

        def failed(self, reason: str) -> None:
            """Give up for this run."""


_MOST_IN_HOLES = 8
"""At most one in so many bytes is passed over."""


class CancelledError(FailedError):
    """The registration was cancelled, or closed before it was done."""

    default_reason = "Cancelled"


class Control:
    """Pause, resume, cancel and deadline: set by any thread, checked between two driver calls."""

    def __init__(self, deadline_s: float | None) -> None:
        self.lock = threading.Condition()
        """Held while the outcome is decided: a cancellation comes before it, or too late."""
        self.interrupt = threading.Event()
        """Set while there is a reason to stop waiting."""
        self._deadline_s = deadline_s
        self._ends_at_s: float | None = None
        self._is_paused = False
        self._is_cancelled = False

    def start_clock(self) -> None:
        """Count the deadline from now: at the start, and again after each chunk."""
        if self._deadline_s is not None:
            self._ends_at_s = time.monotonic() + self._deadline_s

    def pause(self) -> None:
        """Stop before the next chunk."""
        with self.lock:
            self._is_paused = True
            self.interrupt.set()

    def resume(self) -> None:
        """Go on after a pause."""
        with self.lock:
            self._is_paused = False
            if not self._is_cancelled:
                self.interrupt.clear()
            self.lock.notify_all()

    def cancel(self) -> None:
        """Stop before the next chunk, for good."""
        with self.lock:
            self._is_cancelled = True
            self.interrupt.set()
            self.lock.notify_all()

    def left_s(self) -> float | None:
        """Return the time until the deadline; None without one."""
        if self._ends_at_s is None:
            return None
        return max(0.0, self._ends_at_s - time.monotonic())

    def is_set(self) -> bool:
        """Tell whether to interrupt the work and ask `go_on`: interrupted, or out of time."""
        return self.interrupt.is_set() or self.left_s() == 0.0

    def go_on(self, on_pause: Callable[[], None]) -> None:
        """Return once the work may go on; `on_pause` is called before waiting for that.

        Raises CancelledError, or FailedError when the deadline is over: a pause counts too.
        """
        with self.lock:
            while True:
                self.check()
                if not self._is_paused:
                    return
                on_pause()
                self.lock.wait(self.left_s())

    def check(self) -> None:
        """Raise CancelledError or FailedError if the work is not to go on; with the lock held."""
        if self._is_cancelled:
            raise CancelledError("the registration was cancelled")
        if self.left_s() == 0.0:
            raise FailedError(
                f"nothing was registered for {self._deadline_s:g} s",
                reason="DeadlineExceeded",
                remedy="give it more time, or a turnstile that is wider",
            )


@dataclass(frozen=True)
class Progress:
    """How far a registration is. `state` is as in `Registration.state`."""

    state: str
    done_bytes: int
    """Registered now: none after a failure, which unregisters all, unless the engine uses it."""
    size_bytes: int
    chunks: int
    """Calls made to register."""
    longest_chunk_s: float
    elapsed_s: float
    note: str = ""
    """More to know, for people."""
    holes: Holes = ()
    """What could not be registered and was passed over; only in one that grows."""

    @property
    def mark_bytes(self) -> int:
        """How far it has come, from the slice's start: all below is registered, or a hole."""
        return mark_bytes(self.done_bytes, self.holes)


class ProgressTracker:
    """Counts, and reports to the board and the display, where given.

    Written by the working thread, read by others; single fields, hence no lock. An error of the
    board is a failure of the registration.
    """

    def __init__(
        self, size_bytes: int, board: Board | None, show: Callable[[Progress], object] | None
    ) -> None:
        self.state = "Idle"
        self.note = ""
        self.done_bytes = 0
        self.holes: Holes = ()
        self.calls = 0
        self._size_bytes = size_bytes
        self._longest_s = 0.0
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._board = board
        self._show = show

    @property
    def has_begun(self) -> bool:
        """Whether work began, ever."""
        return self._began_s is not None

    def begin(self) -> None:
        """Start the clock."""
        self._began_s = time.monotonic()
        self.state = "Registering"

    def end(self, outcome: str) -> None:
        """Stop the clock."""
        self._ended_s = time.monotonic()
        self.state = outcome

    def progress(self) -> Progress:
        """Return the progress as a value."""
        end_s = self._ended_s or time.monotonic()
        return Progress(
            state=self.state,
            done_bytes=self.done_bytes,
            size_bytes=self._size_bytes,
            chunks=self.calls,
            longest_chunk_s=self._longest_s,
            elapsed_s=end_s - self._began_s if self._began_s is not None else 0.0,
            note=self.note or _words_of(self.holes),
            holes=self.holes,
        )

    def initializing(self) -> None:
        """Report that work begins."""
        if self._board is not None:
            self._board.initializing()

    def chunk(self, size_bytes: int, took_s: float) -> None:
        """Count and report one more registered chunk."""
        self.done_bytes += size_bytes
        self._longest_s = max(self._longest_s, took_s)
        self._report()

    def hole(self, begin: int, size_bytes: int) -> bool:
        """Pass over a piece that cannot be registered; tell whether that is still possible.

        Pieces that touch are one hole. There is room for a few, and where much cannot be registered
        something else is wrong.
        """
        holes = self.holes
        if holes and holes[-1][1] == begin:
            begin, size_bytes = holes[-1][0], size_bytes + begin - holes[-1][0]
            holes = holes[:-1]
        holes = (*holes, (begin, begin + size_bytes))
        if len(holes) > MOST_HOLES or mark_bytes(0, holes) > self._size_bytes // _MOST_IN_HOLES:
            return False
        self.holes = holes
        self._report()
        return True

    def took_back(self) -> None:
        """Count from nothing: all was unregistered."""
        self.done_bytes, self.holes = 0, ()

    def _report(self) -> None:
        if self._board is not None:
            self._board.progress(self.done_bytes, self._size_bytes, self._longest_s, self.holes)
        self.show()

    def ready(self) -> None:
        """Report that all is registered, and that the engine has done its part."""
        if self._board is not None:
            self._board.ready()

    def failed(self, reason: str) -> None:
        """Report that it will not be ready in this run."""
        if self._board is not None:
            # The board may be what failed: the others see a rank that never got ready.
            with contextlib.suppress(Exception):
                self._board.failed(reason)

    def withdrawn(self) -> None:
        """Report that what was ready no longer is: a gate that is still closed must not open."""
        if self._board is not None:
            with contextlib.suppress(Exception):  # as above; or the engine closed it before
                self._board.initializing()
                self._board.progress(0, self._size_bytes)

    def show(self) -> None:
        """Show progress; a display that fails must not cost the engine its memory."""
        if self._show is None:
            return
        try:
            self._show(self.progress())
        except Exception:
            import logging

            self._show = None
            logging.getLogger("hostprep.register").exception("on_progress failed: not called again")


def _words_of(holes: Holes) -> str:
    if not holes:
        return ""
    places = "1 place" if len(holes) == 1 else f"{len(holes)} places"
    return f"not used: {format_bytes(mark_bytes(0, holes))} in {places} could not be registered"


class RegisteredRange:
    """A range of this process's memory, and the chunks of it that are registered.

    While any is, the range's mapping is kept, whatever the attachment and its views do: the
    driver would go on copying to and from pages that belong to another mapping by then.
    """

    def __init__(self, name: str, keep: memoryview, address: int, size_bytes: int) -> None:
        self.name = name
        self._keep: memoryview | None = keep
        self.start = address
        self.end = address + size_bytes
        self._chunks: list[int] = []

    @property
    def count(self) -> int:
        """How many chunks are registered."""
        return len(self._chunks)

    def claim(self) -> None:
        """Take the range. Raises BadInputError, naming the part, if part of it is taken.

        The driver would refuse the second registration of a byte as well, but only at that
        chunk, after having registered all before it.
        """
        with _live.lock:
            for other in _live.ranges:
                start, end = max(self.start, other.start), min(self.end, other.end)
                if start < end:
                    raise BadInputError(
                        f"{self.name}: [{start:#x}, {end:#x}), {end - start} bytes, belong to "
                        f"another registration of this process ({other.name})",
                        reason="Overlap",
                        remedy="close that one first, or register slices that share no page",
                    )
            _live.ranges.append(self)

    def register(self, driver: Driver, offset_bytes: int, size_bytes: int, flags: int) -> None:
        """Register one chunk of the range. Raises DriverError."""
        address = self.start + offset_bytes
        # Noted before: Ctrl-C during the call is raised as soon as it has done its work.
        self._chunks.append(address)
        try:
            driver.register(address, size_bytes, flags)
        except HostprepError:
            self._chunks.pop()
            raise

    def undo(
        self, driver: Driver, turn: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> HostprepError | None:
        """Unregister all chunks, the last one first; return the first error, after all.

        In reverse, as in every roll-back: at any moment what is left is a range without holes
        from its start on. Each call within a `turn()`: it stalls others as registering does. A
        context that is gone took its registrations with it.
        """
        first_error: DriverError | None = None
        stuck: list[int] = []
        while self._chunks:
            address = self._chunks[-1]
            try:
                with turn():
                    driver.unregister(address)
            except DriverError as error:
                if not error.is_gone:
                    stuck.append(address)
                    first_error = first_error or error
            self._chunks.pop()  # not before: Ctrl-C while it waits for its turn leaves it noted
        self._chunks = stuck[::-1]
        return first_error

    def forget(self) -> None:
        """Treat all chunks as gone: their context is."""
        self._chunks = []

    def release(self) -> None:
        """Release the range and its mapping; not while a chunk of it is registered."""
        if self._chunks:
            return
        self._keep = None
        with _live.lock:
            if self in _live.ranges:
                _live.ranges.remove(self)


class _LiveRanges:
    """The ranges in use. Strong references: a registered range is not collected by accident."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ranges: list[RegisteredRange] = []


_live = _LiveRanges()
_of_parents: list[_LiveRanges] = []


def _after_fork() -> None:
    """Start empty in a forked child: it has registered nothing, and these ranges are not mapped.

    The parent's objects are kept as they are: the child must not unmap them.
    """
    global _live  # noqa: PLW0603
    _of_parents.append(_live)
    _live = _LiveRanges()


os.register_at_fork(after_in_child=_after_fork)
