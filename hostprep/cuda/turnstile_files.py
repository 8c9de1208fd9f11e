"""The files of a turnstile: tickets of processes that wait or register, slots, and the folders.

A ticket holds the 16 bytes of its process's engine, or nothing. A slot is locked exclusively by a
process without an engine; the processes of one engine share it, and its bytes are in the slot then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass

from hostprep.errors import BadInputError, NotReadyError
from hostprep.linux.files import (
    closing_fd,
    give_name,
    open_folder,
    open_state_file,
    open_tmpfile,
    remove_tree,
)
from hostprep.linux.locks import close_tracked, is_tracked, track_fd, try_lock
from hostprep.paths import POOL_MARKS, TURNSTILE

SLOT_MODE = 0o666
_DIGITS = 12
_LAST = 10**_DIGITS - 1
"""Numbers start again whenever the queue is empty: only malice gets there."""
_MOST_ENTRIES = 4096
"""Some 100 times what the processes of a node leave there. Each waiting process reads all of it a
thousand times a second."""

_MODE = 0o1777
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SLOT = "slot0"
_ENGINE_BYTES = 16


@dataclass(frozen=True)
class QueueTicket:
    """A place in the queue, alive as long as the lock on its file; kept until the turn is over."""

    number: int
    name: str
    fd: int

    def give_up(self, folder: int) -> None:
        """Leave the queue; nothing in a forked child, where the number may be another file's."""
        if not is_tracked(self.fd):
            return
        with contextlib.suppress(OSError):
            _unlink_own(folder, self.name, self.fd)
        close_tracked(self.fd)


@dataclass(frozen=True)
class TicketId:
    """Another process's ticket. Its number may be used again, but not with the same inode."""

    number: int
    inode: int


def draw(folder: int, engine: bytes = b"") -> QueueTicket:
    """Take the last place in the queue. Raises OSError where nothing can be written.

    `engine`: 16 bytes that all processes of an engine have in common; empty for one by itself.

    Two processes that draw at once may swap places; a process loses at most one place to each
    other that way, since later ones always draw behind.
    """
    fd = track_fd(open_tmpfile(folder, SLOT_MODE))
    try:
        # Never waits: no other process has a file without a name.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, engine, 0)
        living = [number for number, name in _numbers(folder) if living_inode(folder, name)]
        number = 1 + max(living, default=0)
        while number <= _LAST:
            if give_name(folder, fd, name := _name(number)):
                return QueueTicket(number, name, fd)
            number += 1
        raise OSError(f"the last ticket, {_LAST}, is taken")
    except BaseException:
        close_tracked(fd)
        raise


def living_ahead(
    folder: int,
    number: int,
    *,
    limit: int,
    skip: Collection[TicketId] = (),
    engine: bytes = b"",
) -> tuple[TicketId, ...]:
    """Return the first `limit` living tickets before ours, less those in `skip`.

    Of each engine the first one counts, and none of our own's: its processes have turns together.
    Tickets of dead processes are removed on the way, where this process may. Raises OSError.
    """
    found: list[TicketId] = []
    engines = {engine} - {b""}
    for other, name in _numbers(folder):
        if other >= number or len(found) == limit:
            break
        inode, of = _living(folder, name)
        if inode and of not in engines and TicketId(other, inode) not in skip:
            found.append(TicketId(other, inode))
            engines |= {of} - {b""}
    return tuple(found)


def is_held(folder: int, other: TicketId) -> bool:
    """Tell whether that very ticket is still held."""
    return living_inode(folder, _name(other.number)) == other.inode


