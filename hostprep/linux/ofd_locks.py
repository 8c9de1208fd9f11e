"""Locks on parts of a file that belong to the open file description, as a flock does.

fcntl(2), "Open file description locks", Linux 3.15: dropped with the last descriptor, however its
process ends, and whether one is held can be asked without taking it and without the right to
write. They know nothing of a file's flock, nor a flock of them.
"""

from __future__ import annotations

import fcntl
import os
import struct

__all__ = ["is_range_locked", "try_lock_range"]

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of asm-generic/fcntl.h on 64-bit machines: type, whence, start, length, pid."""


def try_lock_range(fd: int, offset_bytes: int, size_bytes: int) -> bool:
    """Take a part of the file for this description alone, if it is free; never waits.

    `fd` must be open for writing. Raises OSError.
    """
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset_bytes, size_bytes, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: somebody else has it
        return False
    return True


def is_range_locked(fd: int, offset_bytes: int, size_bytes: int) -> bool:
    """Tell whether another description holds any of that part; a size of 0 is up to the end.

    Takes nothing, and works on read-only descriptors. Raises OSError.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset_bytes, size_bytes, 0)
    answer = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return bool(answer[0] != fcntl.F_UNLCK)
