"""Advisory locks, and the question whether anybody has a file open for writing.

A flock belongs to the open file description: descriptors that were duplicated or inherited
and mappings made from it all keep it, and LOCK_UN through any of them drops it for all.
Hence we never unlock; we close. flock(2), fcntl(2).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Iterator

from hostprep.errors import BusyError
from hostprep.linux.files import from_os_error

_F_SETSIG = 10  # linux/fcntl.h; named by the module fcntl only as of Python 3.11

__all__ = ["has_no_writer", "hold_lock", "try_lock"]


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take a flock if it is free; never waits. Works on read-only descriptors."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def hold_lock(path: str, *, timeout_s: float, busy: BusyError) -> Iterator[int]:
    """Hold an exclusive flock on a file while the block runs, waiting at most `timeout_s`.

    Polls instead of blocking: a holder that was stopped must not hang everybody for good.
    Raises `busy` when the time is over.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise from_os_error(error, f"open {path}") from error
    try:
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0005
        while not try_lock(fd, exclusive=True):
            if time.monotonic() >= deadline:
                raise busy
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)
        try:
            yield fd
        finally:
            # The one lock that is unlocked, not just closed: it is never passed on, and a child
            # forked by another thread in these milliseconds must not keep it for life.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def has_no_writer(fd: int) -> bool:
    """Tell whether nobody, in any namespace, has the file open or mapped for writing.

    `fd` must be open read-only, and the caller own the file or have CAP_LEASE: the kernel grants
    a read lease (F_SETLEASE, F_RDLCK) only while no writable description of the inode exists,
    and a mapping keeps its description. Works on tmpfs and hugetlbfs. Raises OSError otherwise.
    """
    # Whoever opens the file for writing while we hold the read lease makes the kernel signal us:
    # by SIGIO, which ends a process, unless another signal is chosen. SIGURG is ignored.
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        raise
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
