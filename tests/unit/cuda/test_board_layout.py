"""The bytes of a rank board, both ways."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.cuda import board_layout as layout
from hostprep.cuda.board_layout import Header, Slot
from hostprep.errors import NotReadyError
from hostprep.linux.processes import ProcessId

pytestmark = pytest.mark.unit

_U64 = st.integers(0, 2**64 - 1)
_seconds = st.floats(0, 1e12)
slots = st.builds(
    Slot,
    sequence=_U64,
    state=st.sampled_from(["Joined", "Initializing", "Ready", "Failed", "Open", "Degraded"]),
    process=st.builds(ProcessId, st.integers(0, 2**32 - 1), _U64, _U64),
    joined_at_s=_seconds,
    took_s=_seconds,
    done_bytes=_U64,
    size_bytes=_U64,
    longest_chunk_s=_seconds,
    reason=st.text(st.characters(codec="utf-8"), max_size=60),
)


@given(slots)
def test_a_slot_comes_back_as_it_was(slot: Slot) -> None:
    data = layout.pack_slot(slot)
    assert len(data) == layout.SLOT_BYTES
    assert layout.unpack_slot(data) == slot


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
