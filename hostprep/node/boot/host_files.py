"""The agent's own files among the node's: told from others' by their first line.

No link is followed on the way: below PID 1's root an absolute one would lead into the agent's own
container. Where one is on the way, nothing of ours can be.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from hostprep.errors import HostprepError, NotReadyError
from hostprep.linux.files import (
    atomic_write,
    closing_fd,
    from_os_error,
    open_beneath,
    read_limited,
    remove_file,
)

__all__ = ["HostFiles", "not_ours", "where_we_write"]

_MARK = "# Kept by the Hostprep agent, which changes and removes it: what you edit here is lost.\n"
_MAX_BYTES = 1 << 20
_NO_FILE_OF_OURS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)
"""What open(2) says of a path at which no regular file can be opened without following a link."""


class _NotOursError(NotReadyError):
    """Something is in the way that the agent did not put there."""


def not_ours(path: str) -> _NotOursError:
    """Return the error for a path, relative to the node's root, where another's thing is."""
    return _NotOursError(
        f"/{path} is not the agent's",
        reason="ForeignFile",
        remedy="move it away, or set boot: none",
    )


def where_we_write() -> contextlib.AbstractContextManager[None]:
    """Pass over folders that are not there, or that we would not write to."""
    return contextlib.suppress(FileNotFoundError, _NotOursError)


@dataclass(frozen=True)
class HostFiles:
    """Files below an open folder that is the node's root."""

    root: int

    def is_ours(self, folder: str, name: str) -> bool:
        """Tell whether a file there begins with our mark. Raises OSError where that is unknown."""
        return (self._read(folder, name) or b"").startswith(_MARK.encode())

    def is_anothers(self, folder: str, name: str) -> bool:
        """Tell whether something there is not ours. Raises OSError where that is unknown."""
        try:
            with closing_fd(self.open(folder)) as fd:
                there = _exists(fd, name)
        except (FileNotFoundError, _NotOursError):
            return False
        return there and not self.is_ours(folder, name)

    def _read(self, folder: str, name: str) -> bytes | None:
        """Return a file's bytes, None where there is no such file. Raises OSError.

        Anything but a regular file, or a larger one than we write, has no bytes.
        """
        path = f"{folder}/{name}"
        try:
            fd = open_beneath(self.root, path, os.O_RDONLY | os.O_NONBLOCK)
        except NotReadyError:  # a link
            return b""
        except OSError as error:
            if error.errno in _NO_FILE_OF_OURS:
                return None if error.errno == errno.ENOENT else b""
            raise
        with closing_fd(fd):
            try:
                return read_limited(fd, _MAX_BYTES)
            except NotReadyError:
                return b""

    def write_ours(self, folder: str, name: str, text: str) -> None:
        """Have our mark and `text` in a file, in folders that are made where they are missing.

        Nothing is written that is there already. Raises NotReadyError where another's file is,
        HostprepError, OSError.
        """
        data = (_MARK + text).encode()
        before = self._read(folder, name)
        if before == data:
            return
        if before is not None and not before.startswith(_MARK.encode()):
            raise not_ours(f"{folder}/{name}")
        with closing_fd(self.open(folder, make=True)) as fd, _named(fd, f"/{folder}"):
            atomic_write(f"/proc/self/fd/{fd}/{name}", data)

    def remove_ours(self, folder: str, name: str) -> None:
        """Remove a file if it is ours, and what a killed run left of one."""
        unfinished = f".{name}.new"
        with where_we_write(), closing_fd(self.open(folder)) as fd, _named(fd, f"/{folder}"):
            # Looked for first: on a read-only file system unlink(2) refuses what is not there.
            gone = [unfinished] if _exists(fd, unfinished) else []
            gone += [name] if self.is_ours(folder, name) else []
            for one in gone:
                remove_file(f"/proc/self/fd/{fd}/{one}")
            if gone:
                os.fsync(fd)

    def remove_if_empty(self, folder: str) -> None:
        """Remove a folder that nobody keeps anything in."""
        parent, _, name = folder.rpartition("/")
        with contextlib.suppress(OSError), closing_fd(self.open(parent)) as fd:
            os.rmdir(name, dir_fd=fd)

    def open(self, folder: str, *, make: bool = False) -> int:
        """Open a folder of the node, following no link: links there are relative to its root.

        Raises _NotOursError for a link on the way, OSError.
        """
        try:
            return open_beneath(self.root, folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if not make:
                raise
        except NotReadyError as error:
            raise not_ours(folder) from error
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise not_ours(folder) from error
            raise
        parent, _, name = folder.rpartition("/")
        with closing_fd(self.open(parent, make=True) if parent else os.dup(self.root)) as fd:
            try:
                os.mkdir(name, 0o755, dir_fd=fd)
            except OSError as error:
                raise from_os_error(error, f"make /{folder}") from error
        return open_beneath(self.root, folder, os.O_RDONLY | os.O_DIRECTORY)


@contextlib.contextmanager
def _named(fd: int, folder: str) -> Iterator[None]:
    """Name the folder in errors as people know it."""
    try:
        yield
    except HostprepError as error:
        error.message = error.message.replace(f"/proc/self/fd/{fd}", folder)
        raise


def _exists(folder: int, name: str) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True
