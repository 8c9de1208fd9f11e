"""What one batch gets, case by case."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from hostprep.errors import BadInputError, FailedError
from hostprep.slots import (
    OUTSIDE,
    RECURRENT,
    REUSED,
    SHARED,
    STORED,
    WRITE,
    Claim,
    Group,
    Layout,
    Missing,
    ShortageError,
    SlotPool,
)
from tests.unit.slots.play import HASH_BYTES, hashes_of, request_of

pytestmark = pytest.mark.unit

A, B, C = [1] * 13, [2] * 13, [3] * 13  # four blocks of three tokens, and one token


def _pool(slots: int = 12, *more: Group) -> SlotPool:
    return SlotPool(Layout(3, (Group("full", slots, 1), *more)), hash_bytes=HASH_BYTES)


def _store(pool: SlotPool, *sequences: list[int]) -> None:
    for tokens in sequences:
        (claim,) = pool.claim_batch([request_of(tokens)]).claims
        claim.commit()
        claim.release()


def _kinds(claim: Claim, group: int = 0) -> list[int]:
    return list(claim.uses[group].kinds)


def test_a_stored_prompt_is_reused_but_for_its_last_token() -> None:
    pool = _pool()
    _store(pool, A)
    (claim,) = pool.claim_batch([request_of(A)]).claims
    assert _kinds(claim) == [REUSED] * 4
    assert (claim.reused_tokens, claim.compute_tokens) == (12, 1)
    (shorter,) = pool.claim_batch([request_of(A[:12])]).claims
    assert _kinds(shorter) == [REUSED] * 3 + [STORED], "its last token has to be computed"
    (whole,) = pool.claim_batch([request_of(A[:12], limit=12)]).claims
    assert whole.reused_tokens == 12


def test_what_a_later_request_matches_is_not_evicted_for_an_earlier_one() -> None:
    pool = _pool(8)
    _store(pool, A, B)
    batch = pool.claim_batch([request_of(C), request_of(A)])
    assert _kinds(batch.claims[0]) == [WRITE] * 4
    assert _kinds(batch.claims[1]) == [REUSED] * 4
    assert [claim.counts.evicted for claim in batch.claims] == [4, 0]
    assert [claim.counts.reused for claim in batch.claims] == [0, 4]


def test_the_last_blocks_of_the_least_recent_go_first() -> None:
    pool = _pool(8)
    _store(pool, A, B, A)
    _store(pool, C[:9])
    assert [pool.holds(key) for key in hashes_of(B)] == [True, False, False, False]
    assert all(pool.holds(key) for key in hashes_of(A))


def test_a_shortage_says_what_is_missing_and_changes_nothing() -> None:
    pool = _pool(8, Group("window", 3, 1, 8, window_tokens=4))
    _store(pool, A)
    held = pool.claim_batch([request_of(B)])
    order = pool._groups[0].order.oldest_first()
    with pytest.raises(ShortageError) as caught:
        pool.claim_batch([request_of(A), request_of(C)])
    assert caught.value.missing == (Missing("full", 4, 0, 8), Missing("window", 3, 0, 3))
    assert "group 'full' lacks 4 slots (4 needed, 0 of 8 not claimed)" in str(caught.value)
    assert "release claims" in str(caught.value)
    assert pool._groups[0].order.oldest_first() == order
    assert pool.open_claims() == 1
    held.release()
    assert len(pool.claim_batch([request_of(A)]).claims) == 1


def test_a_batch_that_never_fits_is_told_so() -> None:
    with pytest.raises(ShortageError, match="split the batch"):
        _pool(3).claim_batch([request_of(A)])


def test_two_requests_that_share_what_nobody_has() -> None:
    pool = _pool(6)
    one, other = A, [*A[:6], *B[6:]]
    first, second = pool.claim_batch([request_of(one), request_of(other)]).claims
    assert _kinds(first) == [WRITE] * 4
    assert _kinds(second) == [SHARED, SHARED, WRITE, WRITE], "6 slots for 6 different blocks"
    assert list(first.uses[0].slots[:2]) == list(second.uses[0].slots[:2])
    assert (first.compute_tokens, second.compute_tokens) == (13, 13), "both compute it"
    first.commit()
    assert pool.take_over(second) == 0
    assert _kinds(second) == [STORED, STORED, WRITE, WRITE]


def test_what_a_writer_gives_up_another_writes() -> None:
    pool = _pool(6)
    first, second = pool.claim_batch([request_of(A), request_of(A)]).claims
    first.release()
    assert not pool.holds(hashes_of(A)[0])
    assert pool.take_over(second) == 0
    assert _kinds(second) == [WRITE] * 4
    second.commit()
    second.release()
    assert all(pool.holds(key) for key in hashes_of(A))


def test_what_was_not_committed_is_forgotten() -> None:
    pool = _pool()
    (claim,) = pool.claim_batch([request_of(A)]).claims
    claim.commit(2)
    claim.release()
    assert [pool.holds(key) for key in hashes_of(A)] == [True, True, False, False]
    (usage,) = pool.usage()
    assert (usage.claimed, usage.cached, usage.free) == (0, 2, 10)


def test_the_budget_admits_in_order() -> None:
    pool = _pool(20)
    _store(pool, A)
    requests = [request_of(A), request_of(B), request_of(C)]
    batch = pool.claim_batch(requests, token_budget=15)
    assert batch.compute_tokens == 14
    assert batch.deferred == (requests[2],)
    assert pool.open_claims() == 2


def test_only_the_blocks_behind_what_the_gpu_has_are_loaded() -> None:
    pool = _pool(4)
    _store(pool, A)
    _store(pool, B[:3])  # evicts the last block of A
    (claim,) = pool.claim_batch([request_of(A, computed=6, store=False)]).claims
    assert _kinds(claim) == [OUTSIDE, OUTSIDE, REUSED, OUTSIDE]
    assert (claim.reused_tokens, claim.compute_tokens) == (3, 4)


def test_a_window_keeps_its_end_and_is_resumed_there() -> None:
    pool = _pool(8, Group("window", 8, 1, 8, window_tokens=4))
    _store(pool, A)
    (claim,) = pool.claim_batch([request_of(A)]).claims
    assert _kinds(claim, 1) == [OUTSIDE, OUTSIDE, STORED, REUSED]
    (claim,) = pool.claim_batch([request_of(A[:12])]).claims
    assert _kinds(claim, 1) == [OUTSIDE, OUTSIDE, REUSED, STORED]
    (claim,) = pool.claim_batch([request_of(A[:7])]).claims
    assert claim.reused_tokens == 0, "block 1 is in no window that was kept"
    assert _kinds(claim, 0) == [STORED, STORED]


def test_a_state_is_kept_for_the_end_and_not_for_chunks() -> None:
    pool = _pool(8, Group("state", 2, 1, 8, kind=RECURRENT))
    _store(pool, A)
    (claim,) = pool.claim_batch([request_of(A)]).claims
    assert (_kinds(claim, 1), claim.reused_tokens) == ([OUTSIDE] * 3 + [REUSED], 12)
    claim.release()
    chunk = request_of(B[:6])
    chunk = type(chunk)(**{**vars(chunk), "prompt_tokens": 13})
    before = pool.usage()
    with pytest.raises(BadInputError, match="chunk of 6 of 13 tokens") as caught:
        pool.claim_batch([request_of(C), chunk])
    assert caught.value.reason == "RecurrentStateInChunks"
    assert pool.usage() == before


def test_blocks_are_handed_out_in_a_row() -> None:
    pool = _pool(9)
    _store(pool, A, B)
    (claim,) = pool.claim_batch([request_of([7] * 27)]).claims
    assert list(claim.uses[0].slots) == list(range(9))


def test_a_hash_that_comes_twice_in_a_request() -> None:
    pool = _pool(4)
    request = request_of(A)
    twice = type(request)(**{**vars(request), "hashes": [request.hashes[0]] * 4})
    for kinds in ([WRITE, SHARED, SHARED, SHARED], [REUSED] * 4):
        (claim,) = pool.claim_batch([twice]).claims
        assert _kinds(claim) == kinds
        claim.commit()
        claim.release()
        assert [usage.claimed for usage in pool.usage()] == [0]


def _release_twice(pool: SlotPool) -> None:
    (claim,) = pool.claim_batch([request_of(A)]).claims
    claim.release()
    claim.release()


def test_a_batch_is_released_whole_even_if_a_claim_of_it_was_before() -> None:
    pool = _pool(12)
    batch = pool.claim_batch([request_of(A), request_of(B), request_of(C)])
    batch.claims[0].release()
    with pytest.raises(BadInputError, match="is not open"):
        batch.release()
    assert pool.open_claims() == 0


def _commit_released(pool: SlotPool) -> None:
    (claim,) = pool.claim_batch([request_of(A)]).claims
    claim.release()
    claim.commit()


def _release_anothers(pool: SlotPool) -> None:
    (claim,) = _pool().claim_batch([request_of(A)]).claims
    pool.release(claim)


@pytest.mark.parametrize("misuse", [_release_twice, _commit_released, _release_anothers])
def test_a_claim_ends_once(misuse: Callable[[SlotPool], None]) -> None:
    with pytest.raises(BadInputError, match="is not open in this pool"):
        misuse(_pool())


def test_a_forked_child_is_told_whose_index_it_is() -> None:
    pool = _pool()
    child = os.fork()
    if child == 0:
        try:
            pool.claim_batch([request_of(A)])
        except FailedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.open_claims() == 0
