"""A pool's folder: made and removed in one step each, and never one that is not ours."""

from __future__ import annotations

import os

from hostprep.client.sidecar import make_state_folder
from hostprep.errors import BadInputError, FailedError
from hostprep.linux.files import (
    closing_fd,
    from_os_error,
    make_folder,
    open_beneath,
    open_folder,
    open_state_file,
    remove_file,
)
from hostprep.node.apply.debris import is_debris
from hostprep.node.apply.mounts import remove_mount
from hostprep.node.facts import PoolFacts
from hostprep.node.plan.actions import MakePool
from hostprep.paths import POOL_MARKS, PoolPaths

__all__ = ["make_pool", "remove_pool", "set_access"]

_OURS = frozenset({*POOL_MARKS, "handoff.json", "tickets", "state", "links", "devices"})


def make_pool(paths: PoolPaths, action: MakePool) -> None:
    """Make the pool's folder, its locks and the folders that engines write to.

    Raises BadInputError where the root cannot take it, or holds something else of that name.
    """
    try:
        if not os.path.lexists(paths.folder):
            _make_folder(paths, action)
        elif not _is_ours(paths):
            with open(paths.claim_lock, "xb"):
                pass
        _set_modes(paths.folder, action)
    except OSError as error:
        raise from_os_error(error, f"make the folder {paths.folder}") from error


def _make_folder(paths: PoolPaths, action: MakePool) -> None:
    """Make the folder in one step: a pool's, and its group's, from its first instant.

    An engine that looks in before it has its mode would be told that it has no permission.
    """
    remove_file(paths.making)
    os.mkdir(paths.making, 0o700)
    with open(f"{paths.making}/claim.lock", "xb"):
        pass
    make_folder(paths.making, mode=0o750 if action.gid is not None else 0o755, gid=action.gid)
    os.rename(paths.making, paths.folder)


def _is_ours(paths: PoolPaths) -> bool:
    """Tell whether the folder is a pool's already. Raises BadInputError for somebody else's.

    One of nothing but empty folders is taken as it is: kubelet and container runtimes make
    missing host paths (hostPath DirectoryOrCreate; containerd's WithMounts), and a pod that has
    it mounted would never see the one that took its place.
    """
    with closing_fd(open_folder(paths.folder)) as fd:
        names = os.listdir(fd)
    if any(mark in names for mark in POOL_MARKS):
        return True
    if not is_debris(paths.folder):
        raise BadInputError(
            f"{paths.folder} exists and is no pool",
            reason="BadRoot",
            remedy="choose another --root or another name",
        )
    return False


def _set_modes(folder: str, action: MakePool) -> None:
    shared = action.gid is not None
    make_folder(folder, mode=0o750 if shared else 0o755, gid=action.gid)
    for name, open_mode in (("tickets", 0o2770), ("state", 0o750), ("links", 0o2770)):
        make_folder(f"{folder}/{name}", mode=open_mode if shared else 0o755, gid=action.gid)
    lock_path = f"{folder}/claim.lock"
    with closing_fd(open_state_file(lock_path, os.O_RDWR | os.O_CREAT)) as lock:
        os.fchown(lock, -1, -1 if action.gid is None else action.gid)
        os.fchmod(lock, action.mode)


def set_access(paths: PoolPaths, action: MakePool, pool: PoolFacts) -> None:
    """Give what is there already the group and mode that the pool has now."""
    gid = -1 if action.gid is None else action.gid
    try:
        for mount in pool.mounts:
            os.chown(mount.path, -1, gid)
            os.chmod(mount.path, 0o750 if action.gid is not None else 0o755)
        with closing_fd(open_folder(paths.folder)) as folder:
            for region in pool.regions:
                path = f"{region.mount_dir}/{region.name}"
                if not region.finished:
                    continue
                with closing_fd(open_beneath(folder, path, os.O_RDONLY)) as fd:
                    os.fchown(fd, -1, gid)
                    os.fchmod(fd, action.mode)
                make_state_folder(paths, region.name)
                users = open_state_file(paths.users_lock(region.name), os.O_RDONLY)
                with closing_fd(users):
                    os.fchown(users, -1, gid)
                    os.fchmod(users, action.mode)
    except OSError as error:
        raise from_os_error(error, f"change the access of pool {paths.pool}") from error


def remove_pool(paths: PoolPaths) -> None:
    """Remove the folder with all that is ours in it. Raises FailedError for what is not."""
    names = os.listdir(paths.folder)
    for name in names:
        if name.startswith("mem"):
            # An empty one may be left of a run that was killed around its mount.
            remove_mount(paths, name)
        elif name not in _OURS and not name.startswith((".", "boot.")):
            raise FailedError(
                f"{paths.folder} holds {name}, which is not ours",
                reason="ForeignFile",
                remedy="move it away, and run release again",
            )
    remove_file(paths.making)
    # One step here too: what is left of it under that name, every later run clears away.
    os.rename(paths.folder, paths.making)
    remove_file(paths.making)
