"""Which layout each region is published with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hostprep.api.slot_layout import SlotLayout, layout_text
from hostprep.node.facts import RegionFacts

__all__ = ["layout_of", "right_layouts"]


def layout_of(region: RegionFacts, sizing: SlotLayout | None) -> dict[str, Any] | None:
    """Return the layout that a region is to be published with.

    A leased one keeps what it has: the ranks that join its holder must read what that read.
    One that is too small (leased when the pool was sized anew) has none.
    """
    if region.leased and region.layout:
        kept: dict[str, Any] = json.loads(region.layout)
        return kept
    if sizing is None or region.size_bytes < sizing.size_bytes:
        return None
    return sizing.to_json()


def right_layouts(regions: Iterable[RegionFacts], sizing: SlotLayout | None) -> bool:
    """Tell whether all regions are published with the layouts that they are to have."""
    return all(region.layout == layout_text(layout_of(region, sizing)) for region in regions)
