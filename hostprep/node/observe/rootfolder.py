"""The folder that all pools live in. Always the real one, whatever tree the host is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hostprep.node.facts import RootFacts
from hostprep.node.observe.host import HostRoot
from hostprep.node.observe.mounts import MountEntry, below, observe_mount_entries

if TYPE_CHECKING:
    from hostprep.node.observe.host import Warn

__all__ = ["fs_type_of", "nearest_existing", "observe_root"]


def observe_root(root: str, warn: Warn) -> RootFacts:
    """Return what the root folder is, or can become."""
    path = os.path.abspath(root)
    nearest = nearest_existing(path)
    entries = observe_mount_entries(HostRoot(), warn)
    return RootFacts(
        path=path,
        exists=os.path.lexists(path),
        fs_type=fs_type_of(nearest, entries),
        writable=os.path.isdir(nearest)
        and os.access(nearest, os.W_OK | os.X_OK, effective_ids=True),
        free_bytes=_free_bytes(nearest, warn),
        nearest_path=nearest,
        is_symlink=os.path.islink(path),
    )


def nearest_existing(path: str) -> str:
    """Return the path, or the deepest of its parents that exists; a dangling link does not."""
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def fs_type_of(path: str, entries: tuple[MountEntry, ...]) -> str:
    """Return the type of the file system that an existing path is on; `unknown` if none fits.

    The deepest mount above the path that has its device; the deepest one if none has (btrfs
    shows another device to stat than to mountinfo). Of two at one path the later hides the other.
    """
    real = os.path.realpath(path)
    above = [entry.mount for entry in entries if below(real, entry.mount.path)]
    try:
        status = os.stat(real)
    except OSError:
        return "unknown"
    device = (os.major(status.st_dev), os.minor(status.st_dev))
    candidates = [mount for mount in above if mount.device == device] or above
    if not candidates:
        return "unknown"
    return max(enumerate(candidates), key=lambda item: (len(item[1].path), item[0]))[1].fs_type


def _free_bytes(path: str, warn: Warn) -> int:
    try:
        status = os.statvfs(path)
    except OSError as error:
        warn(f"free space at {path} is unknown: {error.strerror}")
        return 0
    return status.f_bavail * status.f_frsize
