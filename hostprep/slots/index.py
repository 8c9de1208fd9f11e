"""Which slot holds which content: a hash table in flat arrays, which never grows.

A dict of a million entries rebuilds itself now and then, 30 to 50 ms at a time, and its keys are
a million objects for the garbage collector's lists; this has a fixed size and no objects. Chains
hang off twice as many buckets as there are slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from struct import Struct

from hostprep.errors import BadInputError
from hostprep.slots.runs import runs

__all__ = ["HashIndex"]

MAX_SLOTS = (1 << 31) - 2
"""Slots are counted in 32 bits."""
_SLOT = (1 << 32) - 1
_TAG = (1 << 63) - (1 << 32)


class HashIndex:
    """At most one key a slot; a key may be at several slots (`find_all`). Not thread-safe.

    Keys are bytes of one length: the caller has checked it, and `find` would take a shorter key
    for a prefix.
    """

    def __init__(self, slots: int, key_bytes: int) -> None:
        """Make an empty one. Raises BadInputError for slots or keys of a senseless number."""
        if not 0 < slots <= MAX_SLOTS:
            raise BadInputError(f"a group has {slots} slots: it must be 1 to {MAX_SLOTS}")
        if key_bytes < 1:
            raise BadInputError(f"hash_bytes is {key_bytes}: a hash has at least one byte")
        buckets = 1 << (2 * slots - 1).bit_length()
        self._mask = buckets - 1
        self._heads = array("q", [-1]) * buckets
        """The bucket's latest entry: a slot, and bits of its key's hash, so that other keys of
        the bucket are passed by without a look at them; -1 for none."""
        self._chain = array("q", [-1]) * slots
        """By slot: the bucket's next entry."""
        self._bucket = array("i", [-1]) * slots
        """The slot's bucket; -1 where it has no key."""
        self._width = key_bytes
        self._keys = bytearray(slots * key_bytes)
        self._pack = Struct(f"{key_bytes}s").pack_into

    def find(
        self, keys: Sequence[bytes], *, until_missing: bool = False
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return a slot for each key, -1 where none has it; and which of them lie in a row.

        A row is the number of its first key, the first slot, and how many they are.
        The next key is looked for in the next slot first: keys that were inserted together are
        compared at once, without a look at their buckets. `until_missing` ends with the first key
        that no slot has.
        """
        heads, chain, mask, width = self._heads, self._chain, self._mask, self._width
        same = self._keys.startswith
        found: list[int] = []
        rows = []
        rest = iter(keys)
        for key in rest:
            digest = hash(key)
            entry = heads[digest & mask]
            while entry >= 0 and (
                (entry ^ digest) & _TAG or not same(key, (entry & _SLOT) * width)
            ):
                entry = chain[entry & _SLOT]
            if entry < 0:
                found.append(-1)
                if until_missing:
                    break
                continue
            slot = entry & _SLOT
            more = self._in_a_row(keys, len(found) + 1, slot + 1)
            rows.append((len(found), slot, 1 + more))
            found.extend(range(slot, slot + 1 + more))
            if more:
                next(islice(rest, more, more), None)  # skips as many
        return found, rows

    def _in_a_row(self, keys: Sequence[bytes], number: int, slot: int) -> int:
        """Return how many of the keys from that one on are in slots from this one on."""
        same, width = self._keys.startswith, self._width
        if number == len(keys) or not same(keys[number], slot * width):  # also beyond the last slot
            return 0
        low, high = 1, min(len(keys) - number, len(self._bucket) - slot)
        step = 1
        while low < high:  # the first `low` are there, and not more than `high`
            step = min(step, high - low)
            more = b"".join(keys[number + low : number + low + step])
            if same(more, (slot + low) * width):
                low += step
                step *= 2
            else:
                high = low + step - 1
                step = (step + 1) // 2
        held = self._bucket[slot : slot + low]
        return held.index(-1) if -1 in held else low  # what was removed leaves its bytes behind

    def find_all(self, key: bytes, limit: int) -> list[int]:
        """Return at most `limit` of the slots that have the key, the latest first."""
        entry = self._heads[hash(key) & self._mask]
        found: list[int] = []
        while entry >= 0 and len(found) < limit:
            slot = entry & _SLOT
            if self._keys.startswith(key, slot * self._width):
                found.append(slot)
            entry = self._chain[slot]
        return found

    def insert(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Give each slot, which must have none, its key."""
        heads, chain, bucket, mask = self._heads, self._chain, self._bucket, self._mask
        buckets = []
        for key, slot in zip(keys, slots):
            digest = hash(key)
            at = digest & mask
            chain[slot] = heads[at]
            heads[at] = digest & _TAG | slot
            buckets.append(at)
        width, done = self._width, 0
        stretches = runs(slots)
        if stretches is None:
            content, pack = self._keys, self._pack
            for key, at, slot in zip(keys, buckets, slots):
                bucket[slot] = at
                pack(content, slot * width, key)
            return
        for first, end in stretches:
            begin, done = done, done + end - first
            bucket[first:end] = array("i", buckets[begin:done])
            self._keys[first * width : end * width] = b"".join(keys[begin:done])

    def remove(self, slots: Sequence[int]) -> int:
        """Take the slots' keys away, where they have one. Returns how many had."""
        heads, chain, bucket = self._heads, self._chain, self._bucket
        removed = 0
        for slot in slots:
            at = bucket[slot]
            if at < 0:
                continue
            before = heads[at] & _SLOT
            if before == slot:
                heads[at] = chain[slot]
            else:
                while chain[before] & _SLOT != slot:
                    before = chain[before] & _SLOT
                chain[before] = chain[slot]
            bucket[slot] = -1
            removed += 1
        return removed

    def keys(self, slots: Sequence[int]) -> list[bytes]:
        """Return the keys of those of the slots that have one."""
        content, width, bucket = memoryview(self._keys), self._width, self._bucket
        return [bytes(content[s * width : s * width + width]) for s in slots if bucket[s] >= 0]

    def key_of(self, slot: int) -> bytes:
        """Return the key of a slot that has one."""
        return self.keys((slot,))[0]

    @property
    def memory_bytes(self) -> int:
        """What the arrays take."""
        arrays = (self._heads, self._chain, self._bucket)
        return sum(a.itemsize * len(a) for a in arrays) + len(self._keys)
