"""A pool that hands out the first slots only, and more of them as the region grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.errors import BadInputError
from hostprep.slots import Group, Layout, ShortageError, SlotPool
from hostprep.slots.rows import FreeSlots
from tests.unit.slots.interrupting import Interrupter, InterruptError
from tests.unit.slots.play import HASH_BYTES, TOKENS_PER_BLOCK

pytestmark = pytest.mark.unit

_LAYOUT = Layout(TOKENS_PER_BLOCK, (Group("full", 14, 1), Group("other", 6, 1, 14)))
_SINGLE = Layout(TOKENS_PER_BLOCK, (Group("full", 14, 1),))


def _keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(HASH_BYTES, "big") for number in numbers]


def _pool(*usable: int, layout: Layout = _SINGLE) -> SlotPool:
    return SlotPool(layout, hash_bytes=HASH_BYTES, spare=0, usable=usable)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=30))
def test_no_slot_is_handed_out_that_is_not_usable(steps: list[tuple[int, int]]) -> None:
    """Whatever is claimed, written, released and evicted meanwhile."""
    usable, name = 0, 0
    pool = _pool(0)
    for blocks, grows in steps:
        usable = min(14, usable + grows)
        pool.extend((usable,))
        keys = _keys(*range(name, name + blocks))
        name += blocks
        if blocks > usable:
            with pytest.raises(ShortageError) as short:
                pool.claim_blocks(keys)
            assert short.value.missing[0].available == usable
            continue
        claim = pool.claim_blocks(keys)
        assert all(0 <= slot < usable for slot in claim.uses[0].slots)
        claim.commit()
        claim.release()
        assert pool.usage()[0].slots == usable


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=30),
    st.sets(st.integers(0, 13), max_size=6),
)
def test_nor_one_in_a_hole(steps: list[tuple[int, int]], holes: set[int]) -> None:
    usable, name = 0, 0
    pool = _pool(0)
    gaps = [range(slot, slot + 1) for slot in sorted(holes)]
    for blocks, grows in steps:
        usable = min(14, usable + grows)
        pool.extend((usable,), (gaps,))
        there = [slot for slot in range(usable) if slot not in holes]
        keys = _keys(*range(name, name + blocks))
        name += blocks
        if blocks > len(there):
            with pytest.raises(ShortageError) as short:
                pool.claim_blocks(keys)
            assert short.value.missing[0].available == len(there)
            continue
        claim = pool.claim_blocks(keys)
        assert set(claim.uses[0].slots) <= set(there)
        claim.commit()
        claim.release()
        assert pool.usage()[0].slots == len(there)


def test_a_hole_stays_one_and_no_other_comes_below_what_is_handed_out() -> None:
    pool = _pool(0)
    pool.extend((6,), ([range(4, 9)],))
    assert pool.usage()[0].free == 4
    for holes in ([], [range(4, 5)], [range(2, 9)]):
        with pytest.raises(BadInputError, match="claims hold those"):
            pool.extend((12,), (holes,))
    for holes in ([range(4, 9), range(8, 10)], [range(9, 4)], [range(-1, 2)]):
        with pytest.raises(BadInputError):
            pool.extend((12,), (holes,))
    pool.extend((12,), ([range(4, 9), range(9, 10), range(13, 14)],))
    assert pool.usage()[0].free == 6


def test_what_holes_leave_no_room_for_is_hopeless() -> None:
    pool = _pool(0)
    pool.extend((14,), ([range(3, 5)],))
    ticket = pool.line_up()
    with pytest.raises(ShortageError):
        pool.claim_blocks(_keys(*range(13)), ticket=ticket)
    assert ticket.is_hopeless


def test_what_is_there_stays_while_it_grows() -> None:
    pool = _pool(4)
    claim = pool.claim_blocks(_keys(1, 2, 3))
    pool.extend((9,))
    claim.commit()
    claim.release()
    found = pool.claim_blocks(_keys(1, 2, 3), store=False)
    assert list(found.uses[0].slots) == list(claim.uses[0].slots)
    (usage,) = pool.usage()
    assert (usage.slots, usage.claimed, usage.free) == (9, 3, 6)


def test_a_batch_that_waits_in_line_is_woken() -> None:
    pool = _pool(2)
    ticket = pool.line_up()
    with pytest.raises(ShortageError):
        pool.claim_blocks(_keys(1, 2, 3), ticket=ticket)
    assert not ticket.wait(0)
    pool.extend((3,))
    assert ticket.wait(1)
    assert len(pool.claim_blocks(_keys(1, 2, 3), ticket=ticket).uses[0].slots) == 3


def test_what_has_no_room_yet_keeps_nobody_from_what_there_is() -> None:
    pool = _pool(4)
    large = pool.line_up()
    with pytest.raises(ShortageError):
        pool.claim_blocks(_keys(*range(9)), ticket=large)
    pool.claim_blocks(_keys(20)).release()
    assert not large.wait(0)
    pool.extend((9,))
    assert large.wait(1)
    assert len(pool.claim_blocks(_keys(*range(9)), ticket=large).uses[0].slots) == 9


def test_what_is_kept_free_is_a_share_of_what_is_usable() -> None:
    layout = Layout(TOKENS_PER_BLOCK, (Group("full", 1000, 1),))
    pool = SlotPool(layout, hash_bytes=HASH_BYTES, spare=0.1, usable=(30,))
    for name in range(30):
        claim = pool.claim_blocks(_keys(name))
        claim.commit()
        claim.release()
    assert pool.usage()[0].cached == 27
    pool.extend((1000,))
    assert pool._groups[0].spare == 100


@pytest.mark.parametrize("usable", [(3,), (15, 6), (4, -1), (4, 6, 1), ()])
def test_what_cannot_be_usable_is_refused(usable: tuple[int, ...]) -> None:
    with pytest.raises(BadInputError):
        _pool(*usable, layout=_LAYOUT)
    pool = _pool(2, 2, layout=_LAYOUT)
    with pytest.raises(BadInputError):
        pool.extend(usable)
    assert [usage.free for usage in pool.usage()] == [2, 2]


def test_what_is_usable_stays_so() -> None:
    pool = _pool(4, 4, layout=_LAYOUT)
    with pytest.raises(BadInputError, match="claims hold those"):
        pool.extend((5, 3))
    pool.extend((5, 4))


def test_interrupted_anywhere_all_or_nothing_of_it_is_done() -> None:
    at, is_done = 0, False
    while not is_done:
        pool = _pool(4)
        held = pool.claim_blocks(_keys(1, 2))
        interrupter = Interrupter(at)
        try:
            interrupter.run(lambda pool=pool: pool.extend((9,)))  # type: ignore[misc]
            is_done = interrupter.passed <= at
        except InterruptError:
            pass
        (usage,) = pool.usage()
        assert (usage.slots, usage.free) in {(4, 2), (9, 7)}
        more = pool.claim_blocks(_keys(*range(10, 10 + usage.free)))
        taken = sorted([*held.uses[0].slots, *more.uses[0].slots])
        assert taken == list(range(usage.slots))
        at += 1
    assert at > 20


def test_without_withholding_that_would_be_seen() -> None:
    """A test of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FreeSlots, "withhold", lambda *_: None)
        pool = _pool(4)
        assert max(pool.claim_blocks(_keys(*range(9))).uses[0].slots) >= 4
