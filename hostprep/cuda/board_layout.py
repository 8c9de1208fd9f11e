"""The bytes of a rank board: a header, a slot for the gate's verdict, and one for each rank.

Everything is 512 bytes long and little-endian, so that nothing ever straddles a page. Header:
magic, version, world size, the run's generation, when the file was made (seconds since the epoch),
CRC-32. Slot: CRC-32 of all that follows; how often it was written; state; process number, start in
clock ticks since boot and PID namespace; when the process joined; seconds that registering took;
bytes done and to do; seconds of the longest chunk; length of the reason, and the reason in UTF-8;
behind the room for the longest reason up to eight holes, begin and end of each.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import astuple, dataclass

from hostprep.client.untrusted import printable
from hostprep.errors import BadInputError, NotReadyError
from hostprep.linux.processes import ProcessId

VERSION = 1
MAX_WORLD = 1024
SLOT_BYTES = 512
GATE = -1
"""The gate's number where a rank's is expected."""

JOINED = "Joined"
INITIALIZING = "Initializing"
READY = "Ready"
FAILED = "Failed"
CLOSED = "Closed"
OPEN = "Open"
DEGRADED = "Degraded"
_CODES = {1: JOINED, 2: INITIALIZING, 3: READY, 4: FAILED, 16: CLOSED, 17: OPEN, 18: DEGRADED}
_NUMBERS = {state: code for code, state in _CODES.items()}

Holes = tuple[tuple[int, int], ...]
"""Begin and end of each, in bytes from the slice's start, in ascending order."""

_MAGIC = b"HPBOARD\0"
_HEADER = struct.Struct("<8sII16sd")
_SLOT = struct.Struct("<QBxxxIQQddQQdH")
_CRC = struct.Struct("<I")
_MAX_REASON_BYTES = 300
MOST_HOLES = 8
_HOLES = struct.Struct(f"<{2 * MOST_HOLES}Q")
_HOLES_AT = _SLOT.size + _MAX_REASON_BYTES
_LARGEST = 2.0**62
"""Of bytes and seconds: sums of them stay within 64 bits and a float's range."""


@dataclass(frozen=True)
class Header:
    """What a board is for."""

    world: int
    generation: bytes
    created_at_s: float


@dataclass(frozen=True)
class Slot:
    """A report of a rank, or of the gate. The fields are in the order of the bytes."""

    sequence: int
    """How often it was written: a reader sees whether anything happened."""
    state: str
    process: ProcessId
    joined_at_s: float
    took_s: float = 0.0
    """From the begin of registering to its end, or until now as of the last write; of the gate,
    from the board's making (the first rank joins) to its verdict."""
    done_bytes: int = 0
    size_bytes: int = 0
    longest_chunk_s: float = 0.0
    reason: str = ""
    holes: Holes = ()
    """Begin and end of what could not be registered and is passed over, in ascending order; zeros,
    as older versions write them, are none."""

    @property
    def mark_bytes(self) -> int:
        """How far registering has come, from the slice's start: all below is done, or a hole."""
        return mark_bytes(self.done_bytes, self.holes)


def mark_bytes(done_bytes: int, holes: Holes) -> int:
    """Return how far registering has come that did so many bytes, and passed over those holes."""
    return done_bytes + sum(end - begin for begin, end in holes)


def generation_of(run_id: str) -> bytes:
    """Return the 16 bytes that stand for a run, such as a lease's id. Raises BadInputError."""
    if not run_id:
        raise BadInputError(
            "a run without an id", reason="BadGeneration", remedy="give the lease's id"
        )
    import hashlib  # late: it loads OpenSSL

    return hashlib.sha256(run_id.encode()).digest()[:16]


def slot_offset(rank: int) -> int:
    """Return where a rank's slot begins: the gate's before the first; `world`'s is the end."""
    return SLOT_BYTES * (rank + 2)


MAX_BOARD_BYTES = slot_offset(MAX_WORLD)


