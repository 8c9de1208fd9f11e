"""A pool's folder and its mounts, made and removed; what is not ours is never touched.

Empty folders may stand where files of ours should be: containerd makes a missing source folder
for every bind mount (MkdirAll, in its WithMounts), and kubelet starts a container again with the
mounts of its first start. So while a region is rebuilt, or after its pool was released, empty
folders of root's may appear at any path that a container had mounted, the regions' files and the
zipapp included. `clear_debris` removes those.
"""

from __future__ import annotations

import contextlib
import itertools
import os

from hostprep.api.pool_spec import mount_options
from hostprep.client.sidecar import make_state_folder
from hostprep.errors import BadInputError, FailedError, HostprepError
from hostprep.linux import selinux
from hostprep.linux.files import (
    closing_fd,
    empty_folder,
    from_os_error,
    make_folder,
    open_beneath,
    open_folder,
    open_state_file,
    open_without_links,
    remove_file,
    replace_by_folder,
    set_file_access,
    set_folder_access,
)
from hostprep.linux.mounts import mount, remount, unmount
from hostprep.node.facts import Mount, PoolFacts
from hostprep.node.observe.host import read_mounts
from hostprep.node.observe.pools import held_files
from hostprep.node.plan.actions import MakePool, MountMemory
from hostprep.paths import POOL_MARKS, PoolPaths

_SHARED_FOLDER_OPTIONS = "mode=1777,size=1M,nr_inodes=8192"
"""Twice the entries that a turnstile is looked through for; a file of a few bytes takes a page."""

_ASIDE = ".gone"

_MOST_DEBRIS = 1024
_DEEPEST_DEBRIS = 16

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
        mode = open_mode if shared else 0o755
        replace_by_folder(f"{folder}/{name}", mode=mode, gid=action.gid)
    lock_path = f"{folder}/claim.lock"
    with closing_fd(open_state_file(lock_path, os.O_RDWR | os.O_CREAT)) as lock:
        names = 1 + _links_in_views(f"{folder}/devices", os.fstat(lock))
        set_file_access(lock, mode=action.mode, gid=action.gid, names=names)


def _links_in_views(devices: str, lock: os.stat_result) -> int:
    """Return how many folders of the device plugin have the claim lock under a name of its own."""
    links = 0
    with contextlib.suppress(FileNotFoundError):
        for view in os.listdir(devices):
            with contextlib.suppress(OSError):
                links += os.path.samestat(os.lstat(f"{devices}/{view}/claim.lock"), lock)
    return links


def set_access(paths: PoolPaths, action: MakePool, pool: PoolFacts) -> None:
    """Give mounts, regions and locks that exist the group and mode that the pool has now."""
    try:
        for mount in pool.mounts:
            mode = 0o750 if action.gid is not None else 0o755
            set_folder_access(mount.path, mode=mode, gid=action.gid)
        with closing_fd(open_folder(paths.folder)) as folder:
            for region in pool.regions:
                path = f"{region.mount_dir}/{region.name}"
                if not region.finished:
                    continue
                with closing_fd(open_beneath(folder, path, os.O_RDONLY | os.O_NONBLOCK)) as fd:
                    set_file_access(fd, mode=action.mode, gid=action.gid)
                make_state_folder(paths, region.name)
                users = open_state_file(paths.users_lock(region.name), os.O_RDONLY)
                with closing_fd(users):
                    set_file_access(users, mode=action.mode, gid=action.gid)
    except OSError as error:
        raise from_os_error(error, f"change the access of pool {paths.pool}") from error


def strip_pool(paths: PoolPaths) -> None:
    """Leave of a pool its ledger alone, and mounts that are still needed.

    For one whose huge pages could not all be given back, or whose removed files processes have
    open: `release` does the rest once they are free.
    """
    for path in (paths.state, paths.tickets, paths.links, paths.devices):
        put_aside(paths, path)


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
    put_aside(paths, paths.folder)


def put_aside(paths: PoolPaths, path: str) -> None:
    """Move what engines may have filled out of the way, for `remove_put_aside`. Raises OSError.

    Each time to another name: the pool may be made and removed again before that.
    """
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, f"{paths.root}/.{paths.pool}.{os.urandom(8).hex()}{_ASIDE}")


