"""Mounts, from /proc/PID/mountinfo (format: proc(5))."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostprep.node.facts import Mount

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostprep.node.observe.host import HostRoot, Warn

__all__ = [
    "MountEntry",
    "below",
    "observe_mount_entries",
    "parse_mountinfo_line",
    "relevant_mounts",
    "unescape",
]

_MEMORY_TYPES = frozenset({"hugetlbfs", "tmpfs", "cgroup", "cgroup2"})
_ESCAPE = re.compile(r"\\([0-3][0-7]{2})", re.ASCII)
_DEVICE = re.compile(r"(\d{1,10}):(\d{1,10})", re.ASCII)
_FIXED_FIELDS = 6


@dataclass(frozen=True, slots=True)
class MountEntry:
    """A mount, and which folder of its file system is mounted there."""

    mount: Mount
    fs_root: str


def observe_mount_entries(
    host: HostRoot, warn: Warn, *, process: str = "self"
) -> tuple[MountEntry, ...]:
    """Return all mounts in the kernel's order: a later one hides an earlier one at its path."""
    path = f"/proc/{process}/mountinfo"
    text = host.read_text(path)
    if text is None:
        warn(f"{path} cannot be read: mounts are unknown")
        return ()
    # Not splitlines: the kernel leaves \r, \v and their like in paths as they are.
    lines = [line for line in text.split("\n") if line]
    entries = [entry for line in lines if (entry := parse_mountinfo_line(line))]
    if len(entries) < len(lines):
        warn(f"{path}: {len(lines) - len(entries)} lines make no sense")
    return tuple(entries)


def relevant_mounts(entries: Iterable[MountEntry], root: str) -> tuple[Mount, ...]:
    """Return the mounts that concern memory, and all at or below the root folder."""
    return tuple(
        entry.mount
        for entry in entries
        if entry.mount.fs_type in _MEMORY_TYPES or below(entry.mount.path, root)
    )


def below(path: str, folder: str) -> bool:
    """Whether a normalised absolute path is the folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def parse_mountinfo_line(line: str) -> MountEntry | None:
    """Return one mount: options are the mount's own, then those of its file system.

    Line: id parent major:minor root path options [tag...] - type source options.
    """
    head, separator, tail = line.partition(" - ")
    fields, rest = head.split(" "), tail.split(" ")
    if not separator or len(fields) < _FIXED_FIELDS:
        return None
    device = _DEVICE.fullmatch(fields[2])
    if device is None or not fields[4].startswith("/") or not rest[0]:
        return None
    options = ",".join([fields[5], *rest[2:3]]).split(",")
    mount = Mount(
        path=unescape(fields[4]),
        fs_type=unescape(rest[0]),
        source=unescape(rest[1]) if len(rest) > 1 else "",
        options=tuple(dict.fromkeys(unescape(option) for option in options if option)),
        device=(int(device[1]), int(device[2])),
    )
    return MountEntry(mount=mount, fs_root=unescape(fields[3]))


def unescape(field: str) -> str:
    r"""Undo the kernel's octal escapes: space is \040, the backslash itself \134."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)
