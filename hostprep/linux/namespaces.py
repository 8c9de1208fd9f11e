"""PID 1's cgroup namespace: only from there can a cgroup of the host's own be named and entered."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

__all__ = ["HOST_CGROUP_NAMESPACE", "first_cgroup_namespace"]

HOST_CGROUP_NAMESPACE = 0xEFFFFFFB
"""PROC_CGROUP_INIT_INO of include/linux/proc_ns.h: the inode of the first one."""

_CLONE_NEWCGROUP = 0x02000000  # linux/sched.h
# Not /proc/self: that is the main thread, and each thread has a namespace of its own.
_OWN = "/proc/thread-self/ns/cgroup"
_FIRST = "/proc/1/ns/cgroup"

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def first_cgroup_namespace() -> Iterator[bool]:
    """Put the calling thread, and threads that it starts, into PID 1's while the block runs.

    Yields False where it was there before. The kernel shows paths of cgroups (/proc/*/cgroup,
    the roots in mountinfo) as the reading thread's namespace has them, and with `nsdelegate`
    refuses, by ENOENT, to move a process out of the namespace in which cgroup.procs was opened
    (cgroup_namespaces(7); admin-guide/cgroup-v2.rst, Delegation).

    Raises OSError where it may not: that takes CAP_SYS_ADMIN, and to see the host's PID 1.
    """
    inode = os.stat(_OWN).st_ino
    if inode == HOST_CGROUP_NAMESPACE or inode == os.stat(_FIRST).st_ino:
        yield False
        return
    own = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        first = os.open(_FIRST, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(first)
        finally:
            os.close(first)
        try:
            yield True
        finally:
            _enter(own)
    finally:
        os.close(own)


def _enter(fd: int) -> None:
    """Call setns(2), which Python has as of 3.12 only. Raises OSError."""
    if _libc.setns(fd, _CLONE_NEWCGROUP) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
