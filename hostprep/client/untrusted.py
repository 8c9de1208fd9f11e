"""Files that an engine may write: everything that reads one opens, bounds and decodes it here.

Whoever may write a pool's `state/`, `tickets/` and `links/` may leave anything there: links, FIFOs,
other names of foreign files, a terabyte of nothing, JSON that no encoder writes. Whatever it is,
these functions return what they promise or raise NotReadableError, and no other exception: trouble
with such a file is that file's. They never wait, and read no more than they were told.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import stat

from hostprep.errors import HostprepError, NotReadableError
from hostprep.linux.files import closing_fd, open_state_file, read_limited

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_OBJECT_BYTES = 256 << 10
"""A lease with its owner's identity and links has some kilobytes."""
MAX_TEXT = 4096
_MAX_DIGITS = 20
_UNPRINTABLE = "\ufffd"


def open_file(path: str, flags: int = os.O_RDONLY, *, folder: int | None = None) -> int:
    """Open a regular file that has no other name. Follows no link and waits for nothing.

    Raises FileNotFoundError where there is nothing, NotReadableError for anything else.
    """
    try:
        fd = open_state_file(path, flags, folder=folder)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise _not_readable(path, _why(error)) from error
    links = os.fstat(fd).st_nlink
    if links > 1:  # 0: it was replaced in this instant
        os.close(fd)
        raise _not_readable(path, f"has {links} names (hard links)")
    return fd


def read_file(path: str, limit_bytes: int, *, folder: int | None = None) -> bytes:
    """Return a file of at most that size; b"" where there is none. Raises NotReadableError."""
    try:
        with closing_fd(open_file(path, folder=folder)) as fd:
            return read_limited(fd, limit_bytes)
    except FileNotFoundError:
        return b""
    except NotReadableError:
        raise
    except HostprepError as error:
        raise _not_readable(path, error.message.removeprefix("it ")) from error
    except OSError as error:
        raise _not_readable(path, _why(error)) from error


def read_tail(path: str, limit_bytes: int) -> bytes:
    """Return the end of a file, at most that many bytes; b"" where there is none.

    Raises NotReadableError.
    """
    try:
        with closing_fd(open_file(path)) as fd:
            return os.pread(fd, limit_bytes, max(0, os.fstat(fd).st_size - limit_bytes))
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _not_readable(path, _why(error)) from error


def read_object(path: str, limit_bytes: int = MAX_OBJECT_BYTES) -> Fields:
    """Return a file's JSON object; one without members where there is no file.

    Raises NotReadableError.
    """
    data = read_file(path, limit_bytes)
    return parse_object(data) if data else Fields({})


def parse_object(data: bytes) -> Fields:
    """Return the JSON object that the bytes hold. Raises NotReadableError."""
    document = parse_json(data)
    if not isinstance(document, dict):
        raise NotReadableError("it holds no JSON object")
    return Fields(document)


def parse_json(data: bytes) -> Any:
    """Return what the bytes hold: UTF-8 JSON with finite, bounded numbers.

    Raises NotReadableError.
    """
    try:
        return json.loads(
            data.decode("utf-8"), parse_constant=_refuse, parse_float=_float, parse_int=_integer
        )
    except (ValueError, RecursionError) as error:
        raise NotReadableError(f"it is not JSON ({type(error).__name__})") from error


class Fields:
    """A JSON object's members, by type and within bounds. All raise NotReadableError."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def text(self, key: str, *, most: int = MAX_TEXT) -> str:
        """Return a text that can be encoded, of at most so many characters and without NUL."""
        value = self._values.get(key)
        if not is_text(value, most=most):
            raise self._wrong(key, "text")
        return str(value)

    def word(self, key: str, *, most: int) -> str:
        """Return a text that is printable as it is."""
        value = self.text(key, most=most)
        if not value.isprintable():
            raise self._wrong(key, "a printable text")
        return value

    def integer(self, key: str, *, most: int = (1 << 64) - 1) -> int:
        """Return an integer from 0 to `most`."""
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self._wrong(key, "a number")
        return value

    def number(self, key: str, *, most: float) -> float:
        """Return a finite number from 0 to `most`."""
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number")
        if not 0 <= value <= most:
            raise self._wrong(key, "a number")
        return float(value)

    def texts(self, key: str, *, most: int, longest: int = MAX_TEXT) -> tuple[str, ...]:
        """Return the first `most` texts of a list, less whatever else is in it."""
        value = self._values.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        return tuple(entry for entry in value[:most] if is_text(entry, most=longest))

    def get(self, key: str) -> Any:
        """Return a member as it is; None where there is none."""
        return self._values.get(key)

    def _wrong(self, key: str, wanted: str) -> NotReadableError:
        return NotReadableError(f"its {key!r} is not {wanted}, or out of bounds")


def is_text(value: object, *, most: int = MAX_TEXT) -> bool:
    """Tell whether it is a text without NUL and lone surrogates, of at most `most` characters."""
    if not isinstance(value, str) or len(value) > most or "\0" in value:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)


def printable(text: str) -> str:
    """Return a text of an engine's fit to be shown and published, in one line.

    Without control characters, escape codes and lone surrogates: a terminal would act upon them,
    and the API server refuses some.
    """
    return "".join(char if char.isprintable() else _UNPRINTABLE for char in text)


def first_names(folder: str, most: int) -> list[str]:
    """Return the names of at most so many entries of a folder. Raises OSError."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, most)]


def wrong_kind(path: str) -> str | None:
    """Return why what lies at a path is not a regular file of one name; None where it is.

    None too where nothing is there, or it cannot be seen.
    """
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}"
    return f"has {status.st_nlink} names (hard links)" if status.st_nlink > 1 else None


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _not_readable(path: str, why: str) -> NotReadableError:
    return NotReadableError(f"{path} {why}")


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return "is no path"
    if error.errno == errno.ELOOP:
        return "is a symbolic link"
    if error.errno in (errno.EINVAL, errno.ENXIO, errno.EISDIR):
        return "is not a regular file"
    return f"cannot be read ({error.strerror})"


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number that is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number that is too large")
    return int(text)
