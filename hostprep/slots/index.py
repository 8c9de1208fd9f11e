"""Which slot holds which content: a dict for few slots, for many a hash table in flat arrays.

The table never grows. A dict of a million entries rebuilds itself now and then, 30 to 50 ms at a
time, and a slot takes five times the memory; this has a fixed size and no objects. Chains hang off
four times as many buckets as there are slots, so that few have a second entry.

A read at a random place of a table of this size costs as much as many steps of Python. So a key
gets its entry when its content is there, not when a claim begins to write it (`settle`), and
loses it when the slot gets another one, not when it is evicted (`forget`).
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, compress, repeat
from operator import itemgetter
from struct import Struct

from hostprep.errors import BadInputError
from hostprep.layout import MAX_SLOTS
from hostprep.slots.rows import marks_of, runs, set_marks

_SLOT = (1 << 31) - 1
_MORE = 1 << 31
"""There may be an entry behind this one."""
_LOW = _MORE | _SLOT
_HASH = (1 << 63) - (1 << 32)
_MOST_AT_ONCE = 512
_WORTH_A_TRY = 4
"""Slots in a row after which another row is looked for at once."""
_SETTLED = 1
_YOUNG = 2
_RESTORED = 3
_DICT_SLOTS = 1 << 16
"""Up to so many a dict serves: it rebuilds itself within some milliseconds."""


class Keys:
    """Keys, and their bytes side by side: one row of keys is compared with another at once."""

    __slots__ = ("_joined", "count", "keys", "width")

    def __init__(self, keys: Sequence[bytes], width: int, joined: bytes | None = None) -> None:
        """All are bytes of that width: the caller has checked it."""
        self.keys = keys
        self.count = len(keys)
        self.width = width
        self._joined = joined

    @property
    def joined(self) -> bytes:
        """Their bytes side by side, made when they are first asked for."""
        if self._joined is None:
            self._joined = b"".join(self.keys)
        return self._joined

    def part(self, begin: int, end: int) -> Keys:
        """Return the keys of those numbers."""
        joined = self._joined and self._joined[begin * self.width : end * self.width]
        return Keys(self.keys[begin:end], self.width, joined)

    def chosen(self, numbers: Sequence[int]) -> Keys:
        """Return the keys of those numbers."""
        return Keys([self.keys[number] for number in numbers], self.width)


def index_for(slots: int, key_bytes: int) -> DictIndex | HashIndex:
    """Return an empty index. Raises BadInputError for an invalid number of slots or key bytes."""
    if not 0 < slots <= MAX_SLOTS:
        raise BadInputError(f"a group has {slots} slots: it must be 1 to {MAX_SLOTS}")
    if key_bytes < 1:
        raise BadInputError(f"hash_bytes is {key_bytes}: a hash has at least one byte")
    return (DictIndex if slots <= _DICT_SLOTS else HashIndex)(slots, key_bytes)


class DictIndex:
    """What HashIndex does, by a dict. At most one key a slot; of a key at several, the latest."""

    def __init__(self, slots: int, key_bytes: int) -> None:
        """Make an empty index."""
        self.key_bytes = key_bytes
        self._slots: dict[bytes, int] = {}
        self._keys = [b""] * slots
        """By slot; empty for none."""

    def find(self, keys: Keys, *, until_missing: bool = False) -> list[int]:
        """Return a slot for each key, -1 where none has it: with `until_missing` up to there."""
        found = list(map(self._slots.get, keys.keys, repeat(-1)))
        return found[: found.index(-1) + 1] if until_missing and -1 in found else found

    def slot_of(self, key: bytes) -> int:
        """Return the slot that has the key, -1 for none."""
        return self._slots.get(key, -1)

    def insert(self, keys: Keys, slots: Sequence[int]) -> None:
        """Give each slot, which must have none, its key."""
        self._slots.update(zip(keys.keys, slots))
        own = self._keys
        for slot, key in zip(slots, keys.keys):
            own[slot] = key

    def restore(self, found: dict[bytes, int], slots: Sequence[int], joined: bytes) -> None:
        """Fill an empty index; `slots` are those of `found`, `joined` its keys side by side."""
        del joined
        self.insert(Keys(list(found), self.key_bytes), slots)

    def settle(self, slots: Sequence[int]) -> None:
        """Note that keys are there to stay: nothing changes here."""

    def forget(self, slots: Sequence[int]) -> None:
        """Take the slots' keys away, where they have one."""
        own, found = self._keys, self._slots
        for slot in slots:
            key = own[slot]
            if key:
                own[slot] = b""
                if found.get(key) == slot:  # another slot may have it, if hashes are no chain
                    del found[key]

    def keys(self, slots: Sequence[int]) -> list[bytes]:
        """Return the keys of those of the slots that have one."""
        return [key for key in map(self._keys.__getitem__, slots) if key]

    def items(self) -> Iterator[tuple[int, bytes]]:
        """Return each slot that has a key, in ascending order, and its key."""
        return ((slot, key) for slot, key in enumerate(self._keys) if key)

    def sampled(self, slots: Sequence[int], chosen: bytes) -> Sequence[int]:
        """Return those of the slots whose keys' first bytes are `chosen`: 1 in that map."""
        return slots if 0 not in chosen else [s for s in slots if chosen[self._keys[s][0]]]

    def key_of(self, slot: int) -> bytes:
        """Return the key of a slot that has one."""
        return self._keys[slot]

    @property
    def memory_bytes(self) -> int:
        """What it takes, keys included."""
        key_bytes = sys.getsizeof(bytes(self.key_bytes)) + sys.getsizeof(1)
        return sys.getsizeof(self._slots) + sys.getsizeof(self._keys) + key_bytes * len(self._slots)


