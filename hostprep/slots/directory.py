"""Which slot holds which block, in the region's own last bytes: it outlives a killed engine.

The format is in docs/directory.md, byte by byte. A record is void before the first byte of its slot
changes (`begin`) and valid after the last one is there (`finish`), so that a process killed between
any two instructions leaves no record that vouches for other bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, replace
from itertools import chain, repeat
from operator import xor
from struct import Struct
from zlib import crc32

from hostprep.errors import BadInputError
from hostprep.layout import (
    DIRECTORY_HEADER_BYTES,
    DIRECTORY_TOUCH_BYTES,
    Layout,
    directory_bytes,
    directory_record_bytes,
)
from hostprep.slots.rows import runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER_BYTES = DIRECTORY_HEADER_BYTES
_MAGIC = b"HPBLOCKS"
_VERSION = 1
_HEADER = Struct("<8sIIIIQIII32s")
"""Magic, version, bytes of the header, of a record and of a key, records, epoch, identity's length
and check, the layout's digest. The header's own check (u32) follows."""
_CHECK = Struct("<I")
_IDENTITY_AT = 4096
MAX_IDENTITY_BYTES = HEADER_BYTES - _IDENTITY_AT
_HEAD = Struct("<BBHIIQ")
"""State, the key's length, flags, epoch, the contents' checksum, generation."""
_HAS_CHECKSUM = 1
"""The one flag: without it the contents' checksum is 0, and means nothing."""
_CHECKSUM_BYTES = 4
_GENERATION = Struct("<Q")
_STATE_AT = _CHECK.size
_KEY_AT = _CHECK.size + _HEAD.size
_GENERATION_AT = _KEY_AT - _GENERATION.size
_COUNTED_AT_ONCE = 1 << 16
_WRITING = 1
_VALID = 2
_TOUCH_BYTES = DIRECTORY_TOUCH_BYTES
_TICKS_A_SECOND = 4
_CLOCK_BEGAN_S = 1_735_689_600
"""2025-01-01: in quarters of a second, 31 bits last for 17 years."""
_LAST_TICK = (1 << 31) - 1
_MAX_KEY_BYTES = 255


@dataclass(frozen=True)
class Kept:
    """What the records of one group say."""

    slots: dict[bytes, int]
    """By key."""
    places: Sequence[int]
    """The same slots, in the dict's order."""
    joined: bytes
    """The dict's keys, side by side."""
    order: list[int]
    """The same slots, the one to be evicted first first."""
    writing: list[int]
    """Slots that were being written when the last process ended."""
    again: bytes
    """By slot of the group, 1: its contents had been used again."""

    def without(self, damaged: Set[int]) -> Kept:
        """Return it without these slots."""
        slots = {key: slot for key, slot in self.slots.items() if slot not in damaged}
        order = [slot for slot in self.order if slot not in damaged]
        return replace(
            self, slots=slots, places=[*slots.values()], joined=b"".join(slots), order=order
        )