def try_slots(folder: int, width: int, engine: bytes = b"") -> int | None:
    """Return a slot that was free or is our engine's, now locked; None where all are taken.

    The slots alone keep more than `width` engines from registering at once; tickets only say
    which may try next. A slot that cannot be opened (malice) is passed over; raises OSError where
    none can be.
    """
    problem: OSError | None = None
    usable = 0
    for index in range(width):
        try:
            fd = track_fd(_open_slot(folder, f"slot{index}", os.O_RDWR if engine else os.O_RDONLY))
        except OSError as error:
            problem = error
            continue
        try:
            if _lock_slot(fd, engine) and os.fstat(fd).st_nlink > 0:
                return fd
        except OSError as error:  # no room for our bytes, or no longer a file of this size
            problem = error
            close_tracked(fd)
            continue
        except BaseException:
            close_tracked(fd)
            raise
        usable += 1
        close_tracked(fd)
    if problem is not None and not usable:
        raise problem
    return None


def _lock_slot(fd: int, engine: bytes) -> bool:
    """Lock a slot, together with processes of the same engine; False where it is another's."""
    if not engine:
        return try_lock(fd, exclusive=True)
    if try_lock(fd, exclusive=True):
        os.pwrite(fd, engine, 0)
    # A lock that is made a shared one is none for an instant (flock(2)): another engine may have
    # taken it then, and written its own bytes.
    return try_lock(fd, exclusive=False) and os.pread(fd, _ENGINE_BYTES, 0) == engine


def release_slot(fd: int) -> None:
    """End a turn. Unlocked as well as closed: a child that was just forked must not keep it.

    Does nothing in a forked child: it has no turn, and the number may be another file's there.
    """
    if not is_tracked(fd):
        return
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    close_tracked(fd)


def is_slot_name(name: str) -> bool:
    """Tell whether a file of that name is a slot, of any width."""
    return name.startswith("slot") and name[4:].isascii() and name[4:].isdigit()


def is_ticket_name(name: str) -> bool:
    """Tell whether a file of that name is a ticket: no other spelling of a number is."""
    return len(name) == _DIGITS and name.isascii() and name.isdigit()


