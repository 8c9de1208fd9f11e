"""Taking turns with the driver, node-wide: one process registers one chunk, then the next does.

While one process registers, the driver's locks stall the others' calls; a lock alone is not fair
(flock(2) promises no order). Hence tickets, in order of arrival, for a small number of slots.
Kernel locks only: what dies lets go, in whatever PID namespace, and no daemon has to be up.

Registering unfairly is better than not registering: without a folder to write to, or behind
somebody who has been stopped, an engine says so once and goes on without taking turns.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator

from hostprep.errors import BadInputError, BusyError, HostprepError, NotReadyError
from hostprep.kernel.files import closing_fd, open_folder
from hostprep.paths import POOL_MARKS, TURNSTILE, default_root
from hostprep.register.tickets import (
    QueueTicket,
    draw,
    living_ahead,
    release_slot,
    try_slots,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Event

__all__ = ["Turnstile", "make_turnstiles", "remove_turnstiles"]

_MODE = 0o1777
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
_MAX_WIDTH = 64
_HEAD_PAUSE_S = 0.001
_PAUSE_S = 0.01
_IMPATIENT_S = 1.0
_PATIENCES = 10
"""How many times a turnstile's patience anybody waits at all: a queue that moves, and never lets
us through, is somebody's who keeps drawing tickets before ours."""
_OPEN_TRIES = 10


