"""The order of eviction: a doubly linked list of unclaimed slots, inside of arrays.

`hostprep.slots.batch.evict` empties the oldest of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from hostprep.slots.rows import runs

_FEW = 8
"""Slots that are worth trying to take at once."""


class EvictionOrder:
    """Unclaimed slots with contents, the least recently released first.

    A claimed slot is not in the list, so that nothing can evict it. Not thread-safe.
    """

    def __init__(self, slots: int) -> None:
        """None of the slots is in it."""
        self._end = slots
        """The list's both ends: `newer[end]` is the oldest slot, `older[end]` the newest."""
        self._newer = array("i", [slots]) * (slots + 1)
        self._older = array("i", [slots]) * (slots + 1)
        self._down = array("i", range(-1, slots))
        """Each slot's lower neighbour: what `_newer` is where a row was released, last first."""
        self.count = 0

    def unlink(self, slots: Sequence[int]) -> None:
        """Take these out; all must be in, each once.

        What was released together is claimed together, later blocks lying before earlier ones:
        such runs are cut out at their two ends.
        """
        self.count -= len(slots)
        rows = runs(slots)
        if rows is None:
            self._unlink_each(slots)
            return
        newer, older, down = self._newer, self._older, self._down
        for first, end in rows:
            if older[first : end - 1] != down[first + 2 : end + 1]:
                self._unlink_each(range(first, end))
                continue
            before, after = older[end - 1], newer[first]
            newer[before] = after
            older[after] = before

    def _unlink_each(self, slots: Sequence[int]) -> None:
        newer, older = self._newer, self._older
        after = newer[slots[0]]
        for slot, following in zip(slots, [*slots[1:], -1]):
            before = older[slot]
            if before == following:
                continue
            newer[before] = after
            older[after] = before
            after = newer[following]  # after the last one: read in vain

    def append(self, slots: Iterable[int]) -> None:
        """Put these in as the newest, the last of them newest of all."""
        newer, older, end = self._newer, self._older, self._end
        last = older[end]
        added = 0
        for slot in slots:
            newer[last] = slot
            older[slot] = last
            last = slot
            added += 1
        newer[last] = end
        older[end] = last
        self.count += added

    def take(self, count: int) -> list[int]:
        """Take out and return the oldest `count`, of which there must be as many."""
        newer, down, end = self._newer, self._down, self._end
        taken: list[int] = []
        slot, step = newer[end], _FEW
        while len(taken) < count:
            left = count - len(taken)
            first = max(0, slot + 1 - min(step, left))
            if newer[first + 1 : slot + 1] == down[first + 1 : slot + 1]:
                taken += range(slot, first - 1, -1)
                slot = newer[first]
                step *= 2
                continue
            for _ in range(min(_FEW, left)):
                taken.append(slot)
                slot = newer[slot]
            step = max(_FEW, step // 2)
        newer[end] = slot
        self._older[slot] = end
        self.count -= count
        return taken

    def oldest_first(self) -> list[int]:
        """Return all, in the order in which they would be given away."""
        listed = []
        slot = self._newer[self._end]
        while slot != self._end:
            listed.append(slot)
            slot = self._newer[slot]
        return listed

    @property
    def memory_bytes(self) -> int:
        """What the arrays take."""
        return sum(a.itemsize * len(a) for a in (self._newer, self._older, self._down))
