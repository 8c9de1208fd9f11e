"""The order of eviction: what was used once goes before what was used again, unless it is younger.

Unclaimed slots are in two lists, inside of arrays: contents that no request has used since the one
that wrote them, and contents that others have used. In each list what was released last goes last.
Of the two lists' oldest slots, the one that was used again goes only where it is `Ghosts.weight`
times as old as the other one. With a weight of 1 that is LRU; with a large one, contents that are
never used again (scans) displace those that are only where there are no others.

Which weight is right depends on the load, and is learned: `Ghosts` remembers keys of what was
evicted lately from each list, as ARC does (Megiddo and Modha, FAST 2003). A key that comes back
says that its list was too short. Contents that come back count as used again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import compress

from hostprep.slots.index import Keys
from hostprep.slots.rows import in_a_row, marks_of, runs

_FEW = 8
"""Slots that are worth trying to take at once."""
_WORTH_ROWS = 16
"""Slots from which looking for rows beats a loop."""
_ONE = 256
"""A weight of 1: weights are whole numbers, so that comparisons of ages are exact."""
_RESTORED_STEPS = 1024
"""How many different ages restored slots have: a step for each slot would take a loop over all."""


class EvictionOrder:
    """Unclaimed slots with contents. Not thread-safe.

    A claimed slot is in no list, so that nothing can evict it. Where each request claims its blocks
    from the first on, a block is `again` if one behind it is, and released no earlier: then none
    goes before one behind it.
    """

    def __init__(self, slots: int) -> None:
        """None of the slots is in it."""
        self._ends = (slots, slots + 1)
        """Of the slots used once, and of those used again: `newer[end]` is the list's oldest slot,
        `older[end]` its newest."""
        self._newer = array("i", range(slots + 2))
        self._older = array("i", range(slots + 2))
        self._down = array("i", range(-1, slots))
        """Each slot's lower neighbour: what `_newer` is where a row was released, last first."""
        self._released = array("Q", [0]) * slots
        """When each slot was: how many had been before, itself and those with it included."""
        self._now = 0
        self.again = bytearray(slots)
        """By slot, 1: another request has used its contents since they were written, or they were
        written again soon after they were evicted. To be changed for claimed slots only."""
        self.weight = _ONE
        """256 times the age at which contents that were used again go like others."""
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

    def append(self, slots: Sequence[int]) -> None:
        """Put these in as the newest, the last of them newest of all."""
        self._now += len(slots)
        self.count += len(slots)
        if len(slots) < _WORTH_ROWS:
            self._append_each(slots)
            return
        ascending = in_a_row(slots[::-1])  # as a claim releases its blocks, the last first
        marks = marks_of(self.again, ascending)
        if len(set(marks)) == 1:
            self._append_rows(self._ends[marks[0]], ascending)
            return
        for again, end in enumerate(self._ends):
            some = [slot for slot, mark in zip(ascending, marks) if mark == again]
            self._append_rows(end, in_a_row(some))

    def _append_each(self, slots: Iterable[int]) -> None:
        newer, older, released, now = self._newer, self._older, self._released, self._now
        again, once = self.again, self._ends[0]
        for slot in slots:
            end = once + again[slot]
            last = older[end]
            newer[last] = older[end] = slot
            older[slot] = last
            newer[slot] = end
            released[slot] = now

    def _append_rows(self, end: int, ascending: Sequence[int]) -> None:
        """Put these at the end of one list, the first of them newest of all."""
        rows = runs(ascending)
        if rows is None:
            self._append_each(reversed(ascending))
            return
        newer, older, down = self._newer, self._older, self._down
        last = older[end]
        for first, stop in reversed(rows):
            newer[last] = stop - 1
            older[stop - 1] = last
            newer[first + 1 : stop] = down[first + 1 : stop]
            older[first : stop - 1] = down[first + 2 : stop + 1]
            self._released[first:stop] = array("Q", [self._now]) * (stop - first)
            last = first
        newer[last] = end
        older[end] = last

    def restore(self, slots: Sequence[int], again: bytes) -> None:
        """Fill an empty order; the first slot goes first of its list. `again`: as the attribute."""
        self.again[:] = again
        step = max(1, len(slots) // _RESTORED_STEPS)
        for begin in range(0, len(slots), step):
            self.append(slots[begin : begin + step])

    def rebuild(self, slots: Iterable[int]) -> None:
        """Make both lists again, of these slots, from when each was released.

        Of those released together the higher ones go first: a request's blocks ascend.
        """
        by_age = sorted(slots, reverse=True)
        by_age.sort(key=self._released.__getitem__)
        newer, older = self._newer, self._older
        for end in self._ends:
            newer[end] = older[end] = end
        for slot in by_age:
            end = self._ends[self.again[slot]]
            last = older[end]
            newer[last] = older[end] = slot
            older[slot] = last
            newer[slot] = end
        self.count = len(by_age)

    def take(self, count: int) -> list[int]:
        """Take out and return the `count` slots that go first, of which there must be as many."""
        taken, heads = self._first(count)
        for end, slot in zip(self._ends, heads):
            self._newer[end] = slot
            self._older[slot] = end
        self.count -= count
        return taken

    def _first(self, count: int) -> tuple[list[int], tuple[int, int]]:
        """Return the slots that go first, and both lists' oldest ones of the rest."""
        now, released = self._now, self._released
        once_end, again_end = self._ends
        once, again = self._newer[once_end], self._newer[again_end]
        taken: list[int] = []
        while len(taken) < count:
            left = count - len(taken)
            if again == again_end:
                once = self._walk(once, once_end, now, left, taken)
            elif once == once_end:
                again = self._walk(again, again_end, now, left, taken)
            else:
                least = -(-(now - released[again]) * _ONE // self.weight)
                if now - released[once] >= least:
                    once = self._walk(once, once_end, now - least, left, taken)
                else:
                    least = (now - released[once]) * self.weight // _ONE + 1
                    again = self._walk(again, again_end, now - least, left, taken)
        return taken, (once, again)

    def _walk(self, slot: int, end: int, latest: int, count: int, taken: list[int]) -> int:
        """Take at most so many slots of one list, from that one on, released at `latest` or before.

        Returns the one behind them.
        """
        newer, down, released = self._newer, self._down, self._released
        step, whole = _FEW, len(taken) + count
        while len(taken) < whole and slot != end and released[slot] <= latest:
            left = whole - len(taken)
            first = max(0, slot + 1 - min(step, left))
            if newer[first + 1 : slot + 1] == down[first + 1 : slot + 1] and (
                released[first] <= latest
            ):
                taken += range(slot, first - 1, -1)
                slot = newer[first]
                step *= 2
                continue
            for _ in range(min(_FEW, left)):
                taken.append(slot)
                slot = newer[slot]
                if slot == end:
                    break
            while released[taken[-1]] > latest:
                slot = taken.pop()
            step = max(_FEW, step // 2)
        return slot

    def oldest_first(self) -> list[int]:
        """Return all, in the order in which they would be given away."""
        return self._first(self.count)[0]

    @property
    def memory_bytes(self) -> int:
        """What the arrays take."""
        arrays = (self._newer, self._older, self._down, self._released)
        return sum(a.itemsize * len(a) for a in arrays) + len(self.again)


_SHARE = 10
"""Of each list as many evicted slots are remembered as a tenth of all."""
_LEAST = 8
_MOST_KEYS = 1 << 13
"""Of each list: of larger pools every second, fourth ... key is remembered, by its first byte, so
that the dicts rebuild themselves within a millisecond. Then a key stands for so many more."""
_STEP = 64.0
"""As many returns as a tenth of all slots change the weight by at most 6.4 powers of two:
it follows a load that changes within a turnover or two."""
_MOST_STEP = 0.125
_FIRST_LOG = 3.0
_MOST_LOG = 5.0


class Ghosts:
    """Keys of what was evicted lately, and the weight that their return has led to.

    Both lists' keys that are remembered are the last ones of an equal number of evictions: as many
    returns from each mean that a slot more would be worth the same to either list. Not thread-safe.
    """

    def __init__(self, slots: int) -> None:
        """For a pool of so many slots."""
        self._window = max(_LEAST, slots // _SHARE)
        self._every = 1
        while self._window > self._every * _MOST_KEYS and self._every < 256:
            self._every *= 2
        self.sampled = bytes([byte < 256 // self._every for byte in range(256)])
        """By a key's first byte, 1: it is remembered."""
        self._step = min(_MOST_STEP, _STEP * self._every / slots)
        self._log_weight = _FIRST_LOG
        self._evicted = [0, 0]
        """How many slots of each list were."""
        self._keys = (OrderedDict[bytes, int](), OrderedDict[bytes, int]())
        """By list: of each key, the oldest first, how many had been evicted with it. A plain dict
        looks for its first key behind all those that were deleted."""

    @property
    def weight(self) -> int:
        """256 times the weight: see `EvictionOrder.weight`."""
        return round(_ONE * 2**self._log_weight)

    def remember(self, counts: Sequence[int], keys: Iterable[tuple[bytes, int]]) -> None:
        """Note evictions: how many of each list, and those keys that are `sampled`.

        Each key with its list's number.
        """
        for again, count in enumerate(counts):
            self._evicted[again] += count
        for key, again in keys:
            self._keys[again][key] = self._evicted[again]
        for evicted, known in zip(self._evicted, self._keys):
            while known:
                oldest = next(iter(known))
                if known[oldest] > evicted - self._window:
                    break
                del known[oldest]

    def returned(self, keys: Keys) -> int:
        """Learn from contents that are stored (again).

        Returns how many of them, from the first on, count as used before: a request that stores a
        block again has used all those in front of it.
        """
        once, again = self._keys
        last = 0
        if not (once or again):
            return last
        numbers: Iterable[int] = range(keys.count)
        if self._every > 1:
            numbers = compress(numbers, keys.joined[:: keys.width].translate(self.sampled))
        for number in numbers:
            key = keys.keys[number]
            if once.pop(key, None) is not None:
                self._learn(-self._step)
                last = number + 1
            elif again.pop(key, None) is not None:
                self._learn(self._step)
                last = number + 1
        return last

    def _learn(self, change: float) -> None:
        self._log_weight = min(_MOST_LOG, max(0.0, self._log_weight + change))
