"""The folders mounted in containers as the pool's: one for each set of regions given out.

They stay until the pool is released: kubelet has no call for taking a device back, and a container
that is restarted gets the mounts of its first start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import replace

from hostprep.client.handoff import Handoff, Region, read_handoff
from hostprep.errors import NotReadyError
from hostprep.linux.files import (
    atomic_write,
    closing_fd,
    from_os_error,
    make_folder,
    open_state_file,
    remove_file,
)
from hostprep.node.observe.pools import try_read_handoff
from hostprep.paths import PoolPaths

_MAX_VIEW_NAME = 200


def view_name(regions: Collection[str]) -> str:
    """Return the name of the folder for a set of regions; the same for the same set."""
    name = "+".join(sorted(regions))
    return name if len(name) <= _MAX_VIEW_NAME else hashlib.sha256(name.encode()).hexdigest()


def make_view(paths: PoolPaths, names: Sequence[str]) -> tuple[Region, ...]:
    """Make the folder for these regions, as the handoff has them now. Returns the regions.

    Raises NotReadyError where a region is not published, and HostprepError.
    """
    handoff = read_handoff(paths)
    regions = tuple(region for region in handoff.regions if region.name in names)
    for name in names:
        if handoff.region(name) is None:
            raise NotReadyError(
                f"region {name} of pool {paths.pool} is not published",
                reason="NoSuchRegion",
                remedy="see `hostprep status`; the agent rebuilds it where it can",
            )
    _make(paths, f"{paths.devices}/{view_name(names)}", replace(handoff, regions=regions))
    return regions


def refresh_views(paths: PoolPaths) -> Handoff | None:
    """Bring the handoffs of all views up to date with the pool's. Returns that; None without one.

    They lag behind by a round at most, which does no harm: a claim goes by the region's lock, its
    inode and its marks, and those are the pool's own.
    Raises HostprepError.
    """
    handoff = try_read_handoff(paths)
    for view in _views(paths):
        try:
            names = os.listdir(f"{view}/state")
        except OSError:
            continue  # half made: the next request for it finishes it
        regions = tuple(r for r in handoff.regions if r.name in names) if handoff else ()
        if handoff is None or not regions:
            remove_file(f"{view}/handoff.json")
            continue
        _make(paths, view, replace(handoff, regions=regions))
    return handoff


def _views(paths: PoolPaths) -> list[str]:
    try:
        return [f"{paths.devices}/{name}" for name in sorted(os.listdir(paths.devices))]
    except OSError:
        return []


def _make(paths: PoolPaths, view: str, handoff: Handoff) -> None:
    try:
        _make_folders(paths, view, handoff.regions)
        _publish(paths, view, handoff)
    except OSError as error:  # the pool may be being released
        raise from_os_error(error, f"make {view}") from error


def _make_folders(paths: PoolPaths, view: str, regions: Sequence[Region]) -> None:
    """Make the mount points, with the pool's own modes. Raises OSError.

    Only root may write to the pool's folder, and below `devices` except in `links`: nothing here
    is another user's link.
    """
    _folder_like(paths.devices, paths.folder)
    _folder_like(view, paths.folder)
    _folder_like(f"{view}/links", paths.links)
    _folder_like(f"{view}/tickets", paths.folder)
    _folder_like(f"{view}/state", paths.folder)
    for region in regions:
        mem, name = region.path.rsplit("/", 1)
        _folder_like(f"{view}/state/{region.name}", paths.folder)
        _folder_like(f"{view}/{mem}", paths.folder)
        # The region's file is mounted over this one; without the mount, its inode is a wrong one.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{view}/{mem}/{name}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o440))
    _link_lock(paths, view)


def _folder_like(folder: str, model: str) -> None:
    wanted = os.stat(model)
    make_folder(folder, mode=stat.S_IMODE(wanted.st_mode), gid=wanted.st_gid)


def _link_lock(paths: PoolPaths, view: str) -> None:
    """Link the pool's claim lock into the view: locks exclude each other by inode."""
    lock = f"{view}/claim.lock"
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.stat(lock), os.stat(paths.claim_lock)):
            return
        os.unlink(lock)
    os.link(paths.claim_lock, lock)


def _publish(paths: PoolPaths, view: str, handoff: Handoff) -> None:
    path, data = f"{view}/handoff.json", handoff.to_bytes()
    status = os.stat(paths.handoff)
    mode = stat.S_IMODE(status.st_mode)
    # What cannot be read is replaced: an engine that runs as root may have leased it.
    with contextlib.suppress(OSError), closing_fd(open_state_file(path, os.O_RDONLY)) as fd:
        is_now = os.fstat(fd)
        same = (is_now.st_gid, stat.S_IMODE(is_now.st_mode)) == (status.st_gid, mode)
        if same and os.read(fd, len(data) + 1) == data:
            return
    atomic_write(path, data, mode=mode, gid=status.st_gid)
