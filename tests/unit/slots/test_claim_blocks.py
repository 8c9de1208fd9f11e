"""claim_blocks beside claim_batch, which has a reference: both do the same with single blocks."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies

from hostprep.errors import BadInputError
from hostprep.slots import (
    REUSED,
    WRITE,
    Claim,
    Group,
    Layout,
    Request,
    ShortageError,
    SlotPool,
)
from hostprep.slots.index import HashIndex
from tests.unit.slots.play import LAYOUTS

pytestmark = pytest.mark.unit

_SLOTS = 12
_LAYOUT = Layout(1, (Group("chunks", _SLOTS, 1),))


def _pool(*, has_table: bool = False) -> SlotPool:
    pool = SlotPool(_LAYOUT, hash_bytes=2, keep_evicted=True, spare=0)
    if has_table:
        pool._groups[0].index = HashIndex(_SLOTS, 2)
    return pool


def _as_a_batch(pool: SlotPool, keys: Sequence[bytes], *, store: bool) -> Claim:
    """Claim blocks as tokens of a sequence whose first one the engine has."""
    end = 1 + len(keys)
    limit = 0 if store else end
    request = Request("r", end, keys, 1, None, 1, reuse_limit_tokens=limit, store=store)
    return pool.claim_batch([request]).claims[0]


def _claim(pools: Sequence[SlotPool], keys: list[bytes], *, store: bool) -> list[Claim] | None:
    singly, batch = pools
    try:
        expected = _as_a_batch(batch, keys, store=store)
    except ShortageError as error:
        lack = str(error.missing[0])
        with pytest.raises(ShortageError, match=re.escape(lack)):
            singly.claim_blocks(keys, store=store)
        return None
    claim = singly.claim_blocks(keys, store=store)
    (use,), (wanted,) = claim.uses, expected.uses
    count = len(keys) if store else expected.counts.reused
    assert (list(use.slots), use.kinds) == (list(wanted.slots[:count]), wanted.kinds[:count])
    assert (list(use.evicted), claim.evicted) == (list(wanted.evicted), expected.evicted)
    counts = claim.counts
    assert counts.reused + counts.stored + counts.shared + counts.written == counts.blocks == count
    assert counts.reused_tokens == counts.reused
    return [claim, expected]


@given(strategies.integers(0, 1 << 32), strategies.booleans())
def test_it_does_what_a_batch_of_one_does(seed: int, has_table: bool) -> None:
    choose = random.Random(seed)
    pools = [_pool(has_table=has_table), _pool(has_table=has_table)]
    held: list[list[Claim]] = []
    for _ in range(40):
        step = choose.randrange(6)
        if step < 3:
            keys = [bytes([7, choose.randrange(30)]) for _ in range(choose.randrange(8))]
            claims = _claim(pools, keys, store=choose.random() < 0.7)
            held += [claims] if claims else []
        elif held and step == 3:
            for claim in choose.choice(held):
                claim.commit()
        elif held and step == 4:
            one, other = choose.choice(held)
            assert pools[0].take_over(one) == pools[1].take_over(other)
        elif held:
            for claim in held.pop(choose.randrange(len(held))):
                claim.release()
        orders = [pool._groups[0].order.oldest_first() for pool in pools]
        assert orders[0] == orders[1]
        assert pools[0].usage() == pools[1].usage()
        states = [pool._groups[0].state for pool in pools]
        assert states[0] == states[1]


def test_a_claim_of_what_is_ready_protects_it() -> None:
    pool = _pool()
    first = pool.claim_blocks([b"k1", b"k2"])
    first.commit()
    first.release()
    reading = pool.claim_blocks([b"k1", b"k2", b"k3"], store=False)
    assert list(reading.uses[0].kinds) == [REUSED, REUSED]
    with pytest.raises(ShortageError):
        pool.claim_blocks([bytes([9, n]) for n in range(_SLOTS - 1)])
    last = pool.claim_blocks([bytes([9, n]) for n in range(_SLOTS - 2)])
    assert set(last.uses[0].kinds) == {WRITE}
    assert not set(last.uses[0].slots) & set(reading.uses[0].slots)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_for_one_group_without_windows(layout: Layout) -> None:
    with pytest.raises(BadInputError, match="one group without a window"):
        SlotPool(layout, hash_bytes=2).claim_blocks([b"k1"])


def test_a_hash_of_another_length_is_refused() -> None:
    with pytest.raises(BadInputError, match="a hash of 3 bytes: this pool's have 2"):
        _pool().claim_blocks([b"abc"])


@pytest.mark.parametrize("singly", [True, False], ids=["claim_blocks", "claim_batch"])
def test_a_shortage_takes_back_its_claims_on_matches_in_a_row(singly: bool) -> None:
    pool = SlotPool(Layout(1, (Group("chunks", 64, 1),)), hash_bytes=2, spare=0)

    def keys(first: int, count: int) -> list[bytes]:
        return [(first + at).to_bytes(2, "big") for at in range(count)]

    def stored(first: int, count: int) -> None:
        claim = pool.claim_blocks(keys(first, count))
        claim.commit()
        claim.release()

    stored(1000, 1)  # so that the row does not begin at the first slot
    stored(0, 20)
    other = pool.claim_blocks(keys(2000, 43))
    wanted = [*keys(0, 20), *keys(3000, 2)]
    with pytest.raises(ShortageError):
        pool.claim_blocks(wanted) if singly else _as_a_batch(pool, wanted, store=True)

    assert pool.usage()[0].claimed == 43
    reader = pool.claim_blocks(keys(0, 20), store=False)
    other.release()
    writer = pool.claim_blocks(keys(4000, 44))
    assert not set(writer.uses[0].slots) & set(reader.uses[0].slots)
    with pytest.raises(ShortageError):
        pool.claim_blocks(keys(5000, 1))
