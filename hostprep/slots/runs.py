"""Slots in a row: what was stored together lies together, and is worked on at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

__all__ = ["Listed", "in_a_row", "runs"]

_WORTH_IT = 8
"""Slots in a row, on average, from which slices of arrays beat loops."""


class Listed(list[int]):
    """Slots that several steps work on, and none changes: their runs are looked for once."""

    @cached_property
    def runs(self) -> list[tuple[int, int]] | None:
        """What `runs` says of them."""
        return _runs(self)


def in_a_row(slots: Sequence[int]) -> Sequence[int]:
    """Return consecutive slots as a range, others as a list that knows its runs."""
    count = len(slots)
    if isinstance(slots, range):
        return slots
    if count and slots[-1] - slots[0] == count - 1:
        row = range(slots[0], slots[0] + count)
        if slots == list(row):
            return row
    return Listed(slots)


def runs(slots: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return first and end of each stretch of consecutive slots; None where they are scattered."""
    if not slots:
        return []
    if isinstance(slots, range):  # always in steps of 1 here
        return [(slots.start, slots.stop)]
    return slots.runs if isinstance(slots, Listed) else _runs(slots)


def _runs(slots: Sequence[int]) -> list[tuple[int, int]] | None:
    count = len(slots)
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
