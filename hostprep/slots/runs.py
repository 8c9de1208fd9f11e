"""Slots in a row: what was stored together lies together, and is worked on at once."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["in_a_row", "runs"]

_WORTH_IT = 8
"""Slots in a row, on average, from which slices of arrays beat loops."""


def in_a_row(slots: Sequence[int]) -> Sequence[int]:
    """Return consecutive slots as a range, others as they are."""
    count = len(slots)
    if isinstance(slots, range) or not count or slots[-1] - slots[0] != count - 1:
        return slots
    row = range(slots[0], slots[0] + count)
    return row if slots == list(row) else slots


def runs(slots: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return first and end of each stretch of consecutive slots; None where they are scattered."""
    count = len(slots)
    if not count:
        return []
    if isinstance(slots, range):  # always in steps of 1 here
        return [(slots.start, slots.stop)]
    first = slots[0]
    found: list[tuple[int, int]] = []
    expected = first
    for slot in slots:
        if slot != expected:
            found.append((first, expected))
            if len(found) * _WORTH_IT > count:
                return None
            first = slot
        expected = slot + 1
    found.append((first, expected))
    return found
