"""Which processes hold a file's flock, as procfs shows them: flock(2) itself names nobody."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

_MAX_LOCKS_BYTES = 1 << 20
_MAX_INFO_BYTES = 4096
_MOST_S = 0.2
"""Any user may hold a million locks and open a million files: looking for one's holder ends."""


def describe_holder(path: str) -> str:
    """Return who holds a flock on the file, such as `process 4242 (python3)`. Never raises."""
    pid = find_holder(path)
    return f"process {pid}{_name(pid)}" if pid else "a process that cannot be seen from here"


def is_held_by_another_user(path: str) -> bool:
    """Tell whether the holder is seen to be neither root nor of this process's user."""
    pid = find_holder(path)
    try:
        return bool(pid) and os.stat(f"/proc/{pid}").st_uid not in (0, os.geteuid())
    except OSError:
        return False


def find_holder(path: str) -> str | None:
    """Return the id of a process that holds a flock on the file, or None. Never raises.

    /proc/locks gives the process that took it, which may have passed the descriptor on and ended.
    Only root and the holder's user may look at its descriptors.
    """
    try:
        file = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    deadline_s = time.monotonic() + _MOST_S
    for pid in (*_takers(file), *_all_processes()):
        if time.monotonic() >= deadline_s:
            break
        for _, lines in _descriptors(pid, deadline_s):
            if any(line.startswith("lock:") and _id(file) in line.split() for line in lines):
                return pid
    return None


def describe_opener(path: str) -> str:
    """Return who has the file open or mapped, as `describe_holder` does. Never raises."""
    deadline_s = time.monotonic() + _MOST_S
    with contextlib.suppress(OSError):
        file = os.stat(path, follow_symlinks=False)
        for pid in _all_processes():
            if _has_open(pid, file, os.path.basename(path), deadline_s) or _has_mapped(pid, file):
                return f"process {pid}{_name(pid)}"
            if time.monotonic() >= deadline_s:
                break
    return "a process that cannot be seen from here"


def _descriptors(pid: str, deadline_s: float) -> Iterator[tuple[str, list[str]]]:
    """Yield a process's descriptors: the link that shows each, the lines of its fdinfo (proc(5)).

    The files themselves are not asked: one on a dead NFS server, or on a FUSE file system that the
    process itself serves, may never answer.
    """
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            if time.monotonic() >= deadline_s:
                return
            info = _read(f"/proc/{pid}/fdinfo/{entry.name}", _MAX_INFO_BYTES)
            yield entry.path, info.splitlines()


def _has_open(pid: str, file: os.stat_result, name: str, deadline_s: float) -> bool:
    """Tell whether a descriptor has that inode number (`ino:`, since Linux 5.14) and that name."""
    for link, lines in _descriptors(pid, deadline_s):
        if ["ino:", str(file.st_ino)] in [line.split() for line in lines]:
            with contextlib.suppress(OSError):
                shown = os.readlink(link).removesuffix(" (deleted)")
                if os.path.basename(shown) == name:
                    return True
    return False


def _has_mapped(pid: str, file: os.stat_result) -> bool:
    """Tell whether /proc/PID/maps has the file: `address perms offset 00:2b 1234 path`."""
    wanted = [f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)]
    lines = _read(f"/proc/{pid}/maps", _MAX_LOCKS_BYTES).splitlines()
    return any(line.split(maxsplit=5)[3:5] == wanted for line in lines)


def _takers(file: os.stat_result) -> list[str]:
    """Return the process ids that /proc/locks gives for the file; 0 is one of another namespace.

    A line is `1: FLOCK ADVISORY WRITE 4242 00:2b:1234 0 EOF` (fs/locks.c, lock_get_status).
    """
    wanted = _id(file)
    lines = (line.split() for line in _read("/proc/locks", _MAX_LOCKS_BYTES).splitlines())
    return [
        fields[4]
        for fields in lines
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == wanted and fields[4] != "0"
    ]


def _id(file: os.stat_result) -> str:
    """Return the file as /proc/locks and fdinfo name it: device and inode."""
    return f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"


def _all_processes() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (name for name in os.listdir("/proc") if name.isdigit())


def _name(pid: str) -> str:
    """Return the program's name in brackets. Its process chose it: none but plain characters."""
    name = _read(f"/proc/{pid}/comm", 64).strip()
    shown = "".join(char for char in name if char.isascii() and char.isprintable())
    return f" ({shown})" if shown else ""


def _read(path: str, limit_bytes: int) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(limit_bytes)
    except OSError:
        return ""
