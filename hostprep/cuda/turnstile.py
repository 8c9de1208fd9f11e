"""The turnstile: the engines of a node take turns with the driver, chunk by chunk.

While one process registers, the driver's locks stall the others' calls; a lock alone is not fair
(flock(2) promises no order). Hence tickets, in order of arrival, for a small number of slots. The
ranks of one engine run in lockstep: what stalls one stalls all, so that they have turns together.
Kernel locks only: they go with their process, in any PID namespace, and no daemon has to be up.

Registering unfairly is better than not registering: without a folder to write to, an engine logs it
once and registers without taking turns. A process that was stopped in its turn is alive to the
kernel: after a while the others go past it and take turns among themselves.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hostprep.cuda.board_layout import generation_of
from hostprep.cuda.turnstile_files import (
    QueueTicket,
    TicketId,
    draw,
    is_held,
    living_ahead,
    open_turnstile,
    release_slot,
    try_slots,
)
from hostprep.errors import BadInputError, BusyError, HostprepError
from hostprep.linux.locks import close_tracked, track_fd
from hostprep.paths import TURNSTILE, default_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Event


_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
_MAX_WIDTH = 64
_HEAD_PAUSE_S = 0.001
_PAUSE_S = 0.01
_IMPATIENT_S = 1.0
PATIENCE_S = 30.0
"""Of processes that register by chunks: hundreds of them could have had their turns."""
_SLOW_BYTES_PER_S = 2_800_000_000
"""Half of the slowest rate measured for memory that is present: 5.6 GB/s, 4 KiB pages, four
processes at once (LightLLM issue 1527)."""
_PATIENCES = 10
"""The longest wait, in multiples of the patience: where the queue moves and never lets us through,
a process keeps drawing tickets before ours."""
_OPEN_TRIES = 10


def patience_for(call_bytes: int) -> float:
    """Return how long to wait for others that, like us, register that much by one call."""
    return max(PATIENCE_S, call_bytes / _SLOW_BYTES_PER_S)


class Turnstile:
    """The turnstile of one GPU, or of the whole node: every process that uses the same key.

    At most `width` engines register at once. `engine`: what all ranks of one have in common, such
    as the lease's id; a process without it is by itself. `patience_s`: how long the queue before us
    may stand still until we go past it, and ten times as long in any case; a turn takes
    milliseconds. `say` gets a sentence for people, once; by default it is logged as a warning. Each
    thread of a process may take turns of its own.
    """

    def __init__(
        self,
        root: str | None = None,
        key: str = "node",
        *,
        engine: str = "",
        width: int = 1,
        patience_s: float = PATIENCE_S,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Raise BadInputError for an invalid key or width; touches no file."""
        if _KEY.fullmatch(key) is None:
            raise BadInputError(
                f"{key!r} cannot name a turnstile",
                reason="BadTurnstile",
                remedy="give the GPU's UUID, or node",
            )
        if not 1 <= width <= _MAX_WIDTH:
            raise BadInputError(
                f"a turnstile of width {width} cannot be",
                reason="BadTurnstile",
                remedy=f"give 1 to {_MAX_WIDTH} processes at a time",
            )
        self._root = root or default_root()
        self._key = key
        self._engine = generation_of(engine) if engine else b""
        self._width = width
        self._patience_s = patience_s
        self._stopped: frozenset[TicketId] = frozenset()
        self._slot_is_stuck = False
        self._impatient = False
        self._say = say or _log
        self.without: str | None = None
        """Why turns were not waited for, as reported the first time; None where all were."""

    @property
    def path(self) -> str:
        """The folder of its tickets."""
        return f"{self._root}/{TURNSTILE}/{self._key}"

    @contextlib.contextmanager
    def turn(self, timeout_s: float | None = None, stop: Event | None = None) -> Iterator[None]:
        """Wait for our turn, and hold it while the block runs: for one chunk.

        Raises BusyError (TurnTimeout, TurnStopped) when `timeout_s` is over or `stop` is set
        while we wait: the block does not run then.
        """
        turn = self._begin(_WaitTimer(timeout_s, stop))
        try:
            yield
        finally:
            if turn is not None:
                turn.end()

    def _begin(self, wait: _WaitTimer) -> _Turn | None:
        """Return our turn; None where turns cannot be taken."""
        try:
            folder, ticket = self._draw()
            try:
                return _Turn(folder, ticket, self._queue(folder, ticket, wait))
            except BaseException:
                _Turn(folder, ticket, None).end()
                raise
        except BusyError:
            raise
        except HostprepError as error:
            self._go_without(error.message)
        except OSError as error:
            entry = error.filename if isinstance(error.filename, str) else ""
            self._go_without(f"{self.path}: {entry and entry + ': '}{error.strerror or error}")
        return None

    def _queue(self, folder: int, ticket: QueueTicket, wait: _WaitTimer) -> int | None:
        """Wait until we are next, and return our slot; None for a turn without one."""
        self._forget_who_moved(folder)
        while True:
            ahead = living_ahead(
                folder,
                ticket.number,
                limit=self._width + 1,
                skip=self._stopped,
                engine=self._engine,
            )
            is_next = len(ahead) < self._width
            slot = try_slots(folder, self._width, self._engine) if is_next else None
            if slot is not None:
                self._slot_is_stuck = self._impatient = False
                return slot
            if is_next and self._slot_is_stuck:
                return None  # still in order: the others that went past it wait for our ticket
            is_stuck = wait.stands_still_s(ahead) > self._patience_now_s()
            if is_stuck or wait.waited_s() > self._patience_now_s() * _PATIENCES:
                self._lose_patience(wait, is_stuck=is_stuck)
                if is_next or not is_stuck:
                    self._slot_is_stuck = is_next
                    return try_slots(folder, self._width, self._engine)
                # Those that could be at work. Others behind them wait for them as we do.
                self._stopped |= set(ahead[: self._width])
            wait.pause(_HEAD_PAUSE_S if len(ahead) <= self._width else _PAUSE_S)

    def _lose_patience(self, wait: _WaitTimer, *, is_stuck: bool) -> None:
        """Report that we go on: those before us may be stopped by a debugger or a frozen cgroup."""
        self._impatient = True
        what = "nothing moved" if is_stuck else "no turn"
        self._say_once(
            f"{self.path}: {what} for {wait.waited_s():.1f} s: registering past the process stopped"
            " there, whose call may stall ours; end that process, or let it go on"
        )

    def _patience_now_s(self) -> float:
        return min(self._patience_s, _IMPATIENT_S) if self._impatient else self._patience_s

    def _forget_who_moved(self, folder: int) -> None:
        """Wait again for processes whose turn has ended after all: they go on, or are dead."""
        left = frozenset(other for other in self._stopped if is_held(folder, other))
        if left != self._stopped:
            self._stopped, self._slot_is_stuck = left, False

    def _go_without(self, why: str) -> None:
        self._say_once(
            f"registering without taking turns ({why}): processes that register at the same"
            " time stall each other; mount the root's turnstile folder writable to avoid it"
        )

    def _say_once(self, text: str) -> None:
        if self.without is None:
            self.without = text
            self._say(text)

    def _draw(self) -> tuple[int, QueueTicket]:
        """Return the folder of our key, made where missing, and our ticket in it.

        Raises OSError, HostprepError.
        """
        for _ in range(_OPEN_TRIES):
            # Another process may have made it just now, and not yet opened it to everybody.
            with contextlib.suppress(PermissionError):
                return self._draw_once()
            if self.without is not None:
                break
            time.sleep(_PAUSE_S)
        return self._draw_once()

    def _draw_once(self) -> tuple[int, QueueTicket]:
        folder = track_fd(open_turnstile(self._root, self._key))
        try:
            return folder, draw(folder, self._engine)
        except BaseException:
            close_tracked(folder)
            raise


