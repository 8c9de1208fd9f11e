"""Empty folders where files of ours should be: container runtimes make what a mount lacks.

containerd makes a missing source folder for every bind mount (MkdirAll, in its WithMounts), and
kubelet starts a container again with the mounts of its first start. So while a region is rebuilt,
or after its pool was released, empty folders of root's may appear at any path that a container had
mounted, the regions' files and the zipapp included.
"""

from __future__ import annotations

import contextlib
import os
import stat

__all__ = ["clear_debris", "is_debris"]


def is_debris(path: str) -> bool:
    """Tell whether a folder of root's or ours holds nothing but such folders; no link is one."""
    if not os.path.isdir(path) or os.path.islink(path):
        return False
    try:
        return all(
            not files and _is_ours(os.fstat(fd)) and not _has_link(fd, folders)
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


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _has_link(folder: int, names: list[str]) -> bool:
    """Tell whether one of them is a link: os.fwalk counts those to folders among the folders."""
    modes = (os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode for name in names)
    return any(stat.S_ISLNK(mode) for mode in modes)


def _raise(error: OSError) -> None:
    raise error
