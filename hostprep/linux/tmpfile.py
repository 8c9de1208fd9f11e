"""Files that get their name when they are finished: nobody ever sees one half made."""

from __future__ import annotations

import os

__all__ = ["give_name", "new_nameless"]


def new_nameless(folder: int, mode: int) -> int:
    """Return a file without a name in an open folder, of that mode whatever the umask.

    open(2), O_TMPFILE: it goes with its last descriptor, so that nothing is left of a process that
    is killed meanwhile. Raises OSError.
    """
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    fd = os.open(".", flags, mode, dir_fd=folder)
    try:
        os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def give_name(folder: int, fd: int, name: str) -> bool:
    """Give it a name in its folder; False where that is taken, whatever by. Raises OSError."""
    try:
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    return True