class HashIndex:
    """At most one key a slot; a key may be at several slots (`find_all`). Not thread-safe.

    Keys are bytes of one length: the caller has checked it. An entry is a number: a slot, `_MORE`,
    and bits of its key's hash, so that other keys of the bucket are skipped without reading them.
    """

    def __init__(self, slots: int, key_bytes: int) -> None:
        """Make an empty index."""
        buckets = 1 << (4 * slots - 1).bit_length()
        self._mask = buckets - 1
        self._heads = array("q", [-1]) * buckets
        """The bucket's latest entry; -1 for none."""
        self._chain = array("q", [-1]) * slots
        """By slot: the bucket's next entry, -1 for none."""
        self._bucket = array("q", [-1]) * slots
        """By slot: the bucket that its entry is in, be it out of date; -1 for none."""
        self._held = bytearray(slots)
        """By slot: whether it has a key, and where that is found; 0 for none. What was forgotten
        leaves its bytes and its entry behind."""
        self._young: dict[bytes, int] = {}
        """Slots of keys that have no entry yet."""
        self._restored: dict[bytes, int] = {}
        """Slots of keys that were there from the start, and have no entry. It only shrinks: it
        never rebuilds itself."""
        self._width = self.key_bytes = key_bytes
        self._keys = bytearray(slots * key_bytes)
        self._pack = Struct(f"{key_bytes}s").pack_into
        self._unpack = Struct(f"{key_bytes}s").iter_unpack

    def find(self, keys: Keys, *, until_missing: bool = False) -> list[int]:
        """Return a slot for each key, -1 where none has it.

        The next key is looked for in the next slot first: keys that were inserted together are
        compared at once, without reading their buckets. `until_missing` ends with the first key
        that no slot has.
        """
        found: list[int] = []
        ahead = 1
        while len(found) < keys.count:
            found += self._slots_of(keys.keys[len(found) : len(found) + ahead])
            if until_missing and -1 in found:
                return found[: found.index(-1) + 1]
            following, count = found[-1] + 1, 0
            if following:
                count = self._in_a_row(keys, len(found), following)
                found += range(following, following + count)
            ahead = 1 if count >= _WORTH_A_TRY else min(4 * ahead, _MOST_AT_ONCE)
        return found

    def slot_of(self, key: bytes) -> int:
        """Return the slot that has the key, -1 for none."""
        return self._slots_of((key,))[0]

    def _slots_of(self, keys: Sequence[bytes]) -> list[int]:
        mask = self._mask
        digests = list(map(hash, keys))
        entries = _gather(self._heads, [digest & mask for digest in digests])
        young = self._young
        slots = list(map(young.get, keys, repeat(-1))) if young else [-1] * len(keys)
        if self._restored:
            slots = list(map(max, slots, map(self._restored.get, keys, repeat(-1))))
        for number in [number for number, entry in enumerate(entries) if entry >= 0]:
            entry, digest = entries[number], digests[number]
            if slots[number] < 0 and (entry & _MORE or not (entry ^ digest) & _HASH):
                slots[number] = self._slot_of(keys[number], entry, digest)
        return slots

    def _slot_of(self, key: bytes, entry: int, digest: int) -> int:
        """Return the slot that has the key, from that entry of its bucket on; -1 for none."""
        held, same, width = self._held, self._keys.startswith, self._width
        while entry >= 0:
            slot = entry & _SLOT
            if not (entry ^ digest) & _HASH and held[slot] and same(key, slot * width):
                return slot
            entry = self._chain[slot] if entry & _MORE else -1
        return -1

    def _in_a_row(self, keys: Keys, number: int, slot: int) -> int:
        """Return how many of the keys from that one on are in slots from this one on."""
        same, width, joined = self._keys.startswith, self._width, keys.joined
        begin, at = number * width, slot * width
        low, step = 0, 1
        high = min(keys.count - number, len(self._held) - slot)
        while low < high:  # the first `low` are there, and not more than `high`
            step = min(step, high - low)
            done = low * width
            if same(joined[begin + done : begin + done + step * width], at + done):
                low += step
                step *= 2
            else:
                high = low + step - 1
                step = (step + 1) // 2
        gap = self._held.find(0, slot, slot + low)
        return low if gap < 0 else gap - slot

    def find_all(self, key: bytes, limit: int) -> list[int]:
        """Return at most `limit` of the slots that have the key, the latest first."""
        digest = hash(key)
        entry = self._heads[digest & self._mask]
        found: list[int] = []
        while entry >= 0 and len(found) < limit:
            slot = entry & _SLOT
            if self._held[slot] and self._keys.startswith(key, slot * self._width):
                found.append(slot)
            entry = self._chain[slot] if entry & _MORE else -1
        return found

    def insert(self, keys: Keys, slots: Sequence[int]) -> None:
        """Give each slot, which must have none, its key, which no slot has."""
        self._young.update(zip(keys.keys, slots))
        self._put(keys, slots)
        set_marks(self._held, slots, _YOUNG)

    def _put(self, keys: Keys, slots: Sequence[int]) -> None:
        content, width, done = self._keys, self._width, 0
        rows = runs(slots)
        if rows is None:
            for key, slot in zip(keys.keys, slots):
                self._pack(content, slot * width, key)
            return
        for first, end in rows:
            begin, done = done, done + (end - first) * width
            content[first * width : end * width] = keys.joined[begin:done]

    def restore(self, found: dict[bytes, int], slots: Sequence[int], joined: bytes) -> None:
        """Fill an empty index with keys that are there to stay, `joined`; `slots` are theirs.

        They have no entries, which would take longer than all else at a restart: the dict is
        there already, and kept as it is.
        """
        self._put(Keys(list(found), self._width, joined), slots)
        self._restored = found
        set_marks(self._held, slots, _RESTORED)

    def settle(self, slots: Sequence[int]) -> None:
        """Make entries for keys that were inserted and are there to stay."""
        self._unlink(slots)
        keys = self.keys(slots)
        deque(map(self._young.pop, keys, repeat(None)), 0)
        self._link(list(map(hash, keys)), slots)

    def _link(self, digests: Sequence[int], slots: Sequence[int]) -> None:
        """Make the slots' entries; they must have none."""
        heads, links, mask = self._heads, self._chain, self._mask
        buckets = [digest & mask for digest in digests]
        for slot, bucket, digest in zip(slots, buckets, digests):
            before = heads[bucket]
            if before < 0:
                heads[bucket] = digest & _HASH | slot
            else:
                heads[bucket] = digest & _HASH | slot | _MORE
                links[slot] = before
        self._enter(slots, buckets)
        set_marks(self._held, slots, _SETTLED)

    def forget(self, slots: Sequence[int]) -> None:
        """Take the slots' keys away, where they have one.

        Their entries stay until the slots have others, and are passed by: their slots have no key
        or another one.
        """
        held = marks_of(self._held, slots)
        if _YOUNG in held:
            for key in self.keys([s for s, flag in zip(slots, held) if flag == _YOUNG]):
                self._young.pop(key, None)  # another slot may have it, if hashes are no chain
        if _RESTORED in held:
            for key in self.keys([s for s, flag in zip(slots, held) if flag == _RESTORED]):
                del self._restored[key]
            if not self._restored:
                self._restored = {}  # an empty dict keeps the table of a large one
        set_marks(self._held, slots, 0)

    def remove(self, slots: Sequence[int]) -> None:
        """Forget the keys, and remove their entries at once."""
        self.forget(slots)
        self._unlink(slots)
        self._enter(slots, [-1] * len(slots))

    def _unlink(self, slots: Sequence[int]) -> None:
        """Remove the slots' entries, where they have one: `_enter` what they have then."""
        heads, own, rows = self._heads, self._bucket, runs(slots)
        buckets = array("q")
        if rows is None:
            buckets.extend(map(own.__getitem__, slots))
        for first, end in rows or ():
            buckets += own[first:end]
        for slot, bucket, head in zip(slots, buckets, _gather(heads, buckets)):
            if head & _LOW == slot:  # and none behind it
                heads[bucket] = -1
            elif bucket >= 0:
                self._unchain(slot, bucket)

    def _enter(self, slots: Sequence[int], buckets: Sequence[int]) -> None:
        own, rows, done = self._bucket, runs(slots), 0
        if rows is None:
            for slot, bucket in zip(slots, buckets):
                own[slot] = bucket
        for first, end in rows or ():
            begin, done = done, done + end - first
            own[first:end] = array("q", buckets[begin:done])

    def _unchain(self, slot: int, bucket: int) -> None:
        """Take the slot's entry out of a bucket that has others, or had."""
        heads, links = self._heads, self._chain
        before = heads[bucket]
        if before & _SLOT == slot:
            heads[bucket] = links[slot] if before & _MORE else -1
            return
        while True:
            previous = before & _SLOT
            before = links[previous]
            if before & _SLOT == slot:
                links[previous] = links[slot] if before & _MORE else -1
                return

    def keys(self, slots: Sequence[int]) -> list[bytes]:
        """Return the keys of those of the slots that have one."""
        content, width, held, rows = memoryview(self._keys), self._width, self._held, runs(slots)
        if rows is None:
            return [bytes(content[s * width : s * width + width]) for s in slots if held[s]]
        keys: list[bytes] = []
        for first, end in rows:
            some = chain.from_iterable(self._unpack(content[first * width : end * width]))
            keys += compress(some, held[first:end])
        return keys

    def items(self) -> Iterator[tuple[int, bytes]]:
        """Return each slot that has a key, in ascending order, and its key."""
        keys = chain.from_iterable(self._unpack(self._keys))
        return compress(enumerate(keys), self._held)

    def sampled(self, slots: Sequence[int], chosen: bytes) -> Sequence[int]:
        """Return those of the slots whose keys' first bytes are `chosen`: 1 in that map."""
        if 0 not in chosen:
            return slots
        content, width, rows = self._keys, self._width, runs(slots)
        if rows is None:
            return [slot for slot in slots if chosen[content[slot * width]]]
        found: list[int] = []
        for first, end in rows:
            marks = content[first * width : end * width : width].translate(chosen)
            found += compress(range(first, end), marks)
        return found

    def key_of(self, slot: int) -> bytes:
        """Return the key of a slot that has one."""
        return self.keys((slot,))[0]

    @property
    def memory_bytes(self) -> int:
        """What the arrays take."""
        arrays = (self._heads, self._chain, self._bucket)
        return sum(a.itemsize * len(a) for a in arrays) + len(self._held) + len(self._keys)


def _gather(values: array[int], at: Sequence[int]) -> Sequence[int]:
    return itemgetter(*at)(values) if len(at) > 1 else [values[i] for i in at]
