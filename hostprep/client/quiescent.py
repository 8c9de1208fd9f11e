"""Whether anybody is left who could write to a region, or whose pages a driver still unpins."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from hostprep.client.handoff import Region
from hostprep.client.sidecar import (
    MAX_MEMBERS_BYTES,
    NOBODY,
    make_state_folder,
    read_members,
    read_sidecar,
)
from hostprep.client.verify import open_region
from hostprep.errors import HostprepError
from hostprep.linux.files import closing_fd, open_state_file, remove_file
from hostprep.linux.locks import has_no_writer, try_lock
from hostprep.linux.processes import current_process, first_alive
from hostprep.paths import PoolPaths

__all__ = ["why_locked", "why_not_quiescent"]


def why_not_quiescent(paths: PoolPaths, region: Region, *, repair: bool = True) -> str | None:
    """Return what keeps the region in use, or None if nothing does. For scrubbers only.

    With `repair` a users lock that is gone is made anew; else that is the answer. Asked under the
    claim lock. The order matters: a holder has the file open for writing, so
    the locks are asked first to name it; then anybody at all who could write, in any namespace
    (configuration-only engines hold no lock of ours); then processes on their way out, whose
    pages a driver may still be unpinning after their files were closed.
    """
    try:
        with closing_fd(open_region(paths, region, writable=False)) as fd:
            why = _why_locked(paths, region, fd, repair=repair)
            if why is None and not has_no_writer(fd):
                why = "open for writing by a process without a lease"
    except HostprepError as error:
        return error.message
    except OSError as error:
        return f"cannot be examined ({error.strerror})"
    return why or _process_left(paths, region)


def why_locked(paths: PoolPaths, region: Region) -> str | None:
    """Return which lock is held on the region, or None: all that those can see who may not scrub.

    Asked under the claim lock.
    """
    try:
        with closing_fd(open_region(paths, region, writable=False)) as fd:
            return _why_locked(paths, region, fd, repair=False)
    except HostprepError as error:
        return error.message
    except OSError as error:
        return f"cannot be examined ({error.strerror})"


def _why_locked(paths: PoolPaths, region: Region, fd: int, *, repair: bool) -> str | None:
    if not try_lock(fd, exclusive=True):
        return "leased"
    with closing_fd(_users_lock(paths, region, fd, repair=repair)) as users:
        if not try_lock(users, exclusive=True):
            return "used by a process that joined an earlier lease"
    return None


def _users_lock(paths: PoolPaths, region: Region, fd: int, *, repair: bool) -> int:
    """Open the region's users lock; with `repair` made anew where something else is there.

    Holders of one that was deleted are found all the same: they have the region open.
    """
    path = paths.users_lock(region.name)
    try:
        return open_state_file(path, os.O_RDONLY)
    except OSError as error:
        if not repair or error.errno not in (errno.ENOENT, errno.ELOOP, errno.EINVAL):
            raise
    remove_file(path)
    if not os.path.isdir(os.path.dirname(path)):
        make_state_folder(paths, region.name)
    status = os.fstat(fd)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchown(lock, -1, status.st_gid)
    os.fchmod(lock, stat.S_IMODE(status.st_mode))
    return lock


def _process_left(paths: PoolPaths, region: Region) -> str | None:
    sidecar = read_sidecar(paths, region.name)
    last = {*read_members(paths, region.name), *((sidecar.holder,) if sidecar else ())}
    with contextlib.suppress(OSError):
        if os.stat(paths.users_lock(region.name)).st_size > MAX_MEMBERS_BYTES:
            return "more processes joined its leases than can be looked up"
    alive = first_alive(last - {NOBODY, current_process()})
    if alive is None:
        return None
    return f"process {alive.pid} of its last lease has not ended yet"