class Turnstile:
    """The turnstile of one GPU, or of the whole node: every process that uses the same key.

    `width` at most are at work at once. `patience_s`: how long nothing may move before us until
    we go on without, and ten times as long whatever moves; a turn takes milliseconds. `say` gets a
    sentence for people, once; by default it is logged as a warning. Of several threads each may
    take turns of its own.
    """

    def __init__(
        self,
        root: str | None = None,
        key: str = "node",
        *,
        width: int = 1,
        patience_s: float = 30.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Raise BadInputError for a key or a width that cannot be; touches nothing."""
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
        self._width = width
        self._patience_s = patience_s
        self._impatient = False
        self._say = say or _log
        self._without: str | None = None

    @property
    def path(self) -> str:
        """The folder of its tickets."""
        return f"{self._root}/{TURNSTILE}/{self._key}"

    @property
    def without(self) -> str | None:
        """Why turns were not taken, in words, the first time that they were not; else None."""
        return self._without

    @contextlib.contextmanager
    def turn(self, timeout_s: float | None = None, stop: Event | None = None) -> Iterator[None]:
        """Wait for our turn, and have it while the block runs: for one chunk.

        Raises BusyError (TurnTimeout, TurnStopped) when `timeout_s` is over or `stop` is set
        while we wait: the block does not run then.
        """
        slot = self._take(_Wait(timeout_s, stop))
        try:
            yield
        finally:
            if slot is not None:
                release_slot(slot)

    def _take(self, wait: _Wait) -> int | None:
        """Return our slot; None where there is no taking turns."""
        try:
            folder, ticket = self._draw()
            with closing_fd(folder):
                try:
                    return self._queue(folder, ticket, wait)
                finally:
                    ticket.give_up(folder)
        except BusyError:
            raise
        except HostprepError as error:
            self._go_without(error.message)
        except OSError as error:
            self._go_without(f"{self.path}: {error.strerror or error}")
        return None

    def _queue(self, folder: int, ticket: QueueTicket, wait: _Wait) -> int | None:
        patience_s = min(self._patience_s, _IMPATIENT_S) if self._impatient else self._patience_s
        while True:
            ahead = living_ahead(folder, ticket.number, limit=self._width)
            is_next = len(ahead) < self._width
            slot = try_slots(folder, self._width) if is_next else None
            if slot is not None:
                self._impatient = False
                return slot
            # Stopped by a debugger or a frozen cgroup: alive to the kernel, and for how long?
            stuck = wait.stands_still_s(ahead) > patience_s
            if stuck or wait.waited_s() > patience_s * _PATIENCES:
                self._impatient = True
                what = "nothing moved" if stuck else "no turn"
                self._go_without(f"{self.path}: {what} for {wait.waited_s():.1f} s")
                return try_slots(folder, self._width)
            wait.pause(_HEAD_PAUSE_S if is_next else _PAUSE_S)

    def _go_without(self, why: str) -> None:
        if self._without is None:
            self._without = why
            self._say(
                f"registering without taking turns ({why}): processes that register at the same"
                " time stall each other; mount the root's turnstile folder writable to avoid it"
            )

    def _draw(self) -> tuple[int, QueueTicket]:
        """Return the folder of our key, made where it is missing, and our ticket in it.

        Raises OSError, HostprepError.
        """
        for _ in range(_OPEN_TRIES):
            # Somebody may have made it an instant ago, and not yet opened it to everybody.
            with contextlib.suppress(PermissionError):
                return self._draw_once()
            if self._without is not None:
                break
            time.sleep(_PAUSE_S)
        return self._draw_once()

    def _draw_once(self) -> tuple[int, QueueTicket]:
        folder = _open_below(self._root, self._key, have_all=False)
        try:
            return folder, draw(folder)
        except BaseException:
            os.close(folder)
            raise


class _Wait:
    """How long we have waited, and for how long nothing has moved before us."""

    def __init__(self, timeout_s: float | None, stop: Event | None) -> None:
        self._timeout_s = timeout_s
        self._stop = stop
        self._since_s = self._moved_s = time.monotonic()
        self._ahead: tuple[int, ...] | None = None

    def stands_still_s(self, ahead: tuple[int, ...]) -> float:
        """Return for how many seconds the same ones have been before us."""
        if ahead != self._ahead:
            self._ahead = ahead
            self._moved_s = time.monotonic()
        return time.monotonic() - self._moved_s

    def waited_s(self) -> float:
        """Return for how many seconds we have waited."""
        return time.monotonic() - self._since_s

    def pause(self, pause_s: float) -> None:
        """Sleep. Raises BusyError where there is nothing to wait for any more."""
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
            raise BusyError("told to stop while waiting for a turn", reason="TurnStopped")


def make_turnstiles(root: str, keys: tuple[str, ...] = ("node",)) -> None:
    """Have the folders, for engines that may not make them; by whoever prepares the node.

    Raises OSError, HostprepError.
    """
    for key in keys:
        os.close(_open_below(root, key, have_all=True))


def remove_turnstiles(root: str) -> None:
    """Remove the folders with all that is in them; by root, once no pool is left.

    Whoever waits there goes on without taking turns. Links are removed, never followed; a folder
    of that name that is not everybody's to write to is not ours.
    """
    folder = f"{root}/{TURNSTILE}"
    with contextlib.suppress(OSError):
        if stat.S_IMODE(os.lstat(folder).st_mode) == _MODE:
            import shutil

            shutil.rmtree(folder, ignore_errors=True)


def _open_below(root: str, key: str, *, have_all: bool) -> int:
    """Open a key's folder, made where missing; follows no link.

    The folder around it is the node's, and made with `have_all` only: in a container that sees
    nothing of the root but its pool, an engine's own would be a turnstile for it alone.
    """
    with closing_fd(open_folder(root)) as parent:
        _refuse_pool(root, parent, TURNSTILE)
        try:
            folder = _open_or_make(parent, TURNSTILE, make=have_all)
        except FileNotFoundError as error:
            raise NotReadyError(
                f"there is no {root}/{TURNSTILE}", reason="NoTurnstile", remedy="mount the node's"
            ) from error
    with closing_fd(folder):
        return _open_or_make(folder, key)


def _refuse_pool(root: str, parent: int, name: str) -> None:
    """Raise BadInputError for a pool of our name: it must not be opened to everybody."""
    for mark in POOL_MARKS:
        with contextlib.suppress(OSError):
            os.stat(f"{name}/{mark}", dir_fd=parent, follow_symlinks=False)
            raise BadInputError(
                f"{root}/{name} is a pool", reason="BadTurnstile", remedy="name the pool otherwise"
            )


def _open_or_make(parent: int, name: str, *, make: bool = True) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _MODE, dir_fd=parent)
        folder = os.open(name, flags, dir_fd=parent)
    status = os.fstat(folder)
    # Ours, and made an instant ago (the umask) or by a run that was killed here.
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != _MODE:
        os.fchmod(folder, _MODE)
    return folder


def _log(text: str) -> None:
    import logging

    logging.getLogger("hostprep.register").warning(text)
