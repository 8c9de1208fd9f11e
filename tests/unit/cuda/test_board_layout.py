"""The bytes of a rank board, both ways."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.cuda import board_layout as layout
from hostprep.cuda.board_layout import Header, Slot
from hostprep.errors import NotReadyError
from hostprep.linux.processes import ProcessId

pytestmark = pytest.mark.unit

_U64 = st.integers(0, 2**64 - 1)
_bytes = st.integers(0, 2**61)
_seconds = st.floats(0, 1e12)
_holes = st.lists(_bytes, max_size=2 * layout.MOST_HOLES, unique=True).map(
    lambda ends: tuple(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)
slots = st.builds(
    Slot,
    sequence=_U64,
    state=st.sampled_from(["Joined", "Initializing", "Ready", "Failed", "Open", "Degraded"]),
    process=st.builds(ProcessId, st.integers(0, 2**32 - 1), _U64, _U64),
    joined_at_s=_seconds,
    took_s=_seconds,
    done_bytes=_bytes,
    size_bytes=_bytes,
    longest_chunk_s=_seconds,
    reason=st.text(st.characters(codec="utf-8"), max_size=60).filter(str.isprintable),
    holes=_holes,
)


@given(slots)
def test_a_slot_comes_back_as_it_was(slot: Slot) -> None:
    data = layout.pack_slot(slot)
    assert len(data) == layout.SLOT_BYTES
    assert layout.unpack_slot(data) == slot


@given(slots, st.integers(0, 3))
def test_a_reason_that_is_cut_ends_with_an_ellipsis(slot: Slot, begin: int) -> None:
    long = replace(slot, reason="x" * begin + "é" * 2000)
    kept = layout.unpack_slot(layout.pack_slot(long))
    assert kept is not None
    assert kept.reason.endswith("é…")
    assert len(kept.reason) > 50


def test_a_slot_without_holes_is_as_older_versions_write_it() -> None:
    """Zeros behind the reason; and they know nothing of what is there."""
    slot = Slot(1, "Initializing", ProcessId(1, 2, 3), 4.0, done_bytes=5, reason="x" * 300)
    assert not any(layout.pack_slot(slot)[-134:])
    with_hole = layout.pack_slot(replace(slot, holes=((5, 7),)))
    assert with_hole[4:-134] == layout.pack_slot(slot)[4:-134]
    assert replace(slot, holes=((5, 7), (9, 10))).mark_bytes == 8


@pytest.mark.parametrize("holes", [((7, 5),), ((5, 5),), ((1, 4), (3, 9)), ((1, 2**62),)])
def test_holes_that_cannot_be_are_not_believed(holes: layout.Holes) -> None:
    slot = Slot(1, "Initializing", ProcessId(1, 2, 3), 4.0, holes=holes)
    with pytest.raises(ValueError, match="impossible"):
        layout.unpack_slot(layout.pack_slot(slot))


@given(slots, slots, st.integers(0, layout.SLOT_BYTES))
def test_half_of_one_and_half_of_another_is_seen(first: Slot, second: Slot, cut: int) -> None:
    one, other = layout.pack_slot(first), layout.pack_slot(second)
    mixed = one[:cut] + other[cut:]
    if mixed in (one, other):
        assert layout.unpack_slot(mixed) in (first, second)
    else:
        with pytest.raises(ValueError, match=r"torn"):
            layout.unpack_slot(mixed)


@given(st.integers(0, layout.SLOT_BYTES * 8 - 1), slots)
def test_a_flipped_bit_is_seen(bit: int, slot: Slot) -> None:
    data = bytearray(layout.pack_slot(slot))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"torn"):
        layout.unpack_slot(bytes(data))


def test_an_unwritten_slot_is_nobodys() -> None:
    assert layout.unpack_slot(bytes(layout.SLOT_BYTES)) is None


@given(st.integers(1, 16), st.binary(min_size=16, max_size=16))
def test_a_header_comes_back_as_it_was(world: int, generation: bytes) -> None:
    header = Header(world, generation, 1.5)
    data = layout.pack_header(header).ljust(layout.slot_offset(world), b"\0")
    assert layout.unpack_header(data) == header


@given(st.binary(max_size=2048))
def test_junk_is_refused(data: bytes) -> None:
    with pytest.raises(NotReadyError, match="rank board"):
        layout.unpack_header(data)


@given(st.integers(0, 52 * 8 - 1))
def test_a_header_with_a_flipped_bit_is_refused(bit: int) -> None:
    header = layout.pack_header(Header(2, bytes(16), math.pi))
    data = bytearray(header.ljust(layout.slot_offset(2), b"\0"))
    fields = 8 + 4 + 4 + 16 + 8 + 4
    if bit // 8 < fields:
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(NotReadyError):
            layout.unpack_header(bytes(data))


@pytest.mark.parametrize("created_at_s", [math.nan, math.inf, -math.inf])
def test_a_header_made_at_no_time_is_refused(created_at_s: float) -> None:
    data = layout.pack_header(Header(1, bytes(16), created_at_s))
    with pytest.raises(NotReadyError, match="no number"):
        layout.unpack_header(data.ljust(layout.slot_offset(1), b"\0"))


@pytest.mark.parametrize(
    "changes",
    [
        {"took_s": math.nan},
        {"joined_at_s": -1.0},
        {"longest_chunk_s": math.inf},
        {"took_s": 1e300},
        {"done_bytes": 2**62},
        {"size_bytes": 2**64 - 1},
    ],
)
def test_a_slot_with_an_impossible_number_is_refused(changes: dict[str, float]) -> None:
    slot = Slot(1, layout.READY, ProcessId(1, 1, 1), 1.0)
    assert layout.unpack_slot(layout.pack_slot(slot)) == slot
    with pytest.raises(ValueError, match="impossible"):
        layout.unpack_slot(layout.pack_slot(replace(slot, **changes)))  # type: ignore[arg-type]


def test_a_reason_is_printable() -> None:
    slot = Slot(1, layout.FAILED, ProcessId(1, 1, 1), 1.0, reason="a\x1b[2J\nb")
    shown = layout.unpack_slot(layout.pack_slot(slot))
    assert shown is not None
    assert shown.reason == "a\ufffd[2J\ufffdb"
