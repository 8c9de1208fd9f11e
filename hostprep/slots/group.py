"""The slots of one group: what is in them, who claims them, which goes next."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Set

from hostprep.layout import ATTENTION, Group
from hostprep.slots.directory import Kept
from hostprep.slots.eviction import EvictionOrder, Ghosts
from hostprep.slots.index import Keys, index_for
from hostprep.slots.rows import FreeSlots, Listed, in_a_row, marks_of, runs, set_marks

MISSING = 0
PENDING = 1
"""A claim is writing it."""
READY = 2
ABANDONED = 3
"""Its writer released it unwritten, and others still claim it: the next one to ask writes it."""

_READY = bytes([READY])
_ONE_CLAIM = array("i", [1]).tobytes()
_WORTH_ROWS = 16
"""Slots from which looking for rows beats a loop."""


class SlotGroup:
    """Bulk steps over one group; each keeps what `check` says. Not thread-safe."""

    def __init__(self, group: Group, hash_bytes: int, spare: int) -> None:
        self.group = group
        self.spare = spare
        """Slots that are kept free, so that there are rows among them."""
        self.index = index_for(group.slots, hash_bytes)
        self.free = FreeSlots(group.slots)
        self.order = EvictionOrder(group.slots)
        self._ghosts = Ghosts(group.slots)
        self.order.weight = self._ghosts.weight
        self.refs = array("i", [0]) * group.slots
        self.state = bytearray(group.slots)
        self.has_all = group.kind == ATTENTION and group.window_tokens is None
        """Whether it keeps every block of a request."""
        self.gapless = self.has_all
        """Whether with every block all before it are there: behind a missing one, nothing is. True
        for as long as every claim holds its blocks from the first on: what is released together
        is evicted from its end, and what a claim holds is not."""
        self._restored = bytearray()
        """By slot, 1: it holds since `restore` what it did then; empty where none does."""
        self._may_gap = False
        """Blocks were written behind others that were not, and are claimed by their writers only:
        once one of those gives up, there is a gap."""

    def find(
        self, keys: Keys, *, until_missing: bool = False
    ) -> tuple[list[int], bytes, Sequence[int]]:
        """Return each key's slot, -1 for none, its state, and those slots that there are.

        With `until_missing` all behind the first that is missing count as missing too.
        """
        slots = self.index.find(keys, until_missing=until_missing)
        slots += [-1] * (keys.count - len(slots))
        missing = slots.count(-1)
        present = in_a_row(slots[: len(slots) - missing])
        if -1 not in present:
            return slots, marks_of(self.state, present) + bytes(missing), present
        present = Listed(slot for slot in slots if slot >= 0)
        return slots, bytes([self.state[s] if s >= 0 else MISSING for s in slots]), present

    def claim(self, slots: Sequence[int]) -> Sequence[int]:
        """Count one claim more for each: it cannot be evicted. Returns those that had none."""
        refs = self.refs
        first: list[int] = []
        stretches = runs(slots)
        if stretches is None:
            return self._claim_each(slots)
        for a, b in stretches:
            if refs[a:b].tobytes().strip(b"\0"):
                first += self._claim_each(range(a, b))
            else:
                refs[a:b] = array("i", [1]) * (b - a)
                if len(stretches) == 1:
                    return slots
                first += range(a, b)
        return first

    def _claim_each(self, slots: Iterable[int]) -> list[int]:
        refs = self.refs
        first = []
        for slot in slots:
            before = refs[slot]
            refs[slot] = before + 1
            if not before:
                first.append(slot)
        return first

    def unclaim(self, slots: Sequence[int]) -> Sequence[int]:
        """Take one claim back from each. Returns those that have none left."""
        refs = self.refs
        # A range ascends; what a claim releases is a list that descends.
        ascending = slots if isinstance(slots, range) else in_a_row(slots[::-1])
        rows = runs(ascending) if len(slots) >= _WORTH_ROWS else None
        if rows is not None and all(refs[a:b].tobytes() == _ONE_CLAIM * (b - a) for a, b in rows):
            for a, b in rows:
                refs[a:b] = array("i", [0]) * (b - a)
            return slots
        idle = []
        for slot in slots:
            left = refs[slot] - 1
            refs[slot] = left
            if not left:
                idle.append(slot)
        return idle

    def hold(self, first: Sequence[int], present: Sequence[int]) -> None:
        """Take newly claimed slots out of the order of eviction.

        All those that a request found count as used again.
        """
        self.order.unlink(first)
        set_marks(self.order.again, present, 1)

    @property
    def available(self) -> int:
        """Unclaimed slots."""
        return self.free.count + self.order.count

    def empty(self, slots: Sequence[int]) -> None:
        """Forget what is in unclaimed slots and that are not in the order."""
        self.index.forget(slots)
        self.mark(slots, MISSING)
        self.free.give(slots)
        if self._restored:
            set_marks(self._restored, slots, 0)
        if self.free.count == self.group.slots:
            self.gapless, self._may_gap = self.has_all, False

    def remember(self, evicted: Sequence[int]) -> None:
        """Note slots that are about to be emptied to make room."""
        marks = marks_of(self.order.again, evicted)
        again = marks.count(1)
        chosen = self.index.sampled(evicted, self._ghosts.sampled)
        keys = zip(self.index.keys(chosen), map(self.order.again.__getitem__, chosen))
        self._ghosts.remember((len(evicted) - again, again), keys)

    def fill(self, keys: Keys, slots: Sequence[int]) -> None:
        """Give slots that were free their contents' names: claimed once, being written."""
        self.index.insert(keys, slots)
        self.claim(slots)
        self.mark(slots, PENDING)
        set_marks(self.order.again, slots, 0)

    def returned(self, keys: Keys) -> int:
        """Learn from what one request is to write; return how many of it count as used again."""
        count = self._ghosts.returned(keys)
        if count:
            self.order.weight = self._ghosts.weight
        return count

    def written(self, slots: Sequence[int]) -> None:
        """Mark the contents as written: others match them from now on."""
        self.index.settle(slots)
        self.mark(slots, READY)

    def restore(self, kept: Kept) -> None:
        """Fill an empty group with contents that are there.

        Slots that were being written are neither handed out nor matched: give them back to `free`.
        """
        slots = in_a_row(kept.places)
        self.free.withhold(slots)
        self.free.withhold(Listed(kept.writing))
        self.index.restore(kept.slots, slots, kept.joined)
        self.mark(slots, READY)
        self.order.restore(kept.order, kept.again)
        self.gapless = self.gapless and not slots
        self._restored = bytearray(self.state)  # READY marks those: any but 0

    def restored_keys(self) -> list[bytes]:
        """Return the keys of what `restore` found and is there since then."""
        slots = [slot for slot, mark in enumerate(self._restored) if mark]
        if not slots:
            self._restored = bytearray()
        return self.index.keys(in_a_row(slots))

    def mark(self, slots: Sequence[int], state: int) -> None:
        """Set the slots' state."""
        set_marks(self.state, slots, state)

    def settle(self, idle: Sequence[int]) -> None:
        """Make unclaimed slots evictable, in this order.

        What never was written is forgotten.
        """
        states = marks_of(self.state, in_a_row(idle[::-1]))
        if states.count(READY) == len(idle):
            self.order.append(idle)
            return
        states = states[::-1]
        self.order.append([s for s, state in zip(idle, states) if state == READY])
        self.empty([s for s, state in zip(idle, states) if state != READY])
        self.gapless = self.gapless and not self._may_gap

    def touch(self, slots: Sequence[int]) -> None:
        """Make these the newest, the first of them newest of all; -1 and claimed ones stay."""
        refs, state = self.refs, self.state
        idle = [s for s in slots if s >= 0 and not refs[s] and state[s] == READY]
        if idle:
            self.order.unlink(in_a_row(idle))
            self.order.append(idle[::-1])
            self.gapless = False  # a block may now be evicted before those behind it

    def note_gaps(self, blocks: Sequence[int]) -> None:
        """Note the order of a claim's blocks, before it releases their slots."""
        if self.gapless and READY in marks_of(self.state, blocks).lstrip(_READY):
            self._may_gap = True

    def recount(self, claimed: Iterable[Sequence[int]]) -> None:
        """Count the claims again; -1 is no slot."""
        refs = array("i", [0]) * self.group.slots
        for slots in claimed:
            for slot in slots:
                if slot >= 0:
                    refs[slot] += 1
        self.refs = refs

    def rebuild(self, writing: Set[int], withheld: Iterable[int]) -> None:
        """Make all the rest again, where a step may have been left half done: `recount` first.

        Of each slot its key, its state and when it was released are right at any moment, and its
        key's bytes change while it is free only. A slot's contents stay if they are claimed or
        written. `writing`: slots that claims are to write; `withheld`: neither free nor used.
        May itself be left half done, and be called again.
        """
        refs, count, width = self.refs, self.group.slots, self.index.key_bytes
        states = bytearray(count)
        found: dict[bytes, int] = {}
        names: list[bytes] = []
        claimed: list[int] = []
        for slot, key in self.index.items():
            is_ready = self.state[slot] == READY
            if refs[slot]:
                names.append(key)
                claimed.append(slot)
                states[slot] = READY if is_ready else PENDING if slot in writing else ABANDONED
            elif is_ready:
                found[key] = slot
        for key in names:
            found.pop(key, None)  # at two slots, where hashes are no chain
        cached = list(found.values())
        set_marks(states, in_a_row(cached), READY)
        index = type(self.index)(count, width)
        index.restore(found, in_a_row(cached), b"".join(found))
        index.insert(Keys(names, width), claimed)
        index.settle([slot for slot in claimed if states[slot] == READY])
        taken = bytearray(states)
        for slot in withheld:
            taken[slot] = 1
        self.index, self.state = index, states
        for slot in range(count) if self._restored else ():
            self._restored[slot] = self._restored[slot] and states[slot]
        self.order.rebuild(cached)
        self.free.restart(bytes(taken))
        # Released in another order, a block may be evicted before those behind it.
        self.gapless, self._may_gap = self.has_all and self.free.count == count, False

    @property
    def memory_bytes(self) -> int:
        """What the arrays take."""
        own = self.refs.itemsize * len(self.refs) + len(self.state) + self.free.memory_bytes
        return own + self.index.memory_bytes + self.order.memory_bytes
