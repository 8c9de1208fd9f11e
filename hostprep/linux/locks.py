"""Locks: flock, OFD byte ranges, and descriptors that a forked child must not keep."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator

from hostprep.errors import BusyError
from hostprep.linux.files import from_os_error, open_state_file

_F_SETSIG = 10  # linux/fcntl.h; named by the module fcntl only as of Python 3.11

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of asm-generic/fcntl.h on 64-bit machines: type, whence, start, length, pid."""


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take a flock if it is free; never waits. Works on read-only descriptors."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lies_at(path: str, fd: int) -> bool:
    """Tell whether the path still leads to the open file: a lock on a removed one holds nobody."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


@contextlib.contextmanager
def hold_lock(path: str, *, timeout_s: float, busy: Callable[[], BusyError]) -> Iterator[int]:
    """Hold an exclusive flock on a file while the block runs, waiting at most `timeout_s`.

    Polls instead of blocking: a holder that was stopped must not hang all others for good.
    Raises what `busy` returns when the time is over.
    """
    try:
        fd = open_state_file(path, os.O_RDONLY)  # a FIFO in its place would hold us for ever
    except OSError as error:
        raise from_os_error(error, f"open {path}") from error
    try:
        for _ in _attempts(timeout_s):
            if try_lock(fd, exclusive=True):
                break
        else:
            raise busy()
        try:
            yield fd
        finally:
            # The one lock that is unlocked, not just closed: it is never passed on, and a child
            # forked by another thread in these milliseconds must not keep it for life.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


@contextlib.contextmanager
def hold_own_lock(path: str, *, timeout_s: float, busy: Callable[[], BusyError]) -> Iterator[None]:
    """Hold a lock that other users cannot take, while the block runs; it leaves no file.

    Anybody may lock a file that they may open, read-only suffices: this one is made for the block,
    with mode 0600, in a folder in which other users cannot replace it (not writable to them, or
    sticky). Raises what `busy` returns when the time is over, HostprepError where another user's
    file is in the way.
    """
    for _ in _attempts(timeout_s):
        fd = open_own_lock(path)
        if try_lock(fd, exclusive=True) and lies_at(path, fd):
            break
        os.close(fd)  # held; or its holder has removed it since
    else:
        raise busy()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)  # before the lock goes: who has the file open sees that it is gone
        os.close(fd)


def open_own_lock(path: str) -> int:
    """Open a lock file that this user alone may open; made where there is none.

    Raises HostprepError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if status.st_mode & 0o077:
            os.fchmod(fd, 0o600)
    except OSError as error:
        raise from_os_error(error, f"open {path}") from error
    return fd


def _attempts(timeout_s: float) -> Iterator[None]:
    """Yield once, and again at growing intervals, until the time is over."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.0005
    yield
    while time.monotonic() < deadline_s:
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)
        yield


def has_no_writer(fd: int) -> bool:
    """Tell whether no process, in any namespace, has the file open or mapped for writing.

    `fd` must be open read-only, and the caller own the file or have CAP_LEASE: the kernel grants
    a read lease (F_SETLEASE, F_RDLCK) only while no writable description of the inode exists,
    and a mapping keeps its description. Works on tmpfs and hugetlbfs. Raises OSError otherwise.
    """
    # A process that opens the file for writing while we hold the read lease makes the kernel signal
    # us: by SIGIO, which ends a process, unless another signal is chosen. SIGURG is ignored.
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        raise
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


@contextlib.contextmanager
def sole_user(fd: int) -> Iterator[bool]:
    """Keep every other process from opening the file while the block runs; yields whether it can.

    `fd` must be open for writing. False where another description of the inode exists, for reading
    too, in any process and namespace, this one included; a mapping keeps its description. The
    kernel keeps openers waiting for at most /proc/sys/fs/lease-break-time seconds (45), and no
    process but the superuser's or the owner's gets such a lease: False, too.
    Works on tmpfs and hugetlbfs.
    """
    is_sole = False
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)  # as above
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        is_sole = True
    try:
        yield is_sole
    finally:
        if is_sole:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def try_lock_range(fd: int, offset_bytes: int, size_bytes: int) -> bool:
    """Take a part of the file for this description alone, if it is free; never waits.

    `fd` must be open for writing. Raises OSError.
    """
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset_bytes, size_bytes, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another description has it
        return False
    return True


def is_range_locked(fd: int, offset_bytes: int, size_bytes: int) -> bool:
    """Tell whether another description holds any of that part; a size of 0 is up to the end.

    Takes nothing, and works on read-only descriptors. Raises OSError.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset_bytes, size_bytes, 0)
    answer = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return bool(answer[0] != fcntl.F_UNLCK)


class _TrackedFd(int):
    """The number of one open descriptor: the same number may be another file's later."""


_fds: dict[int, _TrackedFd] = {}


def track_fd(fd: int) -> int:
    """Track a descriptor that a forked child must not keep; use the returned number afterwards."""
    ours = _fds[fd] = _TrackedFd(fd)
    return ours


def close_tracked(fd: int) -> None:
    """Close a tracked descriptor; does nothing where it is closed, as in a forked child."""
    if is_tracked(fd):
        del _fds[fd]
        with contextlib.suppress(OSError):
            os.close(fd)


def is_tracked(fd: int) -> bool:
    """Tell whether it is still open: its number alone may be another file's by now."""
    return _fds.get(fd) is fd


def _after_fork() -> None:
    for fd in tuple(_fds.values()):
        close_tracked(fd)


os.register_at_fork(after_in_child=_after_fork)
