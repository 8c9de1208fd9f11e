"""The files of a turnstile: tickets of those who wait, slots of those whose turn it is.

They lie in a folder that anybody on the node may write to (mode 1777), where anything may lie: no
link is followed, nothing but a regular file opened, and whatever is no living ticket passed over.
A file becomes visible by link(2), after its mode and its lock: nobody ever sees one of ours that
is not locked yet and takes it for a dead one's. The sticky bit keeps the dead tickets of other
users in place; they are passed over all the same, and removed by their user or by root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

from hostprep.kernel.locks import try_lock
from hostprep.kernel.nameless import give_name, new_nameless
from hostprep.register.own_fds import close_own, is_own, own
from hostprep.values import value

__all__ = ["QueueTicket", "draw", "living_ahead", "release_slot", "try_slots"]

_MODE = 0o666
_MAX_DIGITS = 30


@value
class QueueTicket:
    """A place in the queue, alive as long as the lock on its file."""

    number: int
    name: str
    fd: int

    def give_up(self, folder: int) -> None:
        """Leave the queue; nothing in a forked child, where the number may be another file's."""
        if not is_own(self.fd):
            return
        with contextlib.suppress(OSError):
            _unlink_own(folder, self.name, self.fd)
        close_own(self.fd)


def draw(folder: int) -> QueueTicket:
    """Take the last place in the queue. Raises OSError where nothing can be written.

    Two who draw at once may get their places the other way round; nobody loses more than one
    place to each other process that way, since later ones always draw behind.
    """
    fd = own(new_nameless(folder, _MODE))
    try:
        # Not waiting: nobody else has a file without a name.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        living = [number for number, name in _numbers(folder) if _lives(folder, name)]
        number = 1 + max(living, default=0)
        while not give_name(folder, fd, name := f"{number:012d}"):
            number += 1
        return QueueTicket(number, name, fd)
    except BaseException:
        close_own(fd)
        raise


def living_ahead(folder: int, number: int, *, limit: int) -> tuple[int, ...]:
    """Return the first `limit` numbers before ours whose drawers live and wait.

    Tickets of the dead are removed on the way, where this process may. Raises OSError.
    """
    found: list[int] = []
    for other, name in _numbers(folder):
        if other >= number or len(found) == limit:
            break
        if _lives(folder, name):
            found.append(other)
    return tuple(found)


def try_slots(folder: int, width: int) -> int | None:
    """Return a slot that was free, now locked; None where all are taken. Raises OSError.

    The slots alone keep more than `width` from being at work at once; tickets only tell who may
    try next.
    """
    for index in range(width):
        fd = own(_open_slot(folder, f"slot{index}"))
        if try_lock(fd, exclusive=True) and os.fstat(fd).st_nlink > 0:
            return fd
        close_own(fd)
    return None


def release_slot(fd: int) -> None:
    """End a turn. Unlocked as well as closed: a child that was just forked must not keep it.

    Nothing in a forked child: it has no turn, and the number may be another file's there.
    """
    if not is_own(fd):
        return
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    close_own(fd)


def _open_slot(folder: int, name: str) -> int:
    try:
        return _open(folder, name)
    except FileNotFoundError:
        pass
    fd = new_nameless(folder, _MODE)
    try:
        give_name(folder, fd, name)
    finally:
        os.close(fd)
    return _open(folder, name)


def _open(folder: int, name: str) -> int:
    """Open a regular file for locking. Never with O_CREAT: see fs.protected_regular."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{name} is not a regular file")
    return fd


def _numbers(folder: int) -> list[tuple[int, str]]:
    return sorted(
        (int(name), name)
        for name in os.listdir(folder)
        if name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS
    )


def _lives(folder: int, name: str) -> bool:
    """Tell whether the drawer of a ticket lives; a dead one's ticket is removed."""
    try:
        fd = _open(folder, name)
    except OSError:
        return False  # gone, or no ticket of ours: those can be opened by everybody
    try:
        if not try_lock(fd, exclusive=True):
            return True
        with contextlib.suppress(OSError):
            _unlink_own(folder, name, fd)
        return False
    finally:
        os.close(fd)


def _unlink_own(folder: int, name: str, fd: int) -> None:
    """Remove a file that we have locked, if the name is still its.

    Under its lock: two who find it dead would else remove its successor's as well.
    """
    if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd)):
        os.unlink(name, dir_fd=folder)
