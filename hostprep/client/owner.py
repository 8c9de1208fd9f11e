"""Engines that want their own bytes back after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hostprep.client.untrusted import is_text
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_MIN_TOKEN = 16
_MAX_IDENTITY = 32 << 10


@dataclass(frozen=True)
class OwnerRecord:
    """What a region's sidecar keeps of its owner: a hash of the token, never the token."""

    token_sha256: str
    identity: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record as the sidecar holds it."""
        return {"token_sha256": self.token_sha256, "identity": dict(self.identity)}

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
        return cls(str(token), tuple(sorted(identity.items())))


@dataclass(frozen=True)
class Owner:
    """The claimer's identity, and that of its content.

    `token` is a secret of at least 16 characters, kept in the engine's own volume. `identity`
    names the content: model and revision, KV dtype, tokens per block, TP/PP rank and size,
    layout hash, block-hash algorithm and seed. Anything that differs means: start empty.
    """

    token: str
    identity: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.token) < _MIN_TOKEN:
            raise BadInputError(
                f"an owner's token needs at least {_MIN_TOKEN} characters",
                reason="BadOwner",
                remedy="make one with: python3 -c 'import secrets; print(secrets.token_hex())'",
            )

        size = sum(len(key) + len(text) for key, text in self.identity.items())
        if size > _MAX_IDENTITY or not all(
            is_text(key) and is_text(text) for key, text in self.identity.items()
        ):
            raise BadInputError(
                "an owner's identity is no set of short texts",
                reason="BadOwner",
                remedy=f"give at most {_MAX_IDENTITY} characters in all, such as a hash",
            )

    def record(self) -> OwnerRecord:
        """Return what is kept of this owner beside the region."""
        import hashlib  # late: most claims have no owner

        digest = hashlib.sha256(self.token.encode()).hexdigest()
        return OwnerRecord(digest, tuple(sorted(self.identity.items())))

    def is_same_as(self, record: OwnerRecord) -> bool:
        """Tell whether the record was made with this token."""
        import hmac

        return hmac.compare_digest(record.token_sha256, self.record().token_sha256)

    def difference(self, record: OwnerRecord) -> str | None:
        """Return the first field of the content's identity that differs; None if none does."""
        mine, kept = dict(self.record().identity), dict(record.identity)
        for key in sorted(mine.keys() | kept.keys()):
            if mine.get(key) != kept.get(key):
                return f"{key} is {mine.get(key)!r}, the region's is {kept.get(key)!r}"
        return None
