"""The files of a turnstile: tickets of those who wait or work, slots of those whose turn it is.

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
from collections.abc import Collection
from dataclasses import dataclass

from hostprep.linux.fork_safe_fds import close_own, is_own, own
from hostprep.linux.locks import try_lock
from hostprep.linux.tmpfile import give_name, new_nameless

__all__ = [
    "SLOT_MODE",
    "Other",
    "QueueTicket",
    "draw",
    "is_slot_name",
    "is_ticket_name",
    "lives",
    "living_ahead",
    "open_plain",
    "release_slot",
    "still_there",
    "try_slots",
]

SLOT_MODE = 0o666
_DIGITS = 12
_LAST = 10**_DIGITS - 1
"""Numbers begin anew whenever the queue is empty: nobody gets there but on purpose."""
_MOST_ENTRIES = 4096
"""Some 100 times what the processes of a node leave there. All of it is read a thousand times a
second by whoever waits."""


@dataclass(frozen=True)
class QueueTicket:
    """A place in the queue, alive as long as the lock on its file; kept until the turn is over."""

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


@dataclass(frozen=True)
class Other:
    """Another's ticket: the number comes again, the inode with it does not while it is known."""

    number: int
    inode: int


def draw(folder: int) -> QueueTicket:
    """Take the last place in the queue. Raises OSError where nothing can be written.

    Two who draw at once may get their places the other way round; nobody loses more than one
    place to each other process that way, since later ones always draw behind.
    """
    fd = own(new_nameless(folder, SLOT_MODE))
    try:
        # Not waiting: nobody else has a file without a name.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        living = [number for number, name in _numbers(folder) if lives(folder, name)]
        number = 1 + max(living, default=0)
        while number <= _LAST:
            if give_name(folder, fd, name := _name(number)):
                return QueueTicket(number, name, fd)
            number += 1
        raise OSError(f"somebody holds the last ticket, {_LAST}")
    except BaseException:
        close_own(fd)
        raise


def living_ahead(
    folder: int, number: int, *, limit: int, passing: Collection[Other] = ()
) -> tuple[Other, ...]:
    """Return the first `limit` tickets before ours whose drawers live, less those in `passing`.

    Tickets of the dead are removed on the way, where this process may. Raises OSError.
    """
    found: list[Other] = []
    for other, name in _numbers(folder):
        if other >= number or len(found) == limit:
            break
        inode = lives(folder, name)
        if inode and Other(other, inode) not in passing:
            found.append(Other(other, inode))
    return tuple(found)


def still_there(folder: int, other: Other) -> bool:
    """Tell whether that very ticket is held still."""
    return lives(folder, _name(other.number)) == other.inode


def try_slots(folder: int, width: int) -> int | None:
    """Return a slot that was free, now locked; None where all are taken.

    The slots alone keep more than `width` from being at work at once; tickets only tell who may
    try next. A slot that cannot be opened is somebody's prank, and does without; raises OSError
    where none can be.
    """
    problem: OSError | None = None
    usable = 0
    for index in range(width):
        try:
            fd = own(_open_slot(folder, f"slot{index}"))
        except OSError as error:
            problem = error
            continue
        usable += 1
        if try_lock(fd, exclusive=True) and os.fstat(fd).st_nlink > 0:
            return fd
        close_own(fd)
    if problem is not None and not usable:
        raise problem
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


def is_slot_name(name: str) -> bool:
    """Tell whether a file of that name is a slot, of whatever width."""
    number = name.removeprefix("slot") if name.startswith("slot") else ""
    return number.isascii() and number.isdigit()


def is_ticket_name(name: str) -> bool:
    """Tell whether a file of that name is a ticket: no other spelling of a number is."""
    return len(name) == _DIGITS and name.isascii() and name.isdigit()


def open_plain(folder: int, name: str) -> int:
    """Open a regular file for locking. Never with O_CREAT: see fs.protected_regular."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{name} is not a regular file")
    return fd


def lives(folder: int, name: str) -> int:
    """Return the inode of a ticket whose drawer lives; 0, and it is removed, if that is dead."""
    try:
        fd = open_plain(folder, name)
    except OSError:
        return 0  # gone, or no ticket of ours: those can be opened by everybody
    try:
        if not try_lock(fd, exclusive=True):
            return os.fstat(fd).st_ino
        with contextlib.suppress(OSError):
            _unlink_own(folder, name, fd)
        return 0
    finally:
        os.close(fd)


def _name(number: int) -> str:
    return f"{number:0{_DIGITS}d}"


def _open_slot(folder: int, name: str) -> int:
    try:
        return open_plain(folder, name)
    except FileNotFoundError:
        pass
    fd = new_nameless(folder, SLOT_MODE)
    try:
        give_name(folder, fd, name)
    finally:
        os.close(fd)
    return open_plain(folder, name)


def _numbers(folder: int) -> list[tuple[int, str]]:
    """Return the tickets in order. Raises OSError where too much lies there to look through."""
    names = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count == _MOST_ENTRIES:
                raise OSError(f"more than {_MOST_ENTRIES} files lie there")
            if is_ticket_name(entry.name):
                names.append(entry.name)
    return [(int(name), name) for name in sorted(names)]


def _unlink_own(folder: int, name: str, fd: int) -> None:
    """Remove a file that we have locked, if the name is still its.

    Under its lock: two who find it dead would else remove its successor's as well.
    """
    if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd)):
        os.unlink(name, dir_fd=folder)
