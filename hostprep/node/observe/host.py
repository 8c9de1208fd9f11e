"""The host's file tree as observe reads it: `/`, or a tree that a test has written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hostprep.linux.procfs import parse_int

Warn: TypeAlias = "Callable[[str], None]"
"""Takes one sentence about what could not be seen; never raises."""


@dataclass(frozen=True, slots=True)
class HostRoot:
    """Joins absolute host paths below `path`.

    Reads never raise: what is missing, unreadable or gone while being read is None (or empty),
    since procfs and sysfs differ between kernels and devices come and go.
    """

    path: str | os.PathLike[str] = "/"

    def at(self, path: str) -> str:
        """Return where that absolute host path lies for us."""
        return os.path.join(self.path, path.lstrip("/"))

    def read_bytes(self, path: str) -> bytes | None:
        """Return the file's bytes."""
        try:
            descriptor = os.open(self.at(path), os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            with open(descriptor, "rb") as file:
                return file.read()
        except OSError:
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
