"""The host as observe reads it: its file tree (`/`, or one that a test has written) and mounts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hostprep.linux.procfs import parse_int
from hostprep.node.facts import Mount

Warn: TypeAlias = "Callable[[str], None]"
"""Takes one sentence about what could not be seen; never raises."""


@dataclass(frozen=True, slots=True)
class HostRoot:
    """Joins absolute host paths below `path`.

    Reads never raise: what is missing, unreadable or gone while being read is None (or empty),
    since procfs and sysfs differ between kernels and devices come and go. Nor do they wait, for a
    FIFO's writer or for the end of another process's lease on the file.
    """

    path: str | os.PathLike[str] = "/"

    def at(self, path: str) -> str:
        """Return where that absolute host path lies for us."""
        return os.path.join(self.path, path.lstrip("/"))

    def read_bytes(self, path: str) -> bytes | None:
        """Return the file's bytes."""
        try:
            with open(os.open(self.at(path), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                return file.read()
        except (OSError, ValueError):
            return None

    def read_text(self, path: str) -> str | None:
        """Return the file's text; bytes that are no UTF-8 stay usable as parts of paths."""
        data = self.read_bytes(path)
        return None if data is None else data.decode("utf-8", "surrogateescape")

    def read_int(self, path: str) -> int | None:
        """Return the file's one decimal or 0x-prefixed number."""
        text = self.read_text(path)
        return None if text is None else parse_int(text.strip())

    def list_dir(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a folder; none where there is no folder."""
        try:
            return tuple(sorted(os.listdir(self.at(path))))
        except (OSError, ValueError):
            return ()

    def exists(self, path: str) -> bool:
        """Whether there is something at that path, links followed."""
        return os.path.exists(self.at(path))

    def link(self, path: str) -> str | None:
        """Return the target of a symbolic link, unresolved."""
        try:
            return os.readlink(self.at(path))
        except (OSError, ValueError):
            return None

    def may_write(self, path: str) -> bool:
        """Whether this process, with its effective ids, may write what is at that path."""
        try:
            return os.access(self.at(path), os.W_OK, effective_ids=True)
        except ValueError:
            return False


_ESCAPE = re.compile(r"\\([0-3][0-7]{2})", re.ASCII)
_DEVICE = re.compile(r"(\d{1,10}):(\d{1,10})", re.ASCII)
_FIXED_FIELDS = 6
_HOST = HostRoot("/")


def read_mounts(
    host: HostRoot = _HOST, warn: Warn = lambda _: None, *, process: str = "self"
) -> tuple[Mount, ...]:
    """Return all mounts in the kernel's order: a later one hides an earlier one at its path."""
    path = f"/proc/{process}/mountinfo"
    text = host.read_text(path)
    if text is None:
        warn(f"{path} cannot be read: mounts are unknown")
        return ()
    # Not splitlines: the kernel leaves \r, \v and their like in paths as they are.
    lines = [line for line in text.split("\n") if line]
    mounts = [mount for line in lines if (mount := parse_mountinfo_line(line))]
    if len(mounts) < len(lines):
        warn(f"{path}: {len(lines) - len(mounts)} lines make no sense")
    return tuple(mounts)


def below(path: str, folder: str) -> bool:
    """Whether a normalised absolute path is the folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def parse_mountinfo_line(line: str) -> Mount | None:
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
    return Mount(
        path=unescape(fields[4]),
        fs_type=unescape(rest[0]),
        source=unescape(rest[1]) if len(rest) > 1 else "",
        options=tuple(dict.fromkeys(unescape(option) for option in options if option)),
        device=(int(device[1]), int(device[2])),
        fs_root=unescape(fields[3]),
    )


def unescape(field: str) -> str:
    r"""Undo the kernel's octal escapes: space is \040, the backslash itself \134."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)


def nearest_existing(path: str) -> str:
    """Return the path, or the deepest of its parents that exists; a dangling link does not."""
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def fs_type_of(path: str, mounts: tuple[Mount, ...]) -> str:
    """Return the type of the file system that an existing path is on; `unknown` if none fits.

    The deepest mount above the path that has its device; the deepest one if none has (btrfs
    shows another device to stat than to mountinfo). Of two at one path the later hides the other.
    """
    real = os.path.realpath(path)
    above = [mount for mount in mounts if below(real, mount.path)]
    try:
        status = os.stat(real)
    except OSError:
        return "unknown"
    device = (os.major(status.st_dev), os.minor(status.st_dev))
    candidates = [mount for mount in above if mount.device == device] or above
    if not candidates:
        return "unknown"
    return max(enumerate(candidates), key=lambda item: (len(item[1].path), item[0]))[1].fs_type
