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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from itertools import count as count_from
from operator import eq, xor
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
_STATE_AT = _CHECK.size
_KEY_AT = _CHECK.size + _HEAD.size
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

    keys: list[bytes]
    slots: list[int]
    """The slot of each key, ascending."""
    order: list[int]
    """The same slots, the one to be evicted first first."""
    writing: list[int]
    """Slots that were being written when the last process ended."""


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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the header. Whatever lies there, nothing is raised for it: see `problem`.

        `buffer` is exactly `size_bytes_for` writable bytes. Raises BadInputError where it is not.
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
        self, group: int, slots: Sequence[int], keys: Sequence[bytes], generation: int
    ) -> None:
        """Record that these keys' bytes are in these slots, whole, on all ranks.

        Slots that another writer began since then are left out, and all of them where `reset` or
        `void` came between.
        """
        first = self._first[group]
        with self._lock:
            if not self._epoch or generation < self._oldest:
                return
            head = _HEAD.pack(_VALID, self.key_bytes, 0, self._epoch, 0, generation)
            seed, pack, size = crc32(head), self._pack, self._record_bytes
            begun = self._begun
            numbers = [first + slot for slot in slots]
            records = [
                pack(crc32(key, seed) ^ number, head, key) for number, key in zip(numbers, keys)
            ]
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
        size, width = self._record_bytes, self.key_bytes
        records = bytes(self._records[first * size : (first + count) * size])
        states = records[_STATE_AT::size]
        writing: list[int] = []
        if _WRITING in states:
            writing = [slot for slot, state in enumerate(states) if state == _WRITING]
        if not self._epoch or _VALID not in states:
            return Kept([], [], [], writing)
        # Lists of all records at a time, filled in C: a loop over a million would take seconds.
        pad = size - _KEY_AT - width
        checks = _column(f"<I{size - _CHECK.size}x", records)
        heads = _column(f"{_CHECK.size}x{_HEAD.size}s{width + pad}x", records)
        keys = _column(f"{_KEY_AT}x{width}s{pad}x", records)
        generations = {head: self._generation_of(head) for head in set(heads)}
        is_right = map(eq, checks, map(xor, map(crc32, keys, map(crc32, heads)), count_from(first)))
        known = [generations[head] for head in heads]
        slots = [slot for slot, right in enumerate(is_right) if right and known[slot]]
        self._next = max(self._next, 1 + max([known[slot] for slot in slots], default=0))
        found = dict(zip([keys[slot] for slot in slots], slots))
        if len(found) < len(slots):
            for slot in slots:
                if known[found[keys[slot]]] < known[slot]:
                    found[keys[slot]] = slot
            slots = sorted(found.values())
        used = self._touched[first : first + count].tolist()
        # What was used at one time goes last block first: a request's blocks ascend.
        order = slots[::-1]
        order.sort(key=used.__getitem__)
        return Kept([keys[slot] for slot in slots], slots, order, writing)

    def _generation_of(self, head: bytes) -> int:
        """Return the generation of a valid record's head, 0 of any other."""
        state, length, flags, epoch, _, generation = _HEAD.unpack(head)
        is_ours = (state, length, flags, epoch) == (_VALID, self.key_bytes, 0, self._epoch)
        return generation if is_ours and generation < _MAX_GENERATION else 0


def _column(layout: str, records: bytes) -> list[Any]:
    """Return one field of all records."""
    return list(chain.from_iterable(Struct(layout).iter_unpack(records)))


_WRITING_BYTE = bytes([_WRITING])
_MAX_GENERATION = 1 << 63
