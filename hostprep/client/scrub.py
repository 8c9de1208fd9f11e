"""Between owners: whether a region is quiescent, its zeroing, and the links of old leases."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterable

from hostprep.client.handoff import Region, check_region, open_region
from hostprep.client.sidecar import (
    NO_PROCESS,
    has_state_folder,
    make_state_folder,
    read_members,
    read_sidecar,
)
from hostprep.client.untrusted import first_names, open_file, wrong_kind
from hostprep.errors import HostprepError, NotReadableError
from hostprep.linux.files import closing_fd, open_beneath, open_folder, remove_file
from hostprep.linux.locks import has_no_writer, try_lock
from hostprep.linux.memory import address_of, explain, map_shared, populate, zero
from hostprep.linux.processes import (
    HOST_PID_NAMESPACE,
    current_process,
    first_alive,
    may_scrub,
)
from hostprep.linux.threads import run_pieces
from hostprep.paths import PoolPaths

_PIECE_BYTES = 64 << 20
_MOST_LINKS = 4096
"""Entries of a folder of links that are looked at: engines write there, and a link left behind
does no harm."""
_DEEPEST_LINK = 64

LEASED = "leased"
JOINED = "used by a process that joined an earlier lease"
WRITABLE = "open for writing by a process without a lease"
NOT_ENDED = "of its last lease has not ended yet"
"""Why a region is in use, as refusals and `hostprep status` say it; the last one names a process
first."""


def may_scrub_pool(paths: PoolPaths) -> bool:
    """Tell whether this process can judge that a region of the pool has no user left."""
    try:
        return may_scrub(os.stat(paths.claim_lock).st_uid)
    except OSError:
        return False


class LastUsers:
    """Looks up whether processes of regions' last leases are still ending.

    That may take thousands of looks into /proc, as many as engines recorded: it is done before the
    claim lock is taken. Under the lock the answer holds as long as the files that it rests on are
    the same: a recorded process that ended stays so.
    """

    def __init__(self, paths: PoolPaths) -> None:
        self._paths = paths
        self._found: dict[str, tuple[object, str | None]] = {}

    def look_up(self, regions: Iterable[str]) -> None:
        """Look up these regions' now."""
        for region in regions:
            self.left(region)

    def left(self, region: str) -> str | None:
        """Return which process is left, or None; looked up again where the files have changed."""
        state = [_identity(path(region)) for path in (self._paths.users_lock, self._paths.sidecar)]
        known = self._found.get(region)
        if known is None or known[0] != state:
            known = self._found[region] = (state, _process_left(self._paths, region))
        return known[1]


def _identity(path: str) -> object:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def why_not_quiescent(
    paths: PoolPaths, region: Region, last_users: LastUsers, *, repair: bool = True
) -> str | None:
    """Return what keeps the region in use, or None if nothing does. For scrubbers only.

    With `repair` a users lock that is gone, or that is no plain file, is made again; else that is
    the answer. Called under the claim lock; `last_users` were looked up before. The order matters:
    a holder has the file open for writing, so the locks are tried first to name it; then any
    writer at all, in any namespace (configuration-only engines hold no lock of ours); then exiting
    processes, whose pages a driver may still be unpinning after their files were closed.
    """
    why = _why_open(paths, region, repair=repair, any_writer=True)
    return why or last_users.left(region.name)


def why_locked(paths: PoolPaths, region: Region) -> str | None:
    """Return which lock is held on the region, or None, as seen without the right to scrub.

    Called under the claim lock.
    """
    return _why_open(paths, region, repair=False, any_writer=False)


def _why_open(paths: PoolPaths, region: Region, *, repair: bool, any_writer: bool) -> str | None:
    try:
        with closing_fd(open_region(paths, region, writable=False)) as fd:
            if not try_lock(fd, exclusive=True):
                return LEASED
            with closing_fd(_users_lock(paths, region, fd, repair=repair)) as users:
                if not try_lock(users, exclusive=True):
                    return JOINED
            if any_writer and not has_no_writer(fd):
                return WRITABLE
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
    if repair and not has_state_folder(paths, region.name):
        make_state_folder(paths, region.name)
    try:
        return open_file(path)
    except FileNotFoundError:
        if not repair:
            raise
    except NotReadableError:
        if not repair or wrong_kind(path) is None:
            raise
    remove_file(path)
    status = os.fstat(fd)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchown(lock, -1, status.st_gid)
    os.fchmod(lock, stat.S_IMODE(status.st_mode))
    return lock


def _process_left(paths: PoolPaths, region: str) -> str | None:
    sidecar = read_sidecar(paths, region)
    recorded = {*read_members(paths, region), *((sidecar.holder,) if sidecar else ())}
    recorded -= {NO_PROCESS, current_process()}
    # The host's first process never ends and is no engine: a record of it is wrong.
    last = {p for p in recorded if (p.pid, p.namespace) != (1, HOST_PID_NAMESPACE)}
    alive = first_alive(last)
    if alive is None:
        return None
    return f"process {alive.pid} {NOT_ENDED}"


def scrub_file(
    region: Region,
    fd: int,
    *,
    threads: int | None = None,
    on_done: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Overwrite an open region, held exclusively by the caller, with zeros.

    Processes of the pool's group may write the file, and so truncate it or punch holes while it is
    scrubbed. Nothing here touches its pages: the kernel populates and zeroes each piece, and
    answers with an error where memset would end this process with SIGBUS, which goes for pages
    that the hardware reported bad as well. Size and blocks are checked again at the end.
    Raises NotReadyError (the region is not what it was), FailedError, Stopped.
    """
    check_region(region, fd)
    zeros = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
    with closing_fd(zeros), map_shared(fd, region.size_bytes) as mapping:
        address = address_of(mapping)

        def clear(offset: int, length: int) -> None:
            try:
                populate(address + offset, length, write=True)
                zero(zeros, mapping, offset, length)
            except OSError as error:
                check_region(region, fd)  # cut short: that is the reason to give
                raise explain(error.errno, f"scrubbing {region.name}") from error

        run_pieces(
            clear,
            size_bytes=region.size_bytes,
            piece_bytes=_PIECE_BYTES,
            threads=threads or min(16, len(os.sched_getaffinity(0))),
            on_done=on_done,
            stop=stop,
        )
        check_region(region, fd)


def remove_stale_links(paths: PoolPaths, region: str) -> None:
    """Remove the links of the region's earlier leases, where they still lead there.

    Containers that got the region as a device write theirs to their view's `links`, which is the
    pool's to them. One without a sidecar was not leased since they were last removed: nothing is
    looked through for it.
    """
    if not os.path.lexists(paths.sidecar(region)):
        return
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
        for name in first_names(folder, _MOST_LINKS):
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
    if folder.count("/") > _DEEPEST_LINK:
        return
    with closing_fd(open_folder("/")) as top:
        flags = os.O_RDONLY | os.O_DIRECTORY
        with closing_fd(open_beneath(top, folder.strip("/"), flags)) as fd:
            if os.readlink(name, dir_fd=fd).startswith(leads_to):
                os.unlink(name, dir_fd=fd)
