"""Slots in rows: what was stored together lies together, and is worked on at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

_WORTH_IT = 8
"""Slots in a row, on average, from which slices of arrays beat loops."""

_TAKEN = b"\0"
_FREE = b"\1"
_FREE_WHERE_0 = _FREE + _TAKEN * 255
_LONG = 32
"""Shorter rows are left to grow, where there are others not far ahead."""
_AHEAD = 1 << 16
_AHEAD_EACH = 128
"""How many slots are looked through for long rows: so many, and so many for each one wanted. Where
there is none, all of the map would be looked through at each batch: milliseconds."""


class Listed(list[int]):
    """Slots that several steps use, and none changes: their runs are computed once."""

    runs: list[tuple[int, int]] | bool | None = False
    """The result of `runs`; False: not known yet. A cached_property takes a lock."""


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
    if isinstance(slots, range):
        if slots.step != 1:
            raise ValueError(f"{slots} does not ascend in steps of 1")
        return [(slots.start, slots.stop)]
    if not isinstance(slots, Listed):
        return _runs(slots)
    found = slots.runs
    if isinstance(found, bool):
        found = slots.runs = _runs(slots)
    return found


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


def marks_of(marks: bytearray, slots: Sequence[int]) -> bytes:
    """Return each slot's byte of a map."""
    rows = runs(slots)
    if rows is None:
        return bytes(map(marks.__getitem__, slots))
    return b"".join([marks[first:end] for first, end in rows])


def set_marks(marks: bytearray, slots: Sequence[int], mark: int) -> None:
    """Set each slot's byte of a map."""
    rows = runs(slots)
    if rows is None:
        for slot in slots:
            marks[slot] = mark
        return
    for first, end in rows:
        marks[first:end] = bytes([mark]) * (end - first)


class FreeSlots:
    """Free slots are taken in turn of their numbers, as a log is written. Not thread-safe.

    So what is stored at about the same time lies side by side, is evicted at about the same time,
    and leaves a row again. Were a slot used again as soon as it is free, blocks would end up
    scattered: 40 rows for 512 of them after twenty times a pool's slots.
    """

    def __init__(self, slots: int, long: int = _LONG) -> None:
        """All are free. `long`: slots in a row that are not left to grow."""
        self._free = bytearray(_FREE) * slots
        self._long = long
        self._next = 0
        self.count = slots

    def give(self, slots: Sequence[int]) -> None:
        """Put these in; none may be in."""
        self.count += len(slots)
        set_marks(self._free, slots, _FREE[0])

    def withhold(self, slots: Sequence[int]) -> None:
        """Take these out; all must be in."""
        self.count -= len(slots)
        set_marks(self._free, slots, _TAKEN[0])

    def restart(self, taken: bytes) -> None:
        """Have all in but those marked in a map of all slots: any byte but 0."""
        self._free = bytearray(taken.translate(_FREE_WHERE_0))
        self.count = self._free.count(_FREE)

    def take(self, count: int) -> Listed:
        """Take out and return that many, of which there must be as many, in ascending order."""
        taken = Listed()
        ahead = _AHEAD + _AHEAD_EACH * count
        for find in (partial(self._find_long, min(self._long, count), ahead), self._find_any):
            while len(taken) < count and (first := find()) >= 0:
                end = self._free.find(_TAKEN, first, first + count - len(taken))
                if end < 0:
                    end = min(first + count - len(taken), len(self._free))
                self._free[first:end] = _TAKEN * (end - first)
                taken += range(first, end)
                self._next = end
        self.count -= count
        taken.sort()  # the last ones may come before the first
        return taken

    def _find_long(self, least: int, ahead: int) -> int:
        """Return where the next row of at least that length begins; -1: not so far ahead."""
        row, end = _FREE * least, self._next + ahead
        first = self._free.find(row, self._next, end)
        beyond = end - len(self._free)
        if first < 0 < beyond:
            first = self._free.find(row, 0, min(beyond, self._next + least - 1))
        return first

    def _find_any(self) -> int:
        """Return where the next row begins; -1 where there is none."""
        first = self._free.find(_FREE, self._next)
        return first if first >= 0 else self._free.find(_FREE)

    @property
    def memory_bytes(self) -> int:
        """What the map takes."""
        return len(self._free)
