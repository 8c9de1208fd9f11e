"""The order in which slots are given away: a doubly linked list inside two arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from hostprep.slots.runs import runs

__all__ = ["EvictionOrder"]


class EvictionOrder:
    """Slots that nobody claims: free ones first, then the least recently released.

    A claimed slot is not in the list, so that nothing can evict it. Not thread-safe.
    """

    def __init__(self, slots: int) -> None:
        """All slots are in it, lowest first."""
        self._end = slots
        """The list's both ends: `newer[end]` is the oldest slot, `older[end]` the newest."""
        self._newer = array("i", range(1, slots + 1))
        self._newer.append(0)
        self._older = array("i", range(-1, slots))
        self._older[0] = slots
        self.count = slots

    def unlink(self, slots: Sequence[int]) -> None:
        """Take these out; all must be in, each once.

        What was released together is claimed together, later blocks lying before earlier ones:
        such runs are cut out at their two ends.
        """
        if not slots:
            return
        newer, older = self._newer, self._older
        first, end = slots[0], slots[-1] + 1
        self.count -= len(slots)
        if runs(slots) == [(first, end)] and older[first : end - 1] == array(
            "i", range(first + 1, end)
        ):
            before, after = older[end - 1], newer[first]
            newer[before] = after
            older[after] = before
            return
        after = newer[first]
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

    def prepend(self, slots: Iterable[int]) -> None:
        """Put these in as the next to be given away, the last of them first."""
        newer, older, end = self._newer, self._older, self._end
        first = newer[end]
        added = 0
        for slot in slots:
            older[first] = slot
            newer[slot] = first
            first = slot
            added += 1
        older[first] = end
        newer[end] = first
        self.count += added

    def take(self, count: int) -> list[int]:
        """Take out and return the oldest `count`, of which there must be as many."""
        newer, end = self._newer, self._end
        taken = []
        slot = newer[end]
        for _ in range(count):
            taken.append(slot)
            slot = newer[slot]
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
        return sum(a.itemsize * len(a) for a in (self._newer, self._older))
