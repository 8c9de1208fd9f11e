"""A pool's folder and its mounts, made and removed; what is not ours is never touched.

Empty folders may stand where files of ours should be: containerd makes a missing source folder
for every bind mount (MkdirAll, in its WithMounts), and kubelet starts a container again with the
mounts of its first start. So while a region is rebuilt, or after its pool was released, empty
folders of root's may appear at any path that a container had mounted, the regions' files and the
zipapp included. `clear_debris` removes those.
"""

from __future__ import annotations

import contextlib
import os
import stat

from hostprep.api.pool_spec import mount_options
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
from hostprep.linux.mounts import mount, remount, unmount
from hostprep.node.facts import Mount, PoolFacts
from hostprep.node.observe.host import read_mounts
from hostprep.node.plan.actions import MakePool, MountMemory
from hostprep.paths import POOL_MARKS, PoolPaths

_OURS = frozenset({*POOL_MARKS, "handoff.json", "tickets", "state", "links", "devices"})


def make_pool(paths: PoolPaths, action: MakePool) -> None:
    """Make the pool's folder, its locks and the folders that engines write to.

    Raises BadInputError where the root cannot take it, or holds something else of that name.
    """
    try:
        if not os.path.lexists(paths.folder):
            _make_pool_folder(paths, action)
        elif not _is_pool(paths):
            with open(paths.claim_lock, "xb"):
                pass
        _set_modes(paths.folder, action)
    except OSError as error:
        raise from_os_error(error, f"make the folder {paths.folder}") from error


def _make_pool_folder(paths: PoolPaths, action: MakePool) -> None:
    """Make the folder in one step: a pool's, and its group's, from its first instant.

    An engine that opens it before it has its mode would report a permission error.
    """
    remove_file(paths.making)
    os.mkdir(paths.making, 0o700)
    with open(f"{paths.making}/claim.lock", "xb"):
        pass
    make_folder(paths.making, mode=0o750 if action.gid is not None else 0o755, gid=action.gid)
    os.rename(paths.making, paths.folder)


def _is_pool(paths: PoolPaths) -> bool:
    """Return whether the folder is a pool's already. Raises BadInputError for a foreign one.

    One that holds nothing but empty folders is used as it is: kubelet and container runtimes make
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
    """Give mounts, regions and locks that exist the group and mode that the pool has now."""
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
    # One step here too: every later run removes what is left under that name.
    os.rename(paths.folder, paths.making)
    remove_file(paths.making)


def ensure_mount(paths: PoolPaths, action: MountMemory) -> None:
    """Make the mount of an action, or adjust one that is there. Raises HostprepError."""
    target = f"{paths.folder}/{action.mount_dir}"
    try:
        os.makedirs(target, mode=0o755, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"create {target}") from error
    if not action.own_mount:
        return
    here = _mounts_at(target)
    fs_type = "hugetlbfs" if action.backing.is_hugetlb else "tmpfs"
    if not here:
        options = mount_options(
            action.backing,
            gid=action.gid,
            size_bytes=action.size_bytes,
            noswap=action.noswap,
            large_folios=action.large_folios,
        )
        mount(fs_type, target, options)
    elif len(here) > 1 or here[0].fs_type != fs_type:
        raise FailedError(
            f"{target} has {len(here)} mount(s), {here[-1].fs_type} on top; {fs_type} is wanted",
            reason="ForeignMount",
            remedy=f"see who mounted there, then: umount {target}",
        )
    elif fs_type == "tmpfs":
        remount(fs_type, target, f"size={action.size_bytes}")


def remove_mount(paths: PoolPaths, mount_dir: str) -> None:
    """Unmount and remove the folder; nothing to do where neither is there."""
    target = f"{paths.folder}/{mount_dir}"
    for _ in _mounts_at(target):
        unmount(target)
    clear_debris(target)  # with folders in it for regions that were missing
    if os.path.isdir(target):
        try:
            os.rmdir(target)
        except OSError as error:
            raise from_os_error(error, f"remove {target}") from error


def _mounts_at(target: str) -> list[Mount]:
    return [entry for entry in read_mounts() if entry.path == target]


def is_debris(path: str) -> bool:
    """Return whether a folder of root's or ours holds nothing but such folders; no link is one."""
    if not os.path.isdir(path) or os.path.islink(path):
        return False
    try:
        return all(
            not files and os.fstat(fd).st_uid in (0, os.geteuid()) and not _has_link(fd, folders)
            for _, folders, files, fd in os.fwalk(path, onerror=_raise)
        )
    except OSError:
        return False  # it changes, or is not ours to read


def clear_debris(path: str) -> None:
    """Remove a folder that is debris; leave anything else, and what is filled meanwhile."""
    if not is_debris(path):
        return
    with contextlib.suppress(OSError):  # rmdir takes empty folders only
        for _, folders, _, fd in os.fwalk(path, topdown=False, onerror=_raise):
            for name in folders:
                os.rmdir(name, dir_fd=fd)
        os.rmdir(path)


def _has_link(folder: int, names: list[str]) -> bool:
    """Return whether one of them is a link: os.fwalk counts those to folders among the folders."""
    modes = (os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode for name in names)
    return any(stat.S_ISLNK(mode) for mode in modes)


def _raise(error: OSError) -> None:
    raise error