def pack_header(header: Header) -> bytes:
    """Return a header's bytes."""
    fields = _HEADER.pack(_MAGIC, VERSION, header.world, header.generation, header.created_at_s)
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(SLOT_BYTES, b"\0")


def unpack_header(data: bytes) -> Header:
    """Return the header of a whole board's bytes.

    Raises NotReadyError, saying why, for anything but a complete board of this version.
    """
    if len(data) < SLOT_BYTES or not data.startswith(_MAGIC):
        raise _bad("it is no rank board, or cut short")
    fields = data[: _HEADER.size]
    _, version, world, generation, created_at_s = _HEADER.unpack(fields)
    if version != VERSION:
        raise NotReadyError(
            f"the rank board is of version {version}, and this program knows version {VERSION}",
            reason="OtherBoardVersion",
            remedy="run the same hostprep in all processes of the engine",
        )
    if _CRC.unpack_from(data, _HEADER.size)[0] != zlib.crc32(fields):
        raise _bad("its header is damaged")
    if not math.isfinite(created_at_s):
        raise _bad("its time is no number")
    if not 1 <= world <= MAX_WORLD or len(data) != slot_offset(world):
        raise _bad(f"it has {len(data)} bytes, which is not what {world} ranks need")
    return Header(world, generation, created_at_s)


def _bad(why: str) -> NotReadyError:
    return NotReadyError(
        f"the rank board cannot be used: {why}",
        reason="BadBoard",
        remedy="see who writes there, and start the engine again",
    )


def pack_slot(slot: Slot) -> bytes:
    """Return a slot's bytes; a reason that is too long ends with an ellipsis."""
    reason = slot.reason.encode("utf-8", "replace")
    if len(reason) > _MAX_REASON_BYTES:
        ellipsis = "…".encode()
        reason = reason[: _MAX_REASON_BYTES - len(ellipsis)] + ellipsis
    fields = _SLOT.pack(
        slot.sequence,
        _NUMBERS[slot.state],
        *astuple(slot.process),
        slot.joined_at_s,
        slot.took_s,
        slot.done_bytes,
        slot.size_bytes,
        slot.longest_chunk_s,
        len(reason),
    )
    ends = [end for hole in slot.holes for end in hole]
    holes = _HOLES.pack(*ends, *[0] * (2 * MOST_HOLES - len(ends)))
    body = (fields + reason.ljust(_MAX_REASON_BYTES, b"\0") + holes).ljust(
        SLOT_BYTES - _CRC.size, b"\0"
    )
    return _CRC.pack(zlib.crc32(body)) + body


def unpack_slot(data: bytes) -> Slot | None:
    """Return a slot; None for one that was never written.

    Raises ValueError for one that is being written, or that another program wrote.
    """
    if not any(data):
        return None
    body = data[_CRC.size :]
    if len(data) != SLOT_BYTES or _CRC.unpack_from(data)[0] != zlib.crc32(body):
        raise ValueError("torn")
    sequence, code, pid, start_ticks, namespace, *numbers, length = _SLOT.unpack_from(body)
    if code not in _CODES or length > _MAX_REASON_BYTES:
        raise ValueError("unknown state")
    process = ProcessId(pid, start_ticks, namespace)
    if not all(math.isfinite(number) and 0 <= number < _LARGEST for number in numbers):
        raise ValueError("an impossible number")
    reason = printable(body[_SLOT.size : _SLOT.size + length].decode("utf-8", "ignore"))
    values = (sequence, _CODES[code], process, *numbers, reason, _unpack_holes(body))
    return Slot(*values)


def _unpack_holes(body: bytes) -> Holes:
    """Return a slot's holes. Raises ValueError for what cannot be."""
    ends = _HOLES.unpack_from(body, _HOLES_AT)
    holes = tuple((begin, end) for begin, end in zip(ends[::2], ends[1::2]) if end)
    known = [end for hole in holes for end in hole]
    if any(now >= then for now, then in zip(known, known[1:])) or max(known, default=0) >= _LARGEST:
        raise ValueError("impossible holes")
    return holes
