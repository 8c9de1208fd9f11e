"""How every region of a sized pool is divided: groups of equal slots, one behind the other.

It becomes the handoff's `layout`, which `hostprep.slots` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hostprep.backing import MIB
from hostprep.layout import Group, Layout, directory_bytes

GROUP_ALIGN_BYTES = 2 * MIB
"""Where groups begin: on a page of every backing but 1 GiB ones, whose padding would be dearer
than the group; registering in pieces may then end between two groups."""
SLOT_ALIGN_BYTES = 512
"""What slots are rounded up to: a sector, for those who write them to disks past the page cache,
and more than copy engines want."""
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """The groups with their places, and what they were sized for."""

    layout: Layout
    min_slots: tuple[int, ...]
    """Of each group; with fewer, a scheduler that serves as many requests as it may can wait for
    ever."""
    model: str = ""
    """For people."""
    has_directory: bool = False
    """Whether each region has room behind the slots for the directory of blocks."""
    integration: str = ""
    """What divides the regions itself, as `hostprep exec --engine` calls it; empty: the groups do.

    The groups then say what it has of blocks, and not where in the region they lie."""
    regions_per_engine: int | None = None
    """Regions that one engine claims; None where nobody has said so."""
    least_bytes: int = 0
    """Bytes that a region has at least, whatever its groups take."""

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        *,
        tokens_per_block: int,
        min_slots: Sequence[int] = (),
        model: str = "",
        has_directory: bool = False,
        integration: str = "",
        regions_per_engine: int | None = None,
        least_bytes: int = 0,
    ) -> SlotLayout:
        """Put the groups one behind the other, each on a page's beginning, their slots on sectors.

        Without `min_slots` each group needs one. Raises BadInputError naming the field for what no
        group can be.
        """
        placed: list[Group] = []
        end = 0
        for group in groups:
            placed.append(
                replace(
                    group,
                    slot_bytes=round_up(group.slot_bytes, SLOT_ALIGN_BYTES),
                    offset_bytes=round_up(end, GROUP_ALIGN_BYTES),
                )
            )
            end = placed[-1].end_bytes
        return cls(
            layout=Layout(tokens_per_block, tuple(placed)),
            min_slots=tuple(min_slots) or (1,) * len(placed),
            model=model,
            has_directory=has_directory,
            integration=integration,
            regions_per_engine=regions_per_engine,
            least_bytes=least_bytes,
        )

    @property
    def size_bytes(self) -> int:
        """Where the last slot ends in the region."""
        return max(group.end_bytes for group in self.layout.groups)

    @property
    def directory_bytes(self) -> int:
        """What is left behind the slots, at the region's end, for keys of up to 40 bytes."""
        slots = sum(group.slots for group in self.layout.groups)
        return directory_bytes(slots) if self.has_directory else 0

    def region_bytes(self, page_bytes: int) -> int:
        """Return the size of a region of such pages that holds it, and its directory."""
        return round_up(max(self.size_bytes + self.directory_bytes, self.least_bytes), page_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as the handoff holds it."""
        claimed_by: dict[str, Any] = {}
        if self.integration:
            claimed_by["integration"] = self.integration
        if self.regions_per_engine is not None:
            claimed_by["regions_per_engine"] = self.regions_per_engine
        return {
            "version": _VERSION,
            "model": self.model,
            "tokens_per_block": self.layout.tokens_per_block,
            "size_bytes": self.size_bytes,
            **claimed_by,
            "groups": [
                {
                    "name": group.name,
                    "kind": group.kind,
                    "window_tokens": group.window_tokens,
                    "slot_bytes": group.slot_bytes,
                    "min_slots": least,
                    "slots": group.slots,
                    "offset_bytes": group.offset_bytes,
                }
                for group, least in zip(self.layout.groups, self.min_slots, strict=True)
            ],
        }


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not less."""
    return -(-number // multiple) * multiple


def layout_text(layout: Mapping[str, Any] | None) -> str:
    """Return a handoff's `layout` as text that is equal where the layout is; empty for none."""
    return "" if layout is None else json.dumps(layout, sort_keys=True, separators=(",", ":"))
