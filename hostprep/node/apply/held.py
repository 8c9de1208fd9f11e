"""Region files that go while a process may still have them open or mapped.

A deleted hugetlbfs file keeps its huge pages until its last descriptor and mapping go, and then
nothing tells that they are used: taking them out of the kernel's pool meanwhile takes free pages of
others instead, and makes the rest surplus, which the next page that anybody frees pays for
(mm/hugetlb.c, set_max_huge_pages and free_huge_folio). So a file that is not free of users is kept,
under a name that no handoff and no plan has, until the kernel says that it is.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence

from hostprep.backing import MIB
from hostprep.errors import BusyError, FailedError
from hostprep.linux.files import closing_fd, from_os_error, remove_file
from hostprep.linux.lock_holders import describe_opener
from hostprep.linux.locks import sole_user
from hostprep.linux.processes import may_scrub
from hostprep.node.observe.pools import held_files
from hostprep.node.plan.actions import Action, RemoveRegion
from hostprep.paths import PoolPaths, held_name, region_of_held

_TRIES = 4
_PAUSE_S = 0.01


def check_no_readers(root: str, actions: Sequence[Action]) -> None:
    """Raise BusyError where a region that is to go is open or mapped, be it for reading only.

    Call it before anything is changed. Without the right to ask the kernel nothing is said.
    """
    for action in actions:
        if isinstance(action, RemoveRegion) and not action.force:
            path = f"{root}/{action.pool}/{action.mount_dir}/{action.region}"
            if not any(_is_unused(path) for _ in range(_TRIES)):
                raise BusyError(
                    f"region {action.region} of pool {action.pool} cannot be removed: "
                    f"{describe_opener(path)} has it open or mapped without a lease",
                    reason="Leased",
                    remedy="end it, or use `hostprep release --force`",
                )


def _is_unused(path: str) -> bool:
    """Tell whether a region's file has no user, waiting a moment if it has: others just look."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError:  # another process has a lease on it
        return False
    except OSError:  # half made, under another name; or it is gone, or no file of ours
        return True
    with closing_fd(fd):
        if not may_scrub(os.fstat(fd).st_uid):
            return True
        with sole_user(fd) as is_sole:
            if is_sole:
                return True
    time.sleep(_PAUSE_S)
    return False


def discard_file(path: str, fd: int | None = None) -> bool:
    """Delete a region's file and free its pages; False where a process keeps those.

    `fd` is the caller's descriptor, open for writing, if it has one: another of this process's
    would count as a user. A file without users is emptied first, while the kernel keeps every
    opener waiting: who comes in that instant gets an empty file, not its pages.
    Raises HostprepError.
    """
    if fd is not None:
        return _discard(path, fd)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        opened = os.open(path, flags)
    except OSError:  # it is gone, or is no file of ours
        remove_file(path)
        return True
    with closing_fd(opened):
        return _discard(path, opened)


def _discard(path: str, fd: int) -> bool:
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            remove_file(path)
            return True
        with sole_user(fd) as is_sole:
            if is_sole:
                os.ftruncate(fd, 0)
                remove_file(path)
                return True
        if os.fstatvfs(fd).f_bsize < MIB:  # tmpfs: its pages are not counted, and come back
            remove_file(path)
            return False
        os.fchmod(fd, 0)
        folder, name = os.path.split(path)
        if region_of_held(name) is None:
            os.rename(path, f"{folder}/{held_name(name.strip('.'), os.fstat(fd).st_ino)}")
    except OSError as error:
        raise from_os_error(error, f"remove {path}") from error
    return False


def clear_held(paths: PoolPaths) -> None:
    """Delete the pool's kept files that no process has open or mapped any more."""
    for path in held_files(paths):
        with contextlib.suppress(FailedError):
            discard_file(path)
