"""The directory of blocks: what a killed process leaves, and what of it the next one believes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies

from hostprep.errors import BadInputError
from hostprep.slots import (
    Directory,
    Group,
    Layout,
    Request,
    SlotPool,
    over,
)

pytestmark = pytest.mark.unit

_LAYOUT = Layout(1, (Group("a", 24, 1), Group("b", 6, 1, 24)))
_ONE = Layout(1, (Group("kv", 12, 1),))
_WIDE = Layout(1, (Group("kv", 12, 64),))
_IDENTITY = {"model": "m", "weights": "w"}
_RECORD = 64


def _memory(layout: Layout = _ONE) -> bytearray:
    return bytearray(Directory.size_bytes_for(sum(group.slots for group in layout.groups), 8))


def _open(memory: bytearray, layout: Layout = _ONE, clock: float = 1.8e9) -> Directory:
    return Directory(memoryview(memory), layout, key_bytes=8, clock=lambda: clock)


def _sealed(memory: bytearray, layout: Layout = _ONE) -> Directory:
    found = _open(memory, layout)
    found.reset(_IDENTITY)
    return found


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _pool(found: Directory) -> SlotPool:
    return SlotPool(found.layout, hash_bytes=8, spare=0, directory=found)


def _request(*numbers: int, keep: bool = True) -> Request:
    """Any blocks, in any order: behind one that the engine has."""
    hashes = [_key(number) for number in numbers]
    end = 1 + len(hashes)
    return Request(
        "r", end, hashes, computed_tokens=1, first_block=1, reuse_limit_tokens=0, keep=keep
    )


def _store(pool: SlotPool, *numbers: int, keep: bool = True) -> dict[int, int]:
    (claim,) = pool.claim_batch([_request(*numbers, keep=keep)]).claims
    slots = dict(zip(numbers, claim.uses[0].slots, strict=True))
    claim.commit()
    claim.release()
    return slots


def _recovered(memory: bytearray, layout: Layout = _ONE) -> SlotPool:
    pool = _pool(_open(memory, layout))
    pool.recover()
    return pool


def _known(pool: SlotPool, most: int = 40) -> set[int]:
    return {number for number in range(most) if pool.holds(_key(number))}


def test_what_was_committed_is_there_again_in_its_slots() -> None:
    memory = _memory()
    slots = _store(_pool(_sealed(memory)), 1, 2, 3)
    found = _open(memory)
    assert found.identity == _IDENTITY
    pool = _pool(found)
    assert pool.recover() == 3
    assert sorted(pool.recovered_hashes()) == [_key(1), _key(2), _key(3)]
    (claim,) = pool.claim_batch([_request(3, 9, 1)]).claims
    assert (claim.uses[0].slots[0], claim.uses[0].slots[2]) == (slots[3], slots[1])
    assert claim.uses[0].slots[1] not in slots.values()
    assert _known(pool) == {1, 2, 3}


def test_nothing_is_valid_before_its_commit_and_its_slot_is_quarantined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = _memory()
    pool = _pool(_sealed(memory))
    _store(pool, 1)
    (claim,) = pool.claim_batch([_request(2, 3)]).claims
    writing = set(claim.uses[0].slots)
    again = _recovered(memory)
    assert _known(again) == {1}
    assert again.usage()[0].free == 9
    (other,) = again.claim_batch([_request(*range(10, 19))]).claims
    assert not writing & set(other.uses[0].slots)
    other.release()
    monkeypatch.setattr("hostprep.slots.pool.time.monotonic", lambda: float("inf"))
    (last,) = again.claim_batch([_request(*range(20, 32))]).claims
    assert writing <= set(last.uses[0].slots)


def test_a_slot_that_is_used_again_no_longer_vouches_for_what_it_held() -> None:
    memory = _memory()
    pool = _pool(_sealed(memory))
    _store(pool, *range(12))
    pool.claim_batch([_request(20, 21)])
    assert _known(_recovered(memory)) == set(range(10))


def test_evicted_blocks_stay_recorded_until_their_slots_are_used() -> None:
    memory = _memory()
    pool = SlotPool(_ONE, hash_bytes=8, spare=0.5, directory=_sealed(memory))
    _store(pool, *range(12))
    _store(pool, 20)
    assert len(_known(pool)) < 12
    assert len(_known(_recovered(memory))) == 12


def test_of_two_records_of_one_key_the_newest_counts() -> None:
    memory = _memory()
    found = _sealed(memory)
    for slot in (5, 7, 2):
        generation = found.new_generation()
        found.begin(0, [slot], generation)
        found.finish(0, [slot], [_key(1)], generation)
    (kept,) = _open(memory).read()
    assert kept.slots == {_key(1): 2}


def test_a_late_writer_records_nothing_in_a_slot_that_another_began() -> None:
    memory = _memory()
    found = _sealed(memory)
    late, newer = found.new_generation(), found.new_generation()
    found.begin(0, [4, 5], late)
    found.begin(0, [5], newer)
    found.finish(0, [4, 5], [_key(1), _key(2)], late)
    (kept,) = _open(memory).read()
    assert (kept.slots, kept.writing) == ({_key(1): 4}, [5])


def test_generations_go_on_behind_the_recovered_ones() -> None:
    memory = _memory()
    pool = _pool(_sealed(memory))
    for number in range(6):
        _store(pool, number)
    found = _open(memory)
    found.read()
    assert found.new_generation() == 7


@pytest.mark.parametrize("forget", [Directory.void, lambda found: found.reset(_IDENTITY)])
def test_what_began_before_a_reset_is_never_recorded(forget: Callable[[Directory], None]) -> None:
    memory = _memory()
    found = _sealed(memory)
    pool = _pool(found)
    _store(pool, 1)
    (claim,) = pool.claim_batch([_request(2)]).claims
    forget(found)
    claim.commit()
    assert not _known(_recovered(memory))
    found.reset(_IDENTITY)
    claim.release()
    _store(pool, 3)
    assert _known(_recovered(memory)) == {3}


def test_forgetting_voids_the_records() -> None:
    memory = _memory()
    pool = _pool(_sealed(memory))
    _store(pool, 1, 2)
    pool.forget_unclaimed()
    _store(pool, 3)
    found = _open(memory)
    assert (found.identity, found.problem) == (None, None)
    assert not _known(_recovered(memory))


def test_the_count_is_what_a_recovery_would_find() -> None:
    memory = _memory()
    found = _sealed(memory)
    pool = _pool(found)
    _store(pool, *range(9))
    _store(pool, 20, keep=False)
    (claim,) = pool.claim_batch([_request(30)]).claims
    assert found.count() == _open(memory).count() == len(_known(_recovered(memory))) == 9
    found.reset(_IDENTITY)
    assert found.count() == 0
    assert _open(memory).read()[0].writing, "a dead engine's copies may still land there"
    claim.release()
    _store(pool, 40, 41)
    assert found.count() == 2
    found.void()
    assert found.count() == 0


def test_a_request_that_is_not_to_be_kept_is_not() -> None:
    memory = _memory()
    pool = _pool(_sealed(memory))
    _store(pool, 1)
    _store(pool, 2, keep=False)
    assert _known(pool) == {1, 2}
    assert _known(_recovered(memory)) == {1}


def test_what_another_left_unwritten_is_recorded_by_who_takes_it_over() -> None:
    memory = _memory()
    pool = _pool(_sealed(memory))
    first, second = pool.claim_batch([_request(1), _request(1)]).claims
    first.release()
    pool.take_over(second)
    second.commit()
    second.release()
    assert _known(_recovered(memory)) == {1}


def test_what_was_used_last_is_evicted_last() -> None:
    memory = _memory()
    for at, numbers in ((0, (1, 2, 3, 4)), (9, (5, 6, 7, 8)), (20, (1, 2))):
        found = _open(memory, clock=1.8e9 + at)
        if found.identity is None:
            found.reset(_IDENTITY)
        pool = _pool(found)
        pool.recover()
        _store(pool, *numbers)
    pool = _recovered(memory)
    order = pool._groups[0].order.oldest_first()
    assert pool._groups[0].index.keys(order) == [_key(n) for n in (4, 3, 8, 7, 6, 5, 2, 1)]
    touched = memoryview(memory)[12 * _RECORD :][:48].cast("I")
    assert [value & 1 for value in touched[:8]] == [1, 1, 0, 0, 0, 0, 0, 0]


def test_another_layout_finds_the_header_and_voids_it() -> None:
    """An engine, another one with fewer and larger slots, then the first one again."""
    many, few = (Layout(16, (Group("kv", slots, 4096 // slots),)) for slots in (16, 8))
    sizes = {each: Directory.size_bytes_for(each.groups[0].slots, 8) for each in (many, few)}
    region = memoryview(bytearray(4096 + sizes[many]))

    def opened(layout: Layout) -> Directory:
        return Directory(region[-sizes[layout] :], layout, key_bytes=8)

    opened(many).reset(_IDENTITY)
    other = opened(few)
    assert other.identity is None
    assert "another layout" in str(other.problem)
    other.reset(_IDENTITY)
    assert opened(many).identity is None


def test_records_that_a_late_writer_left_of_another_epoch_count_for_nothing() -> None:
    """It was stopped before its record was written, and goes on after a reset."""
    memory = _memory()
    found = _sealed(memory)
    _store(_pool(found), 1, 2)
    late = bytes(memory[: 12 * _RECORD])
    found.reset(_IDENTITY)
    memory[: 12 * _RECORD] = late
    assert not _known(_recovered(memory))


def test_what_is_touched_counts_as_used_last() -> None:
    memory = _memory()
    _store(_pool(_sealed(memory)), 1, 2, 3)
    pool = _pool(_open(memory, clock=1.8e9 + 9))
    pool.recover()
    pool.touch([_key(3)])
    order = _recovered(memory)._groups[0].order.oldest_first()
    assert pool._groups[0].index.keys(order) == [_key(2), _key(1), _key(3)]


def test_each_group_has_records_of_its_own() -> None:
    memory = _memory(_LAYOUT)
    pool = _pool(_sealed(memory, _LAYOUT))
    (claim,) = pool.claim_batch([_request(1, 2)]).claims
    claim.commit()
    claim.release()
    again = _recovered(memory, _LAYOUT)
    for group, use in enumerate(claim.uses):
        (found,) = again.claim_batch([_request(1, 2)]).claims
        assert list(found.uses[group].slots) == list(use.slots)


@pytest.mark.parametrize(
    ("at", "value", "problem"),
    [
        (0, 88, "other bytes lie there"),
        (8, 2, "its format is version 2"),
        (12, 1, "its header is damaged"),
        (24, 200, "its header is damaged"),
        (32, 7, "its header is damaged"),
        (4100, 88, "its identity is damaged"),
    ],
)
def test_a_header_that_is_not_right_in_every_bit_is_empty(
    at: int, value: int, problem: str
) -> None:
    memory = _memory()
    _store(_pool(_sealed(memory)), 1)
    memory[len(memory) - (64 << 10) + at] ^= value if at != 8 else 3
    found = _open(memory)
    assert found.identity is None
    assert problem in str(found.problem)
    pool = _pool(found)
    assert pool.recover() == 0
    found.reset(_IDENTITY)
    assert _pool(_open(memory)).recover() == 0, "records of the epoch before"


def test_another_layout_of_the_same_size_is_another_directory() -> None:
    memory = _memory()
    _store(_pool(_sealed(memory)), 1)
    found = _open(memory, Layout(1, (Group("kv", 12, 2),)))
    assert "another layout" in str(found.problem)


@given(strategies.integers(0, 12 * _RECORD * 8 - 1))
def test_a_record_with_one_bit_changed_counts_for_nothing(bit: int) -> None:
    memory = _memory()
    slots = _store(_pool(_sealed(memory)), *range(12))
    memory[bit // 8] ^= 1 << bit % 8
    (kept,) = _open(memory).read()
    found = kept.slots
    whole = {_key(number): slot for number, slot in slots.items()}
    spared = bit // 8 % _RECORD >= 32  # behind the key: not covered, and of no meaning
    assert found.items() <= whole.items()
    assert len(found) == (12 if spared else 11)


def test_records_in_others_places_count_for_nothing() -> None:
    memory = _memory()
    _store(_pool(_sealed(memory)), *range(12))
    base = 0
    records = [bytes(memory[base + n * _RECORD : base + (n + 1) * _RECORD]) for n in range(12)]
    memory[base : base + 12 * _RECORD] = b"".join([*records[1:], records[0]])
    assert not _known(_recovered(memory))


def test_what_no_directory_can_be_is_refused() -> None:
    with pytest.raises(BadInputError, match="12 slots is 69632 writable bytes"):
        Directory(memoryview(bytearray(10)), _ONE, key_bytes=8)
    with pytest.raises(BadInputError, match="read-only"):
        Directory(memoryview(bytes(_memory())), _ONE, key_bytes=8)
    with pytest.raises(BadInputError, match="key_bytes is 256"):
        _ = Directory(memoryview(_memory()), _ONE, key_bytes=256)
    found = _sealed(_memory())
    with pytest.raises(BadInputError, match="at most 61440"):
        found.reset({"a": "x" * 61440})
    assert found.identity is None
    with pytest.raises(BadInputError, match="keys of 8 bytes"):
        SlotPool(_ONE, directory=found)
    with pytest.raises(BadInputError, match="no directory"):
        SlotPool(_ONE).recover()
    pool = _pool(found)
    pool.recover()
    with pytest.raises(BadInputError, match="in use"):
        pool.recover()


def _attachment(memory: bytearray) -> Any:
    region = SimpleNamespace(name="r0", layout=None, size_bytes=len(memory))
    return _Attachment(region, memoryview(memory))


class _Attachment:
    is_leader = True

    def __init__(self, region: SimpleNamespace, buffer: memoryview) -> None:
        self.region = region
        self.buffer = buffer


def test_a_connector_of_its_own_keeps_blocks_by_their_identity() -> None:
    memory = bytearray(4096) + _memory()
    _store(over(_attachment(memory), layout=_ONE, hash_bytes=8, keep=_IDENTITY), 1, 2)
    again = over(_attachment(memory), layout=_ONE, hash_bytes=8, keep=_IDENTITY)
    assert len(again.recovered_hashes()) == 2
    other = over(_attachment(memory), layout=_ONE, hash_bytes=8, keep={**_IDENTITY, "weights": "x"})
    assert not other.recovered_hashes()
    back = over(_attachment(memory), layout=_ONE, hash_bytes=8, keep=_IDENTITY)
    assert not back.recovered_hashes(), "void for good"
    with pytest.raises(BadInputError, match="leaves 69628"):
        over(_attachment(memory[: 69632 + 8]), layout=_ONE, hash_bytes=8, keep=_IDENTITY)


def test_slots_without_a_directory_void_the_one_that_an_earlier_process_left() -> None:
    memory = bytearray(4096) + _memory()
    _store(over(_attachment(memory), layout=_ONE, hash_bytes=8, keep=_IDENTITY), 1, 2)
    _store(over(_attachment(memory), layout=_ONE, hash_bytes=8), 3, 4)
    again = over(_attachment(memory), layout=_ONE, hash_bytes=8, keep=_IDENTITY)
    assert not again.recovered_hashes()


def _checked(memory: bytearray) -> SlotPool:
    attachment = _attachment(memory)
    return over(attachment, layout=_WIDE, hash_bytes=8, spare=0, keep=_IDENTITY, checksum=True)


def _wide_memory() -> bytearray:
    return bytearray(Directory.size_bytes_for(12, 8) + 4096)


def test_with_checksums_a_block_whose_bytes_changed_is_not_there() -> None:
    memory = _wide_memory()
    memory[: 12 * 64] = bytes(at % 251 for at in range(12 * 64))
    pool = _checked(memory)
    slots = _store(pool, 1, 2, 3)
    assert _known(_checked(memory)) == {1, 2, 3}
    memory[64 * slots[2] + 63] ^= 1
    again = _checked(memory)
    assert (_known(again), again.damaged_blocks) == ({1, 3}, 1)
    (claim,) = again.claim_batch([_request(*range(10, 20))]).claims
    assert slots[2] in claim.uses[0].slots
    claim.release()
    memory[64 * slots[2] + 63] ^= 1
    last = _checked(memory)
    assert (2 in _known(last), last.damaged_blocks) == (False, 0), "its record is void"


def test_a_damaged_checksum_is_no_block() -> None:
    memory = _wide_memory()
    slots = _store(_checked(memory), 1)
    memory[4096 + slots[1] * _RECORD + 12] ^= 1
    assert not _known(_checked(memory))


def test_records_with_and_without_checksums_do_not_count_for_one_another() -> None:
    memory = _wide_memory()
    _store(_checked(memory), 1)
    plain = over(_attachment(memory), layout=_WIDE, hash_bytes=8, keep=_IDENTITY)
    assert not _known(plain)
    _store(plain, 2)
    assert _known(over(_attachment(memory), layout=_WIDE, hash_bytes=8, keep=_IDENTITY)) == {2}
    assert not _known(_checked(memory))


def test_many_blocks_are_read_by_several_threads_and_the_right_ones_are_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hostprep.slots.pool.os.sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    memory = _wide_memory()
    slots = _store(_checked(memory), *range(12))
    for number in (0, 4, 11):
        memory[64 * slots[number]] = 255
    assert _known(_checked(memory)) == set(range(12)) - {0, 4, 11}


def test_checksums_are_of_what_is_kept() -> None:
    with pytest.raises(BadInputError, match="checksum without keep"):
        over(_attachment(_wide_memory()), layout=_WIDE, hash_bytes=8, checksum=True)
    found = Directory(memoryview(_memory()), _ONE, key_bytes=8, checksums=True)
    with pytest.raises(BadInputError, match="checksums"):
        _pool(found)


def test_a_record_names_what_was_claimed_whatever_became_of_the_callers_list() -> None:
    layout = Layout(3, (Group("kv", 4, 1),))
    memory = memoryview(bytearray(Directory.size_bytes_for(4, 4)))
    directory = Directory(memory, layout, key_bytes=4)
    directory.reset({"model": "m"})
    pool = SlotPool(layout, hash_bytes=4, directory=directory)
    changed, shorter = [b"aaaa", b"bbbb"], [b"cccc", b"dddd"]
    claims = pool.claim_batch([Request("r", 6, changed), Request("s", 6, shorter)]).claims
    changed[0] = b"zzzz"
    shorter.clear()
    for claim in claims:
        claim.commit()
        claim.release()
    restarted = SlotPool(
        layout, hash_bytes=4, directory=Directory(memory, layout, key_bytes=4), spare=0
    )
    assert restarted.recover() == 4
    assert sorted(restarted.recovered_hashes()) == [b"aaaa", b"bbbb", b"cccc", b"dddd"]
