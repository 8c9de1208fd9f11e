"""A block that is there, and one before it that is not: looked for only where that can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hostprep.slots import (
    STORED,
    WRITE,
    Claim,
    Group,
    Layout,
    Request,
    ShortageError,
    SlotPool,
    batch,
)
from hostprep.slots.batch import Draft
from hostprep.slots.group import SlotGroup
from tests.unit.slots.play import HASH_BYTES

pytestmark = pytest.mark.unit

Patch = pytest.MonkeyPatch
Scene = Callable[[], None]


def _pool(slots: int = 8, *, partial: bool = False) -> SlotPool:
    layout = Layout(1, (Group("full", slots, 1),))
    return SlotPool(layout, hash_bytes=HASH_BYTES, partial=partial, spare=0)


def _hashes(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{block}".encode().ljust(HASH_BYTES) for block in range(blocks)]


def _request(name: str, blocks: int, first_block: int = 0, **options: Any) -> Request:
    hashes = _hashes(name, blocks)[first_block:]
    return Request(name, blocks, hashes, first_block=first_block, **options)


def _claim(pool: SlotPool, request: Request) -> Claim:
    (claim,) = pool.claim_batch([request]).claims
    return claim


def _store(pool: SlotPool, request: Request) -> None:
    claim = _claim(pool, request)
    claim.commit()
    claim.release()


def _gapless(pool: SlotPool) -> bool:
    return pool._groups[0].gapless


def _check_found(pool: SlotPool, *kinds: int) -> None:
    """The last blocks of "a" are found behind those that are not there."""
    assert not _gapless(pool)
    assert list(_claim(pool, _request("a", len(kinds))).uses[0].kinds) == list(kinds)


def later_blocks_held_alone() -> None:
    pool = _pool(5)
    _store(pool, _request("a", 3))
    later = _claim(pool, _request("a", 4, first_block=2, computed_tokens=2))
    later.commit()
    _store(pool, _request("b", 2))
    assert [pool.holds(key) for key in _hashes("a", 4)] == [True, False, True, True]
    _check_found(pool, 1, WRITE, STORED, STORED)


def later_blocks_loaded_alone() -> None:
    pool = _pool(6)
    _store(pool, _request("a", 4))
    later = _request("a", 4, store=False, computed_tokens=2, reuse_limit_tokens=4)
    assert list(_claim(pool, later).uses[0].kinds) == [0, 0, 1, 1]
    _store(pool, _request("b", 3))
    assert [pool.holds(key) for key in _hashes("a", 4)] == [True, False, True, True]
    _check_found(pool, 1, WRITE, STORED, STORED)


def later_blocks_touched_alone() -> None:
    pool = _pool(6)
    _store(pool, _request("a", 4))
    pool.touch(_hashes("a", 4)[2:])
    _store(pool, _request("b", 3))
    assert [pool.holds(key) for key in _hashes("a", 4)] == [True, False, True, True]
    _check_found(pool, 1, WRITE, STORED, STORED)


def a_block_given_up_whose_followers_were_written() -> None:
    pool = _pool()
    writer = _claim(pool, _request("a", 2))
    _store(pool, _request("a", 4))  # the first two are the other's to write
    assert _gapless(pool)
    writer.release()
    assert [pool.holds(key) for key in _hashes("a", 4)] == [False, False, True, True]
    _check_found(pool, WRITE, WRITE, STORED, STORED)


SCENES: list[Scene] = [
    later_blocks_held_alone,
    later_blocks_loaded_alone,
    later_blocks_touched_alone,
    a_block_given_up_whose_followers_were_written,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_what_is_behind_a_gap_is_found(scene: Scene) -> None:
    scene()


def _all_are_whole(patch: Patch) -> None:
    patch.setattr(batch, "Draft", lambda *rest, is_whole: Draft(*rest, is_whole=True))


def _loads_are_whole(patch: Patch) -> None:
    def draft(request: Request, *rest: Any, is_whole: bool) -> Draft:
        return Draft(request, *rest, is_whole=is_whole or not request.first_block)

    patch.setattr(batch, "Draft", draft)


def _touches_are_harmless(patch: Patch) -> None:
    touch = SlotGroup.touch

    def only_moved(self: SlotGroup, slots: Sequence[int]) -> None:
        before = self.gapless
        touch(self, slots)
        self.gapless = before

    patch.setattr(SlotGroup, "touch", only_moved)


def _nothing_is_noted(patch: Patch) -> None:
    patch.setattr(SlotGroup, "note_gaps", lambda self, blocks: None)


@pytest.mark.parametrize(
    ("mutant", "scene"),
    [
        *zip(
            (_all_are_whole, _loads_are_whole, _touches_are_harmless, _nothing_is_noted),
            SCENES,
            strict=True,
        )
    ],
)
def test_a_pool_that_takes_no_note_of_it_is_found(
    mutant: Callable[[Patch], None], scene: Scene, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        scene()


def _written_in_another_order(pool: SlotPool) -> None:
    writer = _claim(pool, _request("a", 2))
    _store(pool, _request("a", 4))
    writer.commit()
    writer.release()


def _looked_up_in_vain(pool: SlotPool) -> None:
    _claim(pool, _request("a", 4, store=False, computed_tokens=2)).release()


def _refused(pool: SlotPool) -> None:
    with pytest.raises(ShortageError):
        _claim(pool, _request("a", 12, first_block=2, computed_tokens=2))


def _given_up(pool: SlotPool) -> None:
    _claim(pool, _request("a", 4)).release()


def _evicted(pool: SlotPool) -> None:
    for name in "abcde":
        _store(pool, _request(name, 3))


def _emptied(pool: SlotPool) -> None:
    later_blocks = _request("a", 4, first_block=2, computed_tokens=2)
    _store(pool, later_blocks)
    assert not _gapless(pool)
    pool.forget_unclaimed()


@pytest.mark.parametrize(
    "harmless",
    [_written_in_another_order, _looked_up_in_vain, _refused, _given_up, _evicted, _emptied],
)
def test_while_there_is_no_gap_nothing_behind_a_miss_is_looked_up(
    harmless: Callable[[SlotPool], None],
) -> None:
    pool = _pool()
    harmless(pool)
    assert _gapless(pool)


def test_a_partial_match_of_a_whole_sequence_leaves_no_gap() -> None:
    pool = SlotPool(Layout(2, (Group("full", 8, 1),)), hash_bytes=HASH_BYTES, partial=True)
    for last in (5, 6):
        ids = [1, 2, 3, last]
        hashes = [*_hashes("a", 1), f"a{last}".encode().ljust(HASH_BYTES)]
        claim = _claim(pool, Request("a", 4, hashes, token_ids=ids, reuse_limit_tokens=4))
        assert (claim.partial is not None) == (last == 6)
        claim.commit()
        claim.release()
    assert _gapless(pool)


def test_what_is_touched_is_evicted_last_the_first_of_it_last_of_all() -> None:
    """What is claimed, not there, or no hash of this pool's is passed by.

    A block that another request has claimed stays for longer than that.
    """
    pool = _pool(6)
    a, b = _hashes("a", 3), _hashes("b", 3)
    _store(pool, _request("a", 3))
    _store(pool, _request("b", 3))
    held = _claim(pool, _request("b", 1))
    pool.touch([a[1], a[2], b[0], *_hashes("c", 1), b"short", a[1]])
    held.release()
    evicted = []
    for name in "defghi":
        before = {key for key in (*a, *b) if pool.holds(key)}
        _store(pool, _request(name, 1))
        evicted += [key for key in before if not pool.holds(key)]
    assert evicted == [a[0], b[2], b[1], a[2], a[1]]
    assert pool.holds(b[0])
