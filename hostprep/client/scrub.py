"""Between owners: whether a region is quiescent, its zeroing, and the links of old leases."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable

from hostprep.client.handoff import Region, open_region
from hostprep.client.sidecar import (
    MAX_MEMBERS_BYTES,
    NO_PROCESS,
    make_state_folder,
    read_members,
    read_sidecar,
)
from hostprep.errors import HostprepError
from hostprep.linux.files import closing_fd, open_beneath, open_folder, open_state_file, remove_file
from hostprep.linux.locks import has_no_writer, try_lock
from hostprep.linux.memory import address_of, explain, map_shared, populate, zero
from hostprep.linux.processes import current_process, first_alive
from hostprep.linux.threads import run_pieces
from hostprep.paths import PoolPaths

_PIECE_BYTES = 64 << 20


def why_not_quiescent(paths: PoolPaths, region: Region, *, repair: bool = True) -> str | None:
    """Return what keeps the region in use, or None if nothing does. For scrubbers only.

    With `repair` a users lock that is gone is made again; else that is the answer. Called under
    the claim lock. The order matters: a holder has the file open for writing, so the locks are
    tried first to name it; then any writer at all, in any namespace (configuration-only engines
    hold no lock of ours); then exiting processes, whose pages a driver may still be unpinning
    after their files were closed.
    """
    return _why_open(paths, region, repair=repair, any_writer=True) or _process_left(paths, region)


def why_locked(paths: PoolPaths, region: Region) -> str | None:
    """Return which lock is held on the region, or None, as seen without the right to scrub.

    Called under the claim lock.
    """
    return _why_open(paths, region, repair=False, any_writer=False)


def _why_open(paths: PoolPaths, region: Region, *, repair: bool, any_writer: bool) -> str | None:
    try:
        with closing_fd(open_region(paths, region, writable=False)) as fd:
            if not try_lock(fd, exclusive=True):
                return "leased"
            with closing_fd(_users_lock(paths, region, fd, repair=repair)) as users:
                if not try_lock(users, exclusive=True):
                    return "used by a process that joined an earlier lease"
            if any_writer and not has_no_writer(fd):
                return "open for writing by a process without a lease"
    except HostprepError as error:
        return error.message
    except OSError as error:
        return f"cannot be examined ({error.strerror})"
    return None


def _users_lock(paths: PoolPaths, region: Region, fd: int, *, repair: bool) -> int:
    """Open the region's users lock; with `repair` it is made again where another file is there.

    Holders of a deleted one are found all the same: they have the region open.
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
    alive = first_alive(last - {NO_PROCESS, current_process()})
    if alive is None:
        return None
    return f"process {alive.pid} of its last lease has not ended yet"


def scrub_file(
    region: Region,
    fd: int,
    *,
    threads: int | None = None,
    on_done: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Overwrite an open region, held exclusively by the caller, with zeros.

    Each piece is populated first: a bad page is reported as an error then, where the memset
    alone would end the process with SIGBUS. Raises NotReadyError, FailedError, Stopped.
    """
    with map_shared(fd, region.size_bytes) as mapping:
        address = address_of(mapping)

        def clear(offset: int, length: int) -> None:
            try:
                populate(address + offset, length, write=True)
            except OSError as error:
                raise explain(error.errno, f"scrubbing {region.name}") from error
            zero(address + offset, length)

        run_pieces(
            clear,
            size_bytes=region.size_bytes,
            piece_bytes=_PIECE_BYTES,
            threads=threads or min(16, len(os.sched_getaffinity(0))),
            on_done=on_done,
            stop=stop,
        )


def remove_stale_links(paths: PoolPaths, region: str) -> None:
    """Remove the links of the region's earlier leases, where they still lead there.

    Containers that got the region as a device write theirs to their view's `links`, which is the
    pool's to them.
    """
    prefix = f"{region}@"
    for folder in (paths.links, *_links_of_views(paths)):
        _sweep(folder, prefix, f"{paths.links}/{prefix}")
    sidecar = read_sidecar(paths, region)
    for link in sidecar.links if sidecar else ():
        with contextlib.suppress(OSError, HostprepError):
            _remove_link(link, f"{paths.links}/{prefix}")


def _links_of_views(paths: PoolPaths) -> list[str]:
    try:
        return [f"{paths.devices}/{view}/links" for view in os.listdir(paths.devices)]
    except OSError:  # no devices, or we are in such a view
        return []


def _sweep(folder: str, prefix: str, leads_to: str) -> None:
    """Delete links of that name or target: containers may have no other lasting place for links.

    Engines write here: an entry that cannot be deleted must not keep the rest.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                link = f"{folder}/{name}"
                if name.startswith(prefix) or os.readlink(link).startswith(leads_to):
                    os.unlink(link)


def _remove_link(link: str, leads_to: str) -> None:
    """Delete an engine's link, if it is one and still leads there.

    The lease's holder wrote its path, and this may be root: no other link is followed on the way
    to it, and the folder stays open while the link is checked and deleted.
    """
    folder, name = os.path.split(link)
    with closing_fd(open_folder("/")) as top:
        flags = os.O_RDONLY | os.O_DIRECTORY
        with closing_fd(open_beneath(top, folder.strip("/"), flags)) as fd:
            if os.readlink(name, dir_fd=fd).startswith(leads_to):
                os.unlink(name, dir_fd=fd)
