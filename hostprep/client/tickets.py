"""Waiting in order of arrival, holding nothing.

A ticket is a file whose name is its place and whose flock is its life: the kernel drops the
lock with the waiter, however it ends. Tickets are drawn and read under the pool's claim lock.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass

from hostprep.errors import HostprepError
from hostprep.linux.files import closing_fd, from_os_error, open_state_file, read_limited
from hostprep.linux.locks import try_lock
from hostprep.paths import PoolPaths

__all__ = ["Ticket", "draw_ticket", "has_waiters", "left_by_earlier"]


@dataclass(frozen=True)
class Ticket:
    """A place in the queue; closing `fd` gives it up."""

    number: int
    path: str
    fd: int

    def give_up(self) -> None:
        """Leave the queue."""
        with contextlib.suppress(OSError):
            # The pool may have been released and made anew: then that number is another's.
            if os.stat(self.path).st_ino == os.fstat(self.fd).st_ino:
                os.unlink(self.path)
        os.close(self.fd)


def draw_ticket(paths: PoolPaths, candidates: frozenset[str]) -> Ticket:
    """Take the last place in the queue. Raises BadInputError without the right to write there."""
    number = max((number for number, _ in _numbers(paths)), default=0) + 1
    path = f"{paths.tickets}/{number:012d}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
    except OSError as error:
        raise from_os_error(error, f"wait in {paths.tickets}") from error
    try_lock(fd, exclusive=True)
    os.fchmod(fd, 0o660)  # whatever the umask: others of the group must be able to read it
    os.write(fd, json.dumps(sorted(candidates)).encode())
    return Ticket(number, path, fd)


def left_by_earlier(
    paths: PoolPaths, mine: Ticket | None, candidates: frozenset[str]
) -> frozenset[str]:
    """Return the candidates that no living waiter who came before could use.

    Only those may be taken: a large batch is not starved by small ones, and who can do with
    other regions need not wait. Tickets of the dead are removed on the way.
    """
    left = candidates
    for number, path in _numbers(paths):
        if mine is not None and number >= mine.number:
            break
        wanted = _living_wants(path)
        if wanted is not None:
            left = left - wanted if wanted else frozenset()
    return left


def has_waiters(paths: PoolPaths) -> bool:
    """Tell whether anybody alive waits in this pool."""
    return any(_living_wants(path) is not None for _, path in _numbers(paths))


def _numbers(paths: PoolPaths) -> list[tuple[int, str]]:
    try:
        names = os.listdir(paths.tickets)
    except OSError:
        return []
    return sorted(
        (int(name), f"{paths.tickets}/{name}")
        for name in names
        if name.isascii() and name.isdigit() and len(name) <= 18
    )


def _living_wants(path: str) -> frozenset[str] | None:
    """Return what a living waiter can use (empty if unreadable: everything); None if dead."""
    try:
        fd = open_state_file(path, os.O_RDONLY)
    except PermissionError:
        return frozenset()
    except OSError:
        return None
    with closing_fd(fd):
        if try_lock(fd, exclusive=True):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        try:
            return frozenset(str(name) for name in json.loads(read_limited(fd, 1 << 20)))
        except (ValueError, TypeError, RecursionError, HostprepError):
            return frozenset()
