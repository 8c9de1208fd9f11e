"""The hash table, the free slots, the order of eviction: each beside what Python has for it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies
from hypothesis.strategies import DataObject

from hostprep.slots.eviction import EvictionOrder
from hostprep.slots.index import DictIndex, HashIndex, Keys
from hostprep.slots.rows import FreeSlots, in_a_row, runs

pytestmark = pytest.mark.unit

_KEYS = [bytes([a, b]) for a in range(6) for b in range(4)]


@pytest.mark.parametrize("kind", [HashIndex, DictIndex])
@given(strategies.data())
def test_an_index_is_a_dict(kind: type[HashIndex | DictIndex], data: DataObject) -> None:
    slots = data.draw(strategies.integers(1, 20))
    index = kind(slots, 2)
    there = data.draw(strategies.permutations(range(slots)))[: data.draw(strategies.integers(0, 4))]
    held = dict(zip(there, _KEYS, strict=False))
    kept = {key: slot for slot, key in held.items()}
    index.restore(kept, there, b"".join(kept))
    for _ in range(data.draw(strategies.integers(0, 12))):
        free = [slot for slot in range(slots) if slot not in held]
        new = [key for key in _KEYS if key not in held.values()]
        count = data.draw(strategies.integers(0, min(len(free), len(new))))
        places = data.draw(strategies.permutations(free))[:count]
        places = sorted(places) if data.draw(strategies.booleans()) else places
        index.insert(Keys(new[:count], 2), places)
        held.update(zip(places, new, strict=False))
        settled = data.draw(strategies.integers(0, count))
        index.settle(places[:settled])
        gone = data.draw(strategies.lists(strategies.sampled_from(range(slots)), unique=True))
        drops = [index.forget, index.remove] if isinstance(index, HashIndex) else [index.forget]
        data.draw(strategies.sampled_from(drops))(gone)
        held = {slot: key for slot, key in held.items() if slot not in gone}
        where = {key: slot for slot, key in held.items()}
        asked = data.draw(strategies.permutations(_KEYS))
        found = index.find(Keys(asked, 2))
        assert found == [where.get(key, -1) for key in asked] == list(map(index.slot_of, asked))
        until = index.find(Keys(asked, 2), until_missing=True)
        assert until == found[: found.index(-1) + 1 if -1 in found else len(found)]
        ordered = [held[slot] for slot in sorted(held)]
        assert index.find(Keys(ordered, 2)) == sorted(held)
        assert index.keys(sorted(held)) == ordered


def test_a_key_may_be_at_several_slots() -> None:
    index = HashIndex(4, 2)
    for key, slot in ((b"aa", 2), (b"aa", 0), (b"bb", 1)):
        index.insert(Keys([key], 2), [slot])
        index.settle([slot])
    assert index.find_all(b"aa", 9) == [0, 2]
    assert index.find_all(b"aa", 1) == [0]
    index.remove([0])
    assert index.find_all(b"aa", 9) == [2]


@given(strategies.data())
def test_the_order_is_a_list(data: DataObject) -> None:
    slots = data.draw(strategies.integers(1, 12))
    order, expected = EvictionOrder(slots), list[int]()
    out = list(range(slots))
    for _ in range(data.draw(strategies.integers(0, 15))):
        step = data.draw(strategies.sampled_from(["take", "unlink", "append"]))
        if step == "take":
            count = data.draw(strategies.integers(0, len(expected)))
            taken, expected = expected[:count], expected[count:]
            assert order.take(count) == taken
            out += taken
        elif step == "unlink":
            chosen = data.draw(
                strategies.permutations(expected) if expected else strategies.just([])
            )
            chosen = chosen[: data.draw(strategies.integers(0, len(chosen)))]
            if data.draw(strategies.booleans()):
                chosen = sorted(chosen)
            order.unlink(in_a_row(chosen))
            expected = [slot for slot in expected if slot not in chosen]
            out += chosen
        else:
            back = data.draw(strategies.permutations(out) if out else strategies.just([]))
            back = back[: data.draw(strategies.integers(0, len(back)))]
            out = [slot for slot in out if slot not in back]
            order.append(back)
            expected = expected + back
        assert order.oldest_first() == expected
        assert order.count == len(expected)


class _FreeModel:
    """Free slots as a set."""

    def __init__(self, slots: int) -> None:
        self.slots = set(range(slots))
        self._following = 0

    def take(self, count: int, long: int) -> list[int]:
        taken: list[int] = []
        for least in (min(long, count), 1):
            while len(taken) < count and (slot := self._row(least)) is not None:
                while slot in self.slots and len(taken) < count:
                    self.slots.remove(slot)
                    taken.append(slot)
                    slot += 1
                self._following = slot
        return sorted(taken)

    def _row(self, least: int) -> int | None:
        in_turn = sorted(self.slots, key=lambda slot: (slot < self._following, slot))
        rows = (slot for slot in in_turn if {*range(slot, slot + least)} <= self.slots)
        return next(rows, None)


@pytest.mark.parametrize("long", [1, 3])
@given(strategies.data())
def test_free_slots_are_handed_out_in_turn_and_long_rows_first(long: int, data: DataObject) -> None:
    slots = data.draw(strategies.integers(1, 40))
    free, model = FreeSlots(slots, long), _FreeModel(slots)
    for _ in range(data.draw(strategies.integers(0, 15))):
        assert free.count == len(model.slots)
        if data.draw(strategies.booleans()):
            count = data.draw(strategies.integers(0, len(model.slots)))
            assert free.take(count) == model.take(count, long)
        else:
            back = data.draw(strategies.permutations(sorted(set(range(slots)) - model.slots)))
            back = back[: data.draw(strategies.integers(0, len(back)))]
            free.give(back)
            model.slots |= set(back)


def test_a_long_row_is_not_looked_for_through_all_slots() -> None:
    free = FreeSlots(1_000_000)
    free.take(1_000_000)
    free.give([slot for slot in range(60) if slot % 3])
    free.give(range(500_000, 600_000))
    assert free.take(10) == [slot for slot in range(15) if slot % 3]
    free.give(range(60_000, 60_100))
    assert free.take(100) == list(range(60_000, 60_100))


@given(strategies.lists(strategies.integers(0, 30), max_size=60))
def test_runs_are_all_of_the_slots(slots: list[int]) -> None:
    found = runs(slots)
    if found is not None:
        assert [slot for first, end in found for slot in range(first, end)] == slots
    assert list(in_a_row(slots)) == slots


def test_scattered_slots_have_no_runs() -> None:
    assert runs(list(range(0, 40, 2))) is None
    assert runs(list(range(5, 40))) == [(5, 40)]
    assert in_a_row([3, 4, 5]) == range(3, 6)


def test_what_is_forgotten_is_not_found_by_the_entry_that_it_leaves_behind() -> None:
    index = HashIndex(4, 2)
    index.insert(Keys([b"aa"], 2), [1])
    index.settle([1])
    index.forget([1])
    assert index.find(Keys([b"aa"], 2)) == [-1]
    index.insert(Keys([b"bb", b"aa"], 2), [1, 2])
    assert index.find(Keys([b"aa", b"bb"], 2)) == [2, 1]
    index.settle([1, 2])
    assert index.find(Keys([b"aa", b"bb"], 2)) == [2, 1]