class Directory:
    """The records of one region's slots. Thread-safe; one process at a time writes it."""

    @staticmethod
    def size_bytes_for(slots: int, key_bytes: int = 36) -> int:
        """Return how many bytes it takes, whole pages of 4 KiB, for all groups' slots together."""
        return directory_bytes(slots, key_bytes)

    def __init__(
        self,
        buffer: memoryview,
        layout: Layout,
        *,
        key_bytes: int = 36,
        checksums: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the header. Whatever lies there, nothing is raised for it: see `problem`.

        `buffer` is exactly `size_bytes_for` writable bytes. Raises BadInputError where it is not.
        `checksums`: whether records have a checksum of their contents; those of the other kind
        count for nothing.
        """
        if not 1 <= key_bytes <= _MAX_KEY_BYTES:
            raise BadInputError(f"key_bytes is {key_bytes}: 1 to {_MAX_KEY_BYTES}")
        slots = sum(group.slots for group in layout.groups)
        size_bytes = self.size_bytes_for(slots, key_bytes)
        if buffer.nbytes != size_bytes or buffer.readonly or not buffer.c_contiguous:
            raise BadInputError(
                f"a directory of {slots} slots is {size_bytes} writable bytes: these are "
                f"{buffer.nbytes}{', read-only' if buffer.readonly else ''}"
            )
        self.key_bytes = key_bytes
        self.layout = layout
        self.checksums = checksums
        self._flags = _HAS_CHECKSUM if checksums else 0
        self._clock = clock
        self._slots = slots
        self._record_bytes = directory_record_bytes(key_bytes)
        self._digest = hashlib.sha256(json.dumps(astuple(layout)).encode()).digest()
        # The header last: at the region's end whatever the number of slots, so that who lays the
        # region out in another way finds it, and voids it before the slots become other bytes.
        whole, end = buffer.cast("B"), slots * self._record_bytes
        self._header = whole[-HEADER_BYTES:]
        self._records = whole[:end]
        self._states = self._records[_STATE_AT :: self._record_bytes]
        self._touched = whole[end : end + slots * _TOUCH_BYTES].cast("I")
        self._first: list[int] = []
        """By group: the number of its first record."""
        before = 0
        for group in layout.groups:
            self._first.append(before)
            before += group.slots
        self._pack = Struct(f"<I{_HEAD.size}s{self._record_bytes - _KEY_AT}s").pack
        self._lock = threading.Lock()
        self._begun = array("Q", [0]) * slots
        """By record: the generation that is being written."""
        self._next = 1
        self._oldest = 1
        """Generations before it began before the last `reset` or `void`: not recorded."""
        self._epoch = 0
        """0: nothing is recorded."""
        self.problem: str | None = None
        """Why nothing of what lies there can be used; None for a region of zeros."""
        self.identity: Mapping[str, str] | None = None
        """What was sealed with the records; None where there is nothing that can be used."""
        self._read_header()

    def _read_header(self) -> None:
        fields = _HEADER.unpack_from(self._header)
        magic, version, header_bytes, record_bytes, key_bytes, slots = fields[:6]
        epoch, length, check, digest = fields[6:]
        if magic == bytes(len(_MAGIC)):
            return
        if magic != _MAGIC:
            self.problem = "no directory: other bytes lie there"
        elif version != _VERSION:
            self.problem = f"its format is version {version}, and this program's {_VERSION}"
        elif _CHECK.unpack_from(self._header, _HEADER.size)[0] != crc32(
            self._header[: _HEADER.size]
        ):
            self.problem = "its header is damaged"
        elif (header_bytes, record_bytes, key_bytes, slots, digest) != (
            HEADER_BYTES,
            self._record_bytes,
            self.key_bytes,
            self._slots,
            self._digest,
        ):
            self.problem = (
                f"it is of another layout: {slots} slots with keys of {key_bytes} bytes; now "
                f"{self._slots} with keys of {self.key_bytes}"
                + (", in other groups" if slots == self._slots else "")
            )
        elif not epoch or length > MAX_IDENTITY_BYTES:
            self.problem = "its header is damaged"
        else:
            self._read_identity(bytes(self._header[_IDENTITY_AT : _IDENTITY_AT + length]), check)
            self._epoch = epoch if self.identity is not None else 0

    def _read_identity(self, text: bytes, check: int) -> None:
        self.problem = "its identity is damaged"
        if crc32(text) != check:
            return
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
            self.identity, self.problem = found, None

    def reset(self, identity: Mapping[str, str]) -> None:
        """Void all records, then seal what is recorded from now on with this identity.

        What began to be written before is not recorded. Raises BadInputError, with all records
        void, for an identity that is not text or longer than MAX_IDENTITY_BYTES as JSON.
        """
        text = json.dumps(dict(identity), sort_keys=True, separators=(",", ":")).encode()
        with self._lock:
            before = self._void()
            if any(type(one) is not str for pair in identity.items() for one in pair):
                raise BadInputError("an identity's names and values are text")
            if len(text) > MAX_IDENTITY_BYTES:
                raise BadInputError(
                    f"the identity is {len(text)} bytes: at most {MAX_IDENTITY_BYTES}",
                    remedy="give digests in place of long values",
                )
            # Of another epoch they count for nothing as it is, and so `count` need not look. Slots
            # that were being written stay so: a dead engine's copies may still land there.
            self._states[:] = bytes(self._states).replace(_VALID_BYTE, b"\0")
            epoch = before
            while epoch in {0, before}:
                epoch = int.from_bytes(os.urandom(4), "little")
            self._header[_IDENTITY_AT : _IDENTITY_AT + len(text)] = text
            header = _HEADER.pack(
                _MAGIC,
                _VERSION,
                HEADER_BYTES,
                self._record_bytes,
                self.key_bytes,
                self._slots,
                epoch,
                len(text),
                crc32(text),
                self._digest,
            )
            header += _CHECK.pack(crc32(header))
            self._header[len(_MAGIC) : len(header)] = header[len(_MAGIC) :]
            self._header[: len(_MAGIC)] = _MAGIC  # last: until then there is no directory
            self._epoch, self.problem, self.identity = epoch, None, dict(identity)

    def void(self) -> None:
        """Void all records; nothing is recorded until `reset`."""
        with self._lock:
            self._void()

    def _void(self) -> int:
        """Return the epoch that ends: that of the bytes, since it need not be one of ours."""
        epoch: int = _HEADER.unpack_from(self._header)[6]
        self._header[: len(_MAGIC)] = bytes(len(_MAGIC))
        self._epoch, self._oldest = 0, self._next
        self.identity = None
        return epoch

    def count(self) -> int:
        """Return how many records are valid about now: 8 ms for a million of them.

        In pieces, between which other threads may go on.
        """
        if not self._epoch:
            return 0
        pieces = range(0, self._slots, _COUNTED_AT_ONCE)
        return sum(bytes(self._states[at : at + _COUNTED_AT_ONCE]).count(_VALID) for at in pieces)

    def new_generation(self) -> int:
        """Return a number for `begin` and `finish` that no earlier writer has."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def begin(self, group: int, slots: Sequence[int], generation: int) -> None:
        """Void the slots' records: to be called before the first byte of a slot changes.

        With generation 0 what is written is never recorded.
        """
        if not slots:
            return
        first, rows = self._first[group], runs(slots)
        with self._lock:
            if rows is None:
                for slot in slots:
                    self._states[first + slot] = _WRITING
                    self._begun[first + slot] = generation
                return
            for low, high in rows:
                count, at = high - low, first + low
                self._states[at : at + count] = _WRITING_BYTE * count
                self._begun[at : at + count] = array("Q", [generation]) * count

    def finish(
        self,
        group: int,
        slots: Sequence[int],
        keys: Sequence[bytes],
        generation: int,
        checksums: Sequence[int] = (),
    ) -> None:
        """Record that these keys' bytes are in these slots, whole, on all ranks.

        `checksums`: CRC-32 of each slot's bytes, in a directory with checksums.
        Slots that another writer began since then are left out, and all of them where `reset` or
        `void` came between.
        """
        first = self._first[group]
        with self._lock:
            if not self._epoch or generation < self._oldest:
                return
            head = _HEAD.pack(_VALID, self.key_bytes, self._flags, self._epoch, 0, generation)
            size, begun = self._record_bytes, self._begun
            numbers = slots if not first else [first + slot for slot in slots]
            heads: Iterable[bytes] = repeat(head)
            seeds: Iterable[int] = repeat(crc32(head))
            if self.checksums:
                start, end = head[: -_CHECKSUM_BYTES - _GENERATION.size], head[-_GENERATION.size :]
                heads = [start + _CHECK.pack(each) + end for each in checksums]
                seeds = map(crc32, heads)
            checks = map(xor, map(crc32, keys, seeds), numbers)
            records = list(map(self._pack, checks, heads, keys))
            mine = array("Q", [generation])
            rows = runs(slots)
            if rows is None:
                rows = [(slot, slot + 1) for slot in slots]
            done = 0
            for low, high in rows:
                count, at = high - low, first + low
                some, done = records[done : done + count], done + count
                if begun[at : at + count] == mine * count:
                    self._records[at * size : (at + count) * size] = b"".join(some)
                    continue
                for number, record in enumerate(some, at):
                    if begun[number] == generation:
                        self._records[number * size : (number + 1) * size] = record

    def checksum(self, group: int, slot: int) -> int:
        """Return the checksum that a slot's record has of its contents."""
        at = (self._first[group] + slot) * self._record_bytes + _GENERATION_AT - _CHECKSUM_BYTES
        checksum: int = _CHECK.unpack_from(self._records, at)[0]
        return checksum

    def touch(self, group: int, slots: Sequence[int], *, again: bool) -> None:
        """Note that slots were used just now; `again`: their contents were there before."""
        if not slots:
            return
        first, rows = self._first[group], runs(slots)
        value = self._tick() << 1 | again
        if rows is None:
            for slot in slots:
                self._touched[first + slot] = value
            return
        for low, high in rows:
            self._touched[first + low : first + high] = array("I", [value]) * (high - low)

    def _tick(self) -> int:
        tick = int((self._clock() - _CLOCK_BEGAN_S) * _TICKS_A_SECOND)
        return max(0, min(_LAST_TICK, tick))

    def read(self) -> list[Kept]:
        """Return by group what the records say; of two for one key, the newest.

        Writing goes on with a later generation than any of them.
        """
        with self._lock:
            return [self._read(index) for index in range(len(self._first))]

    def _read(self, group: int) -> Kept:
        first, count = self._first[group], self.layout.groups[group].slots
        states = bytes(self._states[first : first + count])
        writing: list[int] = []
        if _WRITING in states:
            writing = [slot for slot, state in enumerate(states) if state == _WRITING]
        keys: list[bytes] = []
        slots: list[int] | range = range(0)
        generations: list[list[int]] = []
        joined = bytearray()
        for low in range(0, count if self._epoch else 0, _READ_AT_ONCE):
            high = min(low + _READ_AT_ONCE, count)
            if _VALID in states[low:high]:
                some = self._sound(first + low, first + high)
                keys += some[0]
                joined += b"".join(some[0])
                generations.append(some[2])
                more = range(low, high) if some[1] is None else [low + at for at in some[1]]
                if isinstance(slots, list):
                    slots += more
                elif len(slots) == low and isinstance(more, range):
                    slots = range(high)  # all of them so far, in a row
                else:
                    slots = [*slots, *more]
        self._next = max(self._next, 1 + max(map(max, filter(None, generations)), default=0))
        found = dict(zip(keys, slots))
        if len(found) < len(slots):
            newest: dict[bytes, int] = {}
            for key, slot, generation in zip(keys, slots, chain.from_iterable(generations)):
                if newest.setdefault(key, generation) <= generation:
                    newest[key], found[key] = generation, slot
            slots, joined = [*found.values()], bytearray().join(found)
        used = self._touched[first : first + count].tolist()
        # What was used at one time goes last block first: a request's blocks ascend.
        order = sorted(slots, reverse=True)
        order.sort(key=used.__getitem__)
        again = (
            self._touched[first : first + count].tobytes()[::_TOUCH_BYTES].translate(_LOWEST_BIT)
        )
        return Kept(found, slots, bytes(joined), order, writing, again)

    def _sound(self, low: int, high: int) -> tuple[list[bytes], list[int] | None, list[int]]:
        """Return of the records that count: keys, places behind `low` (None: all), generations.

        A field of all records at a time, in C: a loop would take microseconds for each of a
        million. The check covers the head and the key; heads differ in their generation only, or
        in the contents' checksum too.
        """
        count, size, width = high - low, self._record_bytes, self.key_bytes
        records = self._records[low * size : high * size]
        words, step = records.cast("I"), size // 4
        keys = _column(f"{_KEY_AT}x{width}s{size - _KEY_AT - width}x", records)
        generations = records.cast("Q")[_GENERATION_AT // 8 :: size // 8].tolist()
        checks = words[::step].tobytes()
        start = _HEAD.pack(_VALID, width, self._flags, self._epoch, 0, 0)[: -_GENERATION.size]
        known = set(generations)
        heads: Iterable[int]
        if self.checksums:
            start = start[:-_CHECKSUM_BYTES]
            ends_at = _STATE_AT + len(start)
            ends = _column(f"{ends_at}x{_KEY_AT - ends_at}s{size - _KEY_AT}x", records)
            heads = map(crc32, ends, repeat(crc32(start)))
        else:
            seed = crc32(start)
            seeds = {each: crc32(_GENERATION.pack(each), seed) for each in known}
            heads = map(seeds.__getitem__, generations)
        right = array("I", map(xor, map(crc32, keys, heads), range(low, high)))
        if (
            right.tobytes() == checks
            and all(
                words[1 + at // 4 :: step].tobytes() == start[at : at + 4] * count
                for at in range(0, len(start), 4)
            )
            and min(known) > 0
            and max(known) < _MAX_GENERATION
        ):
            return keys, None, generations
        starts = _column(f"{_STATE_AT}x{len(start)}s{size - _STATE_AT - len(start)}x", records)
        rows = enumerate(zip(array("I", checks), right, starts, generations))
        counting = [
            at
            for at, (check, wanted, head, generation) in rows
            if check == wanted and head == start and 0 < generation < _MAX_GENERATION
        ]
        return [keys[at] for at in counting], counting, [generations[at] for at in counting]


def void_any(region: memoryview) -> None:
    """Void the directory at the end of a region's bytes, of whatever layout, if there is one.

    For who keeps none and writes there: an earlier one's records would vouch for other bytes.
    """
    whole = region.cast("B")
    if len(whole) >= HEADER_BYTES and not whole.readonly:
        start = len(whole) - HEADER_BYTES
        if whole[start : start + len(_MAGIC)] == _MAGIC:
            whole[start : start + len(_MAGIC)] = bytes(len(_MAGIC))


def _column(layout: str, records: memoryview) -> list[Any]:
    """Return one field of all records."""
    return list(chain.from_iterable(Struct(layout).iter_unpack(records)))


_WRITING_BYTE = bytes([_WRITING])
_LOWEST_BIT = bytes([value & 1 for value in range(256)])
_READ_AT_ONCE = 8192
"""Records whose fields fit into a processor's cache."""
_VALID_BYTE = bytes([_VALID])
_MAX_GENERATION = 1 << 63
