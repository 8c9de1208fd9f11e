"""The zipapp beside the pools: its names, and keeping the version that a process runs from.

Python reads the directory of a zip file once, and opens the file again by its path for each import
(Lib/zipimport.py). A file that is replaced under its name breaks every later import of a running
process: "bad local file header". So each version has a file of its own that is never replaced, and
`hostprep.pyz` is a hard link to the current one. A process that runs from a version holds a shared
flock on it; the publisher removes only what it can lock exclusively. flock(2): the lock belongs to
the inode, works on read-only mounts, and ends with the last descriptor, also by kill -9.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Mapping

STABLE_NAME = "hostprep.pyz"
_PREFIX, _SUFFIX = "hostprep-", ".pyz"

_TRIES = 20
_PAUSE_S = 0.005
_own: list[int] = []
"""The descriptor whose lock keeps the version that this process was imported from."""


def is_version(name: str) -> bool:
    """Tell whether a file's name is that of one version."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def stay(archive: str) -> str:
    """Return the version's name for the zipapp that is being imported, and keep that version.

    The archive itself is returned where it has no such name: in a container that sees this one
    file, which is a mount and stays the same file, and beside a publisher of an earlier release.
    """
    held = hold(archive)
    if held is None:
        return archive
    path, fd = held
    _own.append(fd)
    # Processes that multiprocessing spawns get this very list.
    sys.path[:] = [path if entry == archive else entry for entry in sys.path]
    return path


def pass_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH with versions in place of `hostprep.pyz`; {} where it is not set.

    The locks are inherited by the program that this process becomes: it may import us at any time.
    """
    for fd in _own:
        os.set_inheritable(fd, True)
    python_path = variables.get("PYTHONPATH")
    if not python_path:
        return {}
    return {"PYTHONPATH": ":".join(_kept(entry) for entry in python_path.split(":"))}


def _kept(entry: str) -> str:
    name = os.path.basename(entry)
    held = hold(entry) if name == STABLE_NAME or is_version(name) else None
    if held is None:
        return entry
    path, fd = held
    os.set_inheritable(fd, True)
    return path


def hold(path: str) -> tuple[str, int] | None:
    """Return the path of the version that a zipapp is, and a descriptor whose lock keeps it.

    None where the file is no version of those beside it. Never raises: who runs from the zipapp
    can do so without.
    """
    for left in reversed(range(_TRIES)):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        version = _version_of(path, os.fstat(fd))
        if version is None:
            os.close(fd)
            return None
        # The publisher locks a version exclusively for the instant in which it removes it: then
        # the path leads to another one the next time. Another holder only keeps it from that.
        if (_lock(fd) or not left) and _is_same(version, os.fstat(fd)):
            return version, fd
        os.close(fd)
        time.sleep(_PAUSE_S)
    return None


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _version_of(path: str, status: os.stat_result) -> str | None:
    """Return the path of the version that has this inode; of the one at `path` itself, that."""
    folder, name = os.path.split(path)
    if is_version(name):
        return path
    try:
        names = sorted(filter(is_version, os.listdir(folder or ".")))
    except OSError:
        return None
    paths = (os.path.join(folder, name) for name in names)
    return next((version for version in paths if _is_same(version, status)), None)


def _is_same(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), status)
    except OSError:
        return False
