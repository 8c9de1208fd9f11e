"""The agent's own mounts: hugetlbfs and tmpfs below a pool's folder."""

from __future__ import annotations

import os

from hostprep.api.mount_options import mount_options
from hostprep.errors import FailedError
from hostprep.linux.files import from_os_error
from hostprep.linux.mounts import mount, remount, unmount
from hostprep.node.apply.debris import clear_debris
from hostprep.node.facts import Mount
from hostprep.node.observe.pools import read_mounts
from hostprep.node.plan.actions import MountMemory
from hostprep.paths import PoolPaths

__all__ = ["ensure_mount", "remove_mount"]


def ensure_mount(paths: PoolPaths, action: MountMemory) -> None:
    """Have the mount that the action wants, whatever a killed run left. Raises HostprepError."""
    target = f"{paths.folder}/{action.mount_dir}"
    _make_folder(target)
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
    clear_debris(target)  # with folders in it for regions that were not there
    if os.path.isdir(target):
        try:
            os.rmdir(target)
        except OSError as error:
            raise from_os_error(error, f"remove {target}") from error


def _make_folder(target: str) -> None:
    try:
        os.makedirs(target, mode=0o755, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"create {target}") from error


def _mounts_at(target: str) -> list[Mount]:
    return [entry for entry in read_mounts() if entry.path == target]
