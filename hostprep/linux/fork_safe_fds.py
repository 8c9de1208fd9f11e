"""Descriptors that stand for this process being alive: a forked child must not keep them.

A child that inherited a ticket or a slot of the board would hold its lock after the parent was
killed, and the parent would pass for alive. Python's own forks close them here; programs that are
started lose them by O_CLOEXEC.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["close_own", "is_own", "own"]


class _Own(int):
    """A descriptor's number, of one opening of it: the same number may be another file's later."""


_fds: dict[int, _Own] = {}


def own(fd: int) -> int:
    """Take note of a descriptor, and return what stands for it from then on."""
    ours = _fds[fd] = _Own(fd)
    return ours


def close_own(fd: int) -> None:
    """Close such a descriptor; nothing where that was done, as in a forked child it was."""
    if is_own(fd):
        del _fds[fd]
        with contextlib.suppress(OSError):
            os.close(fd)


def is_own(fd: int) -> bool:
    """Tell whether it is still open here: its number alone may be another file's by now."""
    return _fds.get(fd) is fd


def _after_fork() -> None:
    for fd in tuple(_fds.values()):
        close_own(fd)


os.register_at_fork(after_in_child=_after_fork)
