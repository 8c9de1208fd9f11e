"""Engines that want their own bytes back after a restart."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from hostprep.client.untrusted import is_text
from hostprep.errors import BadInputError
from hostprep.linux.files import closing_fd
from hostprep.paths import DNS_LABEL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_MIN_TOKEN = 16
_MAX_TOKEN = 4096
_MAX_IDENTITY = 32 << 10
_MOST_RANKS = 4096
_LAST_S = 2.0**40
"""A time that no clock shows any more."""


@dataclass(frozen=True)
class OwnerRecord:
    """What a region's sidecar keeps of its owner: a hash of the token, never the token."""

    token_sha256: str
    identity: tuple[tuple[str, str], ...]
    name: str = ""
    """What people call the contents: `hostprep exec --warm NAME`. Empty: they have no name."""
    since_s: float = 0.0
    """When the owner first claimed the region, by the clock; 0 where it is not known."""
    index: int = 0
    """The region's place in the owner's batch."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as the sidecar holds it."""
        return {
            "token_sha256": self.token_sha256,
            "identity": dict(self.identity),
            "name": self.name,
            "since_s": self.since_s,
            "index": self.index,
        }

    @classmethod
    def from_json(cls, value: Any) -> OwnerRecord | None:
        """Read a record; None for anything else."""
        if not isinstance(value, dict):
            return None
        token, identity = value.get("token_sha256"), value.get("identity")
        if not is_text(token) or not isinstance(identity, dict):
            return None
        if not all(is_text(key) and is_text(text) for key, text in identity.items()):
            return None
        # Earlier versions wrote none of these; any engine of the pool may write anything.
        name = value.get("name")
        return cls(
            str(token),
            tuple(sorted(identity.items())),
            name if isinstance(name, str) and DNS_LABEL.fullmatch(name) else "",
            _number(value.get("since_s"), _LAST_S),
            int(_number(value.get("index"), _MOST_RANKS)),
        )


def _number(value: Any, most: float) -> float:
    """Return a number from 0 to `most`; 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        return 0.0
    return float(value)


@dataclass(frozen=True)
class Owner:
    """The claimer's identity, and that of its content.

    `token` is a secret of at least 16 characters, kept in the engine's own volume. `identity`
    names the content: model and revision, KV dtype, tokens per block, TP/PP rank and size,
    layout hash, block-hash algorithm and seed. Anything that differs means: start empty.
    `name`, for people, tells apart what one token keeps: it is part of who the owner is.
    """

    token: str
    identity: Mapping[str, str] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.token) < _MIN_TOKEN:
            raise BadInputError(
                f"an owner's token needs at least {_MIN_TOKEN} characters",
                reason="BadOwner",
                remedy="make one with: python3 -c 'import secrets; print(secrets.token_hex())'",
            )
        if self.name:
            check_owner_name(self.name)

        size = sum(len(key) + len(text) for key, text in self.identity.items())
        if size > _MAX_IDENTITY or not all(
            is_text(key) and is_text(text) for key, text in self.identity.items()
        ):
            raise BadInputError(
                "an owner's identity is no set of short texts",
                reason="BadOwner",
                remedy=f"give at most {_MAX_IDENTITY} characters in all, such as a hash",
            )

    def record(self, *, since_s: float = 0.0, index: int = 0) -> OwnerRecord:
        """Return what is kept of this owner beside the region."""
        import hashlib  # late: most claims have no owner

        digest = hashlib.sha256(self.token.encode()).hexdigest()
        identity = tuple(sorted(self.identity.items()))
        return OwnerRecord(digest, identity, self.name, since_s, index)

    def is_same_as(self, record: OwnerRecord) -> bool:
        """Tell whether the record was made with this token, and under this name."""
        import hmac

        same_token = hmac.compare_digest(
            record.token_sha256.encode(), self.record().token_sha256.encode()
        )
        return same_token and record.name == self.name

    def difference(self, record: OwnerRecord) -> str | None:
        """Return the first field of the content's identity that differs; None if none does."""
        mine, kept = dict(self.record().identity), dict(record.identity)
        for key in sorted(mine.keys() | kept.keys()):
            if mine.get(key) != kept.get(key):
                return f"{key} is {mine.get(key)!r}, the region's is {kept.get(key)!r}"
        return None


def check_owner_name(name: str, option: str = "the owner's name") -> str:
    """Return the name if it is a DNS label of at most 63 characters. Raises BadInputError."""
    if DNS_LABEL.fullmatch(name) is None:
        shown = name if len(name) <= 70 else name[:67] + "..."
        raise BadInputError(
            f"{option}: {shown!r} is not a DNS label",
            reason="BadOwner",
            remedy="use at most 63 lower-case letters, digits and hyphens, such as chat-70b",
        )
    return name


def read_token_file(path: str) -> tuple[str, bool]:
    """Return the token in an owner's file, and whether the file was made now.

    A file that is missing is made, with a random token and mode 0600, where its folder may be
    written. Links are followed: a Secret's files are links. Raises BadInputError for a file that
    is none, cannot be read, is open to everybody, or holds no token.
    """
    made = False
    if not path:
        raise _bad_file("it names no file", "name a file; one that is missing is made")
    if not os.path.lexists(path):
        made = _make_token_file(path)
    try:
        # O_NONBLOCK: a FIFO must not keep the engine from starting.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise _bad_file(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or 'no path'})",
            "give a file that this user may read; one that is missing is made",
        ) from error
    with closing_fd(fd):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _bad_file(f"{path} is not a file", "name a file; one that is missing is made")
        if status.st_mode & 0o007:
            raise _bad_file(
                f"{path} is open to everybody (mode {stat.S_IMODE(status.st_mode):04o}): whoever "
                "reads it may have what is kept",
                f"chmod 0600 {path}; of a Secret: defaultMode: 0400",
            )
        try:
            token = os.read(fd, _MAX_TOKEN + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _bad_file(f"{path} holds no text", "put a token of hexadecimal digits") from error
    if not _MIN_TOKEN <= len(token) <= _MAX_TOKEN:
        raise _bad_file(
            f"{path} holds {len(token)} characters; a token has {_MIN_TOKEN} to {_MAX_TOKEN}",
            "delete it, and it is made with a random token",
        )
    return token, made


def _make_token_file(path: str) -> bool:
    """Make the file whole or not at all; False where another process made it meanwhile."""
    import secrets

    part = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with closing_fd(os.open(part, flags, 0o600)) as fd:
            os.write(fd, f"{secrets.token_hex()}\n".encode())
            os.fsync(fd)
        try:
            os.link(part, path)  # unlike rename it replaces no token
        except FileExistsError:
            return False
        finally:
            os.unlink(part)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            os.unlink(part)
        raise _bad_file(
            f"{path} is not there and cannot be made ("
            f"{getattr(error, 'strerror', None) or 'no path'})",
            "name a file in a folder that this user may write, on a volume that stays",
        ) from error
    return True


def _bad_file(why: str, remedy: str) -> BadInputError:
    return BadInputError(f"--owner-file: {why}", reason="BadOwner", remedy=remedy)
