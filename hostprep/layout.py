"""What a region's layout says: groups of slots of one size, each at its offset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ATTENTION = "attention"
RECURRENT = "recurrent"
MAX_SLOTS = (1 << 31) - 2
"""The slots of one group: they are counted in 31 bits (hostprep.slots)."""
DIRECTORY_HEADER_BYTES = 64 << 10
DIRECTORY_TOUCH_BYTES = 4
"""By slot: when it was used last."""
_RECORD_HEAD_BYTES = 24
_PAGE_BYTES = 4096
_KINDS = (ATTENTION, RECURRENT)
_REMEDY = "`hostprep size` makes layouts that fit"


@dataclass(frozen=True)
class Group:
    """The slots of those layers that keep the same blocks: one slot is one block of all of them."""

    name: str
    slots: int
    slot_bytes: int
    offset_bytes: int = 0
    """Where slot 0 begins in the region."""
    window_tokens: int | None = None
    """Tokens a layer looks back on, its own included; None for all."""
    kind: str = ATTENTION
    """`recurrent`: a slot is the state after a block, not the block's own keys and values."""

    def __post_init__(self) -> None:
        where = f"layout: group {self.name!r}"
        if not self.name:
            raise BadInputError("layout: a group has no name", remedy=_REMEDY)
        for field, number, most in (
            ("slots", self.slots, MAX_SLOTS),
            ("slot_bytes", self.slot_bytes, 1 << 50),
            ("window_tokens", 1 if self.window_tokens is None else self.window_tokens, 1 << 50),
        ):
            _whole(number, f"{where}: {field}", 1, most)
        _whole(self.offset_bytes, f"{where}: offset_bytes", 0, 1 << 62)
        if self.kind not in _KINDS:
            raise BadInputError(f"{where}: kind is {self.kind!r}: {' or '.join(_KINDS)}")
        if self.kind == RECURRENT and self.window_tokens is not None:
            raise BadInputError(f"{where}: a recurrent group has no window_tokens")

    @property
    def end_bytes(self) -> int:
        """Where the last slot ends in the region."""
        return self.offset_bytes + self.slots * self.slot_bytes


@dataclass(frozen=True)
class Layout:
    """The groups of one region. Every group's block is of the same `tokens_per_block` tokens."""

    tokens_per_block: int
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        _whole(self.tokens_per_block, "layout: tokens_per_block", 1, 1 << 31)
        if not self.groups:
            raise BadInputError("layout: no groups", remedy=_REMEDY)
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise BadInputError(f"layout: two groups of one name among {', '.join(names)}")

    @staticmethod
    def parse(document: Mapping[str, Any], size_bytes: int) -> Layout:
        """Return the handoff's `layout` of a region of that size.

        Raises BadInputError, naming the field, for anything missing or of the wrong kind, and
        for groups that overlap or leave the region.
        """
        if not isinstance(document, Mapping):
            raise BadInputError("layout: not an object", remedy=_REMEDY)
        listed = document.get("groups")
        if not isinstance(listed, (list, tuple)):
            raise BadInputError("layout: groups is not a list", remedy=_REMEDY)
        groups = tuple(_group(index, one) for index, one in enumerate(listed))
        layout = Layout(document.get("tokens_per_block", 0), groups)
        layout.check_fits(size_bytes)
        return layout

    def check_fits(self, size_bytes: int) -> None:
        """Raise BadInputError where groups overlap, or end beyond the region's size."""
        end_bytes, before = 0, ""
        for group in sorted(self.groups, key=lambda group: group.offset_bytes):
            if group.offset_bytes < end_bytes:
                raise BadInputError(
                    f"layout: group {group.name!r} begins at {group.offset_bytes}, inside group "
                    f"{before!r}, which ends at {end_bytes}",
                    remedy=_REMEDY,
                )
            end_bytes, before = group.end_bytes, group.name
        if end_bytes > size_bytes:
            raise BadInputError(
                f"layout: group {before!r} ends at {end_bytes}, and the region at {size_bytes}",
                remedy=_REMEDY,
            )

    def offset_bytes(self, group: int, slot: int) -> int:
        """Return where a slot begins in the region."""
        chosen = self.groups[group]
        if not 0 <= slot < chosen.slots:
            raise BadInputError(f"group {chosen.name!r} has slots 0 to {chosen.slots - 1}: {slot}")
        return chosen.offset_bytes + slot * chosen.slot_bytes


def directory_record_bytes(key_bytes: int) -> int:
    """Return a record's size: 64 bytes for keys of up to 40, else the next multiple of 8."""
    return max(64, -(-(_RECORD_HEAD_BYTES + key_bytes) // 8) * 8)


def directory_bytes(slots: int, key_bytes: int = 36) -> int:
    """Return what the directory of all groups' slots takes at a region's end, whole 4 KiB pages.

    See docs/directory.md.
    """
    each = directory_record_bytes(key_bytes) + DIRECTORY_TOUCH_BYTES
    return -(-(DIRECTORY_HEADER_BYTES + slots * each) // _PAGE_BYTES) * _PAGE_BYTES


def _group(index: int, document: Any) -> Group:
    where = f"layout: groups[{index}]"
    if not isinstance(document, Mapping):
        raise BadInputError(f"{where} is not an object", remedy=_REMEDY)
    missing = [n for n in ("name", "slots", "slot_bytes", "offset_bytes") if n not in document]
    if missing:
        raise BadInputError(f"{where} lacks {', '.join(missing)}", remedy=_REMEDY)
    if not isinstance(document["name"], str):
        raise BadInputError(f"{where}: name is not a string", remedy=_REMEDY)
    return Group(
        document["name"],
        document["slots"],
        document["slot_bytes"],
        document["offset_bytes"],
        document.get("window_tokens"),
        document.get("kind", ATTENTION),
    )


def _whole(number: object, what: str, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        raise BadInputError(f"{what} is {number!r}: a whole number, {least} to {most}")
