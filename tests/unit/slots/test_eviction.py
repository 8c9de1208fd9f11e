"""Which contents go first: what the reference of random plays is too small to show."""

from __future__ import annotations

import random

import pytest

from hostprep.slots import Directory, Group, Layout, Request, SlotPool
from hostprep.slots.eviction import EvictionOrder, Ghosts
from hostprep.slots.index import Keys

pytestmark = pytest.mark.unit

_KEY_BYTES = 8


def _hashes(name: int, blocks: int) -> list[bytes]:
    return [bytes([name, block]).ljust(_KEY_BYTES) for block in range(blocks)]


def _use(pool: SlotPool, *prompts: list[bytes]) -> None:
    for hashes in prompts:
        (claim,) = pool.claim_batch([Request("r", len(hashes), hashes)]).claims
        claim.commit()
        claim.release()


def _held(pool: SlotPool, hashes: list[bytes]) -> int:
    return sum(map(pool.holds, hashes))


def test_a_scan_does_not_displace_what_is_used_again() -> None:
    pool = SlotPool(Layout(1, (Group("kv", 60, 1),)), hash_bytes=_KEY_BYTES, spare=0)
    often = _hashes(0, 20)
    _use(pool, often, often, *[_hashes(scan, 20) for scan in range(1, 9)])
    assert _held(pool, often) == 20


def test_what_is_no_longer_used_goes_in_the_end() -> None:
    pool = SlotPool(Layout(1, (Group("kv", 60, 1),)), hash_bytes=_KEY_BYTES, spare=0)
    once_popular = _hashes(0, 20)
    _use(pool, once_popular, once_popular, *[_hashes(scan, 20) for scan in range(1, 60)])
    assert _held(pool, once_popular) == 0


def test_a_prompt_that_comes_back_stays_longer_than_one_that_does_not() -> None:
    pool = SlotPool(Layout(1, (Group("kv", 60, 1),)), hash_bytes=_KEY_BYTES, spare=0)
    back = _hashes(0, 6)
    _use(pool, back, *[_hashes(scan, 19) for scan in (1, 2, 3)])
    assert _held(pool, back) < 6
    _use(pool, back, *[_hashes(scan, 20) for scan in range(4, 9)])
    assert _held(pool, back) == 6


def test_both_lists_survive_the_process() -> None:
    layout = Layout(1, (Group("kv", 12, 1),))
    memory = memoryview(bytearray(Directory.size_bytes_for(12, _KEY_BYTES)))

    def opened() -> SlotPool:
        found = Directory(memory, layout, key_bytes=_KEY_BYTES)
        if found.identity is None:
            found.reset({"model": "m"})
        pool = SlotPool(layout, hash_bytes=_KEY_BYTES, spare=0, directory=found)
        pool.recover()
        return pool

    first = opened()
    often, once = _hashes(0, 4), _hashes(1, 8)
    _use(first, often, often, once)
    second = opened()
    assert _held(second, often + once) == 12
    _use(second, _hashes(2, 8))
    assert (_held(second, often), _held(second, once)) == (4, 0)


def test_of_a_large_group_a_sample_is_remembered() -> None:
    slots, chance = 1 << 20, random.Random(1)
    ghosts = Ghosts(slots)
    keys = [chance.randbytes(32) for _ in range(200_000)]
    sampled = [key for key in keys if ghosts.sampled[key[0]]]
    assert len(sampled) == pytest.approx(len(keys) / 16, rel=0.1)
    for key in sampled:
        ghosts.remember((0, 16), [(key, 1)])
    assert 6000 < sum(map(len, ghosts._keys)) <= 1 << 13
    before = ghosts.weight
    count = ghosts.returned(Keys(keys, 32))
    assert keys[count - 1] == sampled[-1]
    assert ghosts.weight > before
    assert not any(ghosts._keys), "each came back once"


def test_slots_in_rows_go_in_the_same_order_as_single_ones() -> None:
    """Rows are linked, cut out and taken at once: a list with ages does all of it one by one."""
    chance = random.Random(2)
    for _ in range(200):
        order = EvictionOrder(200)
        order.weight = chance.choice((256, 700, 256 * 20))
        linked: dict[int, int] = {}
        now = 0
        for _ in range(12):
            begin = chance.randrange(180)
            row = [slot for slot in range(begin, begin + chance.randrange(1, 60)) if slot < 200]
            out = [slot for slot in row if slot in linked]
            if out:
                order.unlink(out)
                for slot in out:
                    del linked[slot]
            cut = chance.randrange(len(row) + 1)
            order.again[begin : begin + len(row)] = bytes([1] * cut + [0] * (len(row) - cut))
            order.append(row[::-1])
            now += len(row)
            linked.update(dict.fromkeys(row[::-1], now))
            if chance.random() < 0.3:
                for slot in order.take(chance.randrange(len(linked))):
                    assert slot == _goes_first(linked, order, now)
                    del linked[slot]
            assert order.count == len(linked)
        for slot in order.take(len(linked)):
            assert slot == _goes_first(linked, order, now)
            del linked[slot]


def _goes_first(linked: dict[int, int], order: EvictionOrder, now: int) -> int:
    once = next((slot for slot in linked if not order.again[slot]), None)
    again = next((slot for slot in linked if order.again[slot]), None)
    if once is None or again is None:
        return next(iter(linked))
    older = (now - linked[again]) * 256 > (now - linked[once]) * order.weight
    return again if older else once