def remove_put_aside(root: str) -> None:
    """Remove what this run or a killed one put aside. Call it without holding the root.

    Engines may have left any number of files, and others are not to wait. Two processes may do it
    at once: each removes what it finds.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if name.startswith(".") and name.endswith(_ASIDE):
                with contextlib.suppress(HostprepError):
                    remove_file(f"{root}/{name}")


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
        selinux.share(target)
    elif len(here) > 1 or here[0].fs_type != fs_type:
        raise FailedError(
            f"{target} has {len(here)} mount(s), {here[-1].fs_type} on top; {fs_type} is wanted",
            reason="ForeignMount",
            remedy=f"see who mounted there, then: umount {target}",
        )
    elif fs_type == "tmpfs":
        remount(fs_type, target, f"size={action.size_bytes}")


def remove_mount(paths: PoolPaths, mount_dir: str) -> None:
    """Unmount and remove the folder; nothing to do where neither is there.

    One with files that are kept until processes let go of their pages stays.
    """
    target = f"{paths.folder}/{mount_dir}"
    if any(os.path.dirname(path) == target for path in held_files(paths)):
        return
    for _ in _mounts_at(target):
        unmount(target)
    clear_debris(target)  # with folders in it for regions that were missing
    if os.path.isdir(target):
        try:
            os.rmdir(target)
        except OSError as error:
            raise from_os_error(error, f"remove {target}") from error


def mount_shared_folder(path: str) -> None:
    """Have a small tmpfs at a folder that everybody may write to: who fills it fills no other.

    Only where the folder is missing or empty, and this process may mount; else it stays as it is.
    Processes of a pod that was started before see the mount where its own mount of the root has
    `mountPropagation: HostToContainer`. Raises OSError, HostprepError.
    """
    os.makedirs(path, mode=0o755, exist_ok=True)
    with closing_fd(open_without_links(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        # Once it is used, a mount over it would take the files of those who use it out of sight.
        if not os.listdir(fd) and not _mounts_at(path):
            mount("tmpfs", path, _SHARED_FOLDER_OPTIONS)
            selinux.share(path)


def unmount_shared_folder(path: str) -> None:
    """Remove such a folder with its mount and all that is on it; one that is filled stays.

    Raises OSError, HostprepError.
    """
    for _ in _mounts_at(path):
        with closing_fd(open_without_links(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            os.fchmod(fd, 0o700)  # from here on it cannot be filled again
            empty_folder(fd)
        unmount(path)
    with contextlib.suppress(OSError):  # an empty one may be left of a run killed around its mount
        os.rmdir(path)


def _mounts_at(target: str) -> list[Mount]:
    return [entry for entry in read_mounts() if entry.path == target]


def is_debris(path: str) -> bool:
    """Return whether a folder of root's or ours holds nothing but such folders; no link is one."""
    try:
        return _folders_of_debris(path) is not None
    except (OSError, HostprepError):
        return False  # it changes, or is not ours to read


def clear_debris(path: str) -> None:
    """Remove a folder that is debris; leave anything else, and what is filled meanwhile."""
    with contextlib.suppress(OSError, HostprepError):  # rmdir takes empty folders only
        for folder in reversed(_folders_of_debris(path) or ()):
            os.rmdir(folder)


def _folders_of_debris(path: str) -> list[str] | None:
    """Return the folder and those in it, each before those below it; None where it is no debris.

    A container's mounts are few and not deep: more folders than that are another process's, and
    are not looked through. Raises OSError.
    """
    found = [path]
    for folder in found:  # grows meanwhile
        if len(found) > _MOST_DEBRIS or folder.count("/") - path.count("/") > _DEEPEST_DEBRIS:
            return None
        with closing_fd(open_without_links(folder, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            if os.fstat(fd).st_uid not in (0, os.geteuid()):
                return None
            with os.scandir(fd) as entries:
                for entry in itertools.islice(entries, _MOST_DEBRIS):
                    if not entry.is_dir(follow_symlinks=False):
                        return None
                    found.append(f"{folder}/{entry.name}")
    return found
