"""Watching for the last writer of a region to close it: a lease's end needs no polling.

inotify(7): IN_CLOSE_WRITE comes when the last reference to an open file description that could
write goes, mappings and inherited descriptors included, in whichever mount namespace it was
opened. It is a hint to observe sooner; what counts is the observation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

_IN_CLOSE_WRITE = 0x8  # linux/inotify.h
_IN_Q_OVERFLOW = 0x4000  # the same: events were lost (max_queued_events)
_EVENT = struct.Struct("iIII")
_BUFFER_BYTES = 1 << 16


class WriterWatch:
    """An inotify instance. Raises OSError where there is none to be had (max_user_instances)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._call(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def watch(self, paths: Iterable[str]) -> None:
        """Watch these files; those that are watched already stay so. Missing ones are skipped.

        Raises OSError for others (max_user_watches). A watch goes with its inode.
        """
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._call(
                    self._libc.inotify_add_watch(self.fd, os.fsencode(path), _IN_CLOSE_WRITE)
                )

    def was_closed(self) -> bool:
        """Read the events; return whether a writer closed any file.

        One read only: a process that closes without end must not keep us here.
        """
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, _BUFFER_BYTES)
        closed, at = False, 0
        while at < len(data):
            _, mask, _, name_bytes = _EVENT.unpack_from(data, at)
            closed = closed or bool(mask & (_IN_CLOSE_WRITE | _IN_Q_OVERFLOW))
            at += _EVENT.size + name_bytes
        return closed

    def close(self) -> None:
        """End all watches."""
        os.close(self.fd)

    @staticmethod
    def _call(result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result
