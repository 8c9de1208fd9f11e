"""Joining a rank board: making it, telling an earlier run's from ours, and taking a rank's slot."""

from __future__ import annotations

import fcntl
import os
import time

from hostprep.cuda.board_layout import (
    JOINED,
    SLOT_BYTES,
    Header,
    Slot,
    board_size_bytes,
    pack_header,
    pack_slot,
    slot_offset,
    unpack_header,
)
from hostprep.cuda.board_view import read_slot, read_whole
from hostprep.errors import BadInputError, BusyError, NotReadyError
from hostprep.linux.files import closing_fd, open_folder, open_state_file
from hostprep.linux.fork_safe_fds import close_own, own
from hostprep.linux.locks import try_lock
from hostprep.linux.ofd_locks import is_range_locked, try_lock_range
from hostprep.linux.processes import current_process
from hostprep.linux.tmpfile import give_name, new_nameless

__all__ = ["JOIN_PAUSE_S", "join"]

_MODE = 0o660
JOIN_PAUSE_S = 0.01


def join(
    path: str, header: Header, rank: int, deadline_s: float
) -> tuple[int, Header, int, Slot] | None:
    """Return our place; None where the file is another by now. Raises BusyError, OSError."""
    opened = _open_or_make(path, header)
    if opened is None:
        return None
    fd = own(opened)
    try:
        _lock_until(fd, deadline_s)
        try:
            if not _is_at(path, fd):
                place = None
            elif not _is_of_run(fd, header):
                os.unlink(path)
                place = None
            else:
                place = (fd, header, rank, _take_slot(fd, rank))
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
    except BaseException:
        close_own(fd)
        raise
    if place is None:
        close_own(fd)
    return place


def _open_or_make(path: str, header: Header) -> int | None:
    try:
        return open_state_file(path, os.O_RDWR)
    except FileNotFoundError:
        pass
    parent, name = os.path.split(path)
    with closing_fd(open_folder(parent)) as folder:
        fd = new_nameless(folder, _MODE)
        try:
            # All of it is written: where the file system is full, now is the time to learn it.
            os.pwrite(fd, pack_header(header).ljust(board_size_bytes(header.world), b"\0"), 0)
            if give_name(folder, fd, name):
                return fd
        except BaseException:
            os.close(fd)
            raise
    os.close(fd)
    return None


def _lock_until(fd: int, deadline_s: float) -> None:
    """Be the only one to join or to replace this file; others do for microseconds."""
    while not try_lock(fd, exclusive=True):
        if time.monotonic() >= deadline_s:
            raise BusyError("another rank has been joining the board for too long")
        time.sleep(JOIN_PAUSE_S)


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _is_of_run(fd: int, header: Header) -> bool:
    """Tell whether a board is of our run; one that is not may be replaced.

    Whatever it is, it may not while ranks live on it: raises BusyError or NotReadyError then.
    Raises BadInputError where it is of our run and for another world size.
    """
    try:
        found = unpack_header(read_whole(fd))
    except NotReadyError:
        if _has_ranks(fd):
            raise
        return False
    if found.generation == header.generation:
        if found.world != header.world:
            raise BadInputError(
                f"this rank is of a world of {header.world}, the ranks before it of {found.world}",
                reason="OtherWorld",
                remedy="give all ranks of the engine the same world size",
            )
        return True
    if _has_ranks(fd):
        raise BusyError(
            "ranks of another run still live on this board",
            reason="OtherRun",
            remedy="end them first: each run needs a lease of its own",
        )
    return False


def _has_ranks(fd: int) -> bool:
    """Tell whether any rank lives on a board; of whatever version: all lock their slots, from here.

    A gate, whose slot is before, does not count: a scheduler may outlive its ranks.
    """
    return is_range_locked(fd, slot_offset(0), 0)


def _take_slot(fd: int, rank: int) -> Slot:
    """Lock our slot for life and write our name into it. Raises BadInputError where it is taken."""
    me = current_process()
    lives = not try_lock_range(fd, slot_offset(rank), SLOT_BYTES)
    before = read_slot(fd, rank)
    if lives or (before is not None and before.process != me):
        whose = "a process that lives" if lives else "a process that has ended"
        raise BadInputError(
            f"rank {rank} of this run was reported by {whose}",
            reason="RankTaken",
            remedy="give each process a rank of its own; after a rank's end, start the whole"
            " engine again: a new lease is a new run",
        )
    slot = before or Slot(1, JOINED, me, time.time())
    os.pwrite(fd, pack_slot(slot), slot_offset(rank))
    return slot
