"""A pool's sizing as the resource has it, made the layout that every region gets."""

from __future__ import annotations

from hostprep.api.pool_model import Sizing
from hostprep.api.slot_layout import SizedGroup, SlotLayout

__all__ = ["slot_layout_of"]


def slot_layout_of(sizing: Sizing) -> SlotLayout:
    """Put the groups in their places; what they are was checked with the resource."""
    return SlotLayout.of(
        (
            SizedGroup(
                name=group.name,
                slot_bytes=group.slot_bytes,
                slots=group.slots,
                min_slots=group.min_slots,
                window_tokens=group.window_tokens,
                kind=group.kind.lower(),
            )
            for group in sizing.groups
        ),
        tokens_per_block=sizing.tokens_per_block,
        model=sizing.model or "",
    )