@dataclass(frozen=True)
class _Turn:
    """A turn: its slot, unless a stopped process has that, and the ticket that led to it.

    The ticket stays until the end: by it the waiting processes see whether the queue moves.
    """

    folder: int
    ticket: QueueTicket
    slot: int | None

    def end(self) -> None:
        """End the turn; does nothing in a forked child, where the descriptors are closed."""
        if self.slot is not None:
            release_slot(self.slot)
        self.ticket.give_up(self.folder)
        close_tracked(self.folder)


class _WaitTimer:
    """How long we have waited, and for how long the queue before us has stood still."""

    def __init__(self, timeout_s: float | None, stop: Event | None) -> None:
        self._timeout_s = timeout_s
        self._stop = stop
        self._since_s = self._moved_s = time.monotonic()
        self._ahead: tuple[TicketId, ...] | None = None

    def stands_still_s(self, ahead: tuple[TicketId, ...]) -> float:
        """Return for how many seconds the same tickets have been before ours."""
        if ahead != self._ahead:
            self._ahead = ahead
            self._moved_s = time.monotonic()
        return time.monotonic() - self._moved_s

    def waited_s(self) -> float:
        """Return for how many seconds we have waited."""
        return time.monotonic() - self._since_s

    def pause(self, pause_s: float) -> None:
        """Sleep. Raises BusyError when the time is over or `stop` is set."""
        if self._timeout_s is not None:
            left_s = self._since_s + self._timeout_s - time.monotonic()
            if left_s <= 0:
                raise BusyError(
                    f"no turn to register within {self._timeout_s:g} s", reason="TurnTimeout"
                )
            pause_s = min(pause_s, left_s)
        if self._stop is None:
            time.sleep(pause_s)
        elif self._stop.wait(pause_s):
            raise BusyError("stopped while waiting for a turn", reason="TurnStopped")


def _log(text: str) -> None:
    import logging

    logging.getLogger("hostprep.register").warning(text)