def open_plain(folder: int, name: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file for locking. Never with O_CREAT: see fs.protected_regular."""
    return open_state_file(name, flags, folder=folder)


def living_inode(folder: int, name: str) -> int:
    """Return the inode of a ticket whose process lives; else remove the ticket and return 0."""
    return _living(folder, name)[0]


def _living(folder: int, name: str) -> tuple[int, bytes]:
    """Return the same, and the bytes of the process's engine."""
    try:
        fd = open_plain(folder, name)
    except OSError:
        return 0, b""  # gone, or no ticket of ours: those can be opened by everybody
    try:
        if not try_lock(fd, exclusive=True):
            return os.fstat(fd).st_ino, os.pread(fd, _ENGINE_BYTES, 0)
        with contextlib.suppress(OSError):
            _unlink_own(folder, name, fd)
        return 0, b""
    finally:
        os.close(fd)


def _name(number: int) -> str:
    return f"{number:0{_DIGITS}d}"


def _open_slot(folder: int, name: str, flags: int) -> int:
    try:
        return open_plain(folder, name, flags)
    except FileNotFoundError:
        pass
    _make_slot(folder, name)
    return open_plain(folder, name, flags)


def _make_slot(folder: int, name: str) -> None:
    with closing_fd(open_tmpfile(folder, SLOT_MODE)) as fd:
        give_name(folder, fd, name)


def _numbers(folder: int) -> list[tuple[int, str]]:
    """Return the tickets in order. Raises OSError where too many files lie there."""
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

    Under its lock: else two processes that find it dead would remove its successor's as well.
    """
    if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd)):
        os.unlink(name, dir_fd=folder)


def open_turnstile(root: str, key: str) -> int:
    """Open a key's folder, made where missing; follows no link. Raises OSError, HostprepError.

    The folder around it is the node's, and never made here: in a container that sees nothing of
    the root but its pool, an engine's own would be a turnstile for it alone.
    """
    with closing_fd(_open_all(root, make=False)) as folder:
        return _open_or_make(folder, key)


def make_turnstiles(root: str, keys: tuple[str, ...] = ("node",)) -> None:
    """Make the folders, for engines that may not; called when the node is prepared.

    Each gets its first slot, which is then ours, so that no other user can remove it; whatever is
    neither a slot nor a living ticket is removed. Raises OSError, HostprepError.
    """
    with closing_fd(_open_all(root, make=True)) as folder:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                if not _is_ours(os.stat(key, dir_fd=folder, follow_symlinks=False)):
                    _clear(folder, key)
            with closing_fd(_open_or_make(folder, key)) as turnstile:
                if _is_ours(os.fstat(turnstile)):  # else another user was faster: the next time
                    _tidy(turnstile)
                    _make_first_slot(turnstile)


def remove_turnstiles(root: str) -> None:
    """Remove the folders with all that is in them; by root, once no pool is left.

    Processes that wait there go on without taking turns. Links are removed, never followed; a
    folder of that name that not everybody may write to is not ours.
    """
    folder = f"{root}/{TURNSTILE}"
    with contextlib.suppress(OSError):
        if stat.S_IMODE(os.lstat(folder).st_mode) == _MODE:
            remove_tree(folder)


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid()


def _tidy(folder: int) -> None:
    """Remove what is neither a slot nor a living ticket, other users' dead ones included."""
    with os.scandir(folder) as entries:
        found = [
            (entry.name, is_ticket_name(entry.name) and entry.is_file(follow_symlinks=False))
            for entry in entries
            if not is_slot_name(entry.name)
        ]
    for name, is_ticket in found:
        if is_ticket:
            living_inode(folder, name)  # removes a dead one
        else:
            _clear(folder, name)


def _make_first_slot(folder: int) -> None:
    """Make the first slot, ours and open to everybody: the sticky bit then keeps it in place.

    Another user's is replaced once no process has its turn there: under its lock, so that a
    process that is about to take it sees that it has gone.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            fd = open_plain(folder, _SLOT)
        except FileNotFoundError:
            pass
        except OSError:
            _clear(folder, _SLOT)
        else:
            with closing_fd(fd):
                status = os.fstat(fd)
                if _is_ours(status) and stat.S_IMODE(status.st_mode) == SLOT_MODE:
                    return
                if not try_lock(fd, exclusive=True):
                    return
                os.unlink(_SLOT, dir_fd=folder)
    _make_slot(folder, _SLOT)


def _clear(folder: int, name: str) -> None:
    """Remove an entry of any type; a link itself, never its target. What cannot be removed stays.

    In the open folder: its owner could lead a path elsewhere meanwhile.
    """
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        remove_tree(name, folder=folder)
    except OSError:
        pass


def _open_all(root: str, *, make: bool) -> int:
    with closing_fd(open_folder(root)) as parent:
        _refuse_pool(root, parent)
        try:
            return _open_or_make(parent, TURNSTILE, make=make)
        except FileNotFoundError as error:
            raise NotReadyError(
                f"there is no {root}/{TURNSTILE}", reason="NoTurnstile", remedy="mount the node's"
            ) from error


def _refuse_pool(root: str, parent: int) -> None:
    """Raise BadInputError for a pool of that name: it must not be opened to everybody."""
    for mark in POOL_MARKS:
        with contextlib.suppress(OSError):
            os.stat(f"{TURNSTILE}/{mark}", dir_fd=parent, follow_symlinks=False)
            raise BadInputError(
                f"{root}/{TURNSTILE} is a pool",
                reason="BadTurnstile",
                remedy="name the pool otherwise",
            )


def _open_or_make(parent: int, name: str, *, make: bool = True) -> int:
    try:
        folder = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _MODE, dir_fd=parent)
        folder = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    status = os.fstat(folder)
    # Ours, and made an instant ago (the umask) or by a run that was killed here.
    if _is_ours(status) and stat.S_IMODE(status.st_mode) != _MODE:
        os.fchmod(folder, _MODE)
    return folder
