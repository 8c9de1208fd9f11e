"""Blocks that begin alike: so many tokens are copied, and the rest computed."""

from __future__ import annotations

import pytest

from hostprep.errors import BadInputError
from hostprep.slots import RECURRENT, STORED, WRITE, Claim, Group, Layout, Request, SlotPool
from tests.unit.slots.play import HASH_BYTES, hashes_of, request_of

pytestmark = pytest.mark.unit

_FULL = Group("full", 8, 1)


def _pool(*groups: Group) -> SlotPool:
    return SlotPool(Layout(3, groups or (_FULL,)), hash_bytes=HASH_BYTES, partial=True)


def _request(tokens: list[int], limit: int | None = None) -> Request:
    request = request_of(tokens, limit=limit)
    return Request(**{**vars(request), "token_ids": tokens})


def _claim(pool: SlotPool, tokens: list[int], limit: int | None = None) -> Claim:
    (claim,) = pool.claim_batch([_request(tokens, limit)]).claims
    return claim


def _store(pool: SlotPool, tokens: list[int]) -> Claim:
    claim = _claim(pool, tokens)
    claim.commit()
    claim.release()
    return claim


def test_the_longest_match_is_copied_and_its_source_claimed() -> None:
    pool = _pool()
    _store(pool, [1, 1, 1, 2, 9, 9])
    source = _store(pool, [1, 1, 1, 2, 2, 9])
    claim = _claim(pool, [1, 1, 1, 2, 2, 2, 5])
    assert claim.partial is not None
    assert (claim.partial.block, claim.partial.tokens) == (1, 2)
    assert claim.partial.slots == (source.uses[0].slots[1],)
    assert list(claim.uses[0].kinds)[1] == WRITE
    assert (claim.reused_tokens, claim.compute_tokens) == (5, 2)
    filled = pool.claim_batch([request_of([7] * 12)])  # all that is left but the source
    assert claim.partial.slots[0] not in filled.claims[0].uses[0].slots
    claim.release()
    filled.release()
    assert [usage.claimed for usage in pool.usage()] == [0]


@pytest.mark.parametrize("is_emptied", [True, False])
def test_what_was_in_a_slot_before_is_not_taken_for_what_is_in_it(is_emptied: bool) -> None:
    pool = SlotPool(Layout(3, (Group("full", 3, 1),)), hash_bytes=HASH_BYTES, partial=True)
    _store(pool, [1, 1, 1, 2, 2, 9])
    if is_emptied:
        pool.forget_unclaimed()
    for tokens in ([1, 1, 1], [4] * 6):  # without tokens: nothing new is known of these
        (claim,) = pool.claim_batch([request_of(tokens)]).claims
        claim.commit()
        claim.release()
    claim = _claim(pool, [1, 1, 1, 2, 2, 2, 5])
    assert claim.partial is None


def test_a_block_that_may_not_be_reused_whole_is_reused_in_part() -> None:
    pool = _pool()
    _store(pool, [1] * 6)
    claim = _claim(pool, [1] * 6)
    assert claim.partial is not None
    assert (claim.partial.block, claim.partial.tokens) == (1, 2)
    assert list(claim.uses[0].kinds)[1] == STORED
    assert claim.compute_tokens == 1
    claim.release()
    assert [usage.claimed for usage in pool.usage()] == [0]


def test_the_first_block_and_a_rest_that_is_no_block() -> None:
    pool = _pool()
    _store(pool, [4, 5, 6, 7, 8, 9])
    first, rest = _claim(pool, [4, 5, 1]), _claim(pool, [4, 5, 6, 7, 8])
    assert (first.partial.tokens if first.partial else 0) == 2
    assert (rest.partial.tokens if rest.partial else 0) == 1, "its last token has to be computed"


def test_none_where_a_group_lacks_the_block() -> None:
    pool = _pool(_FULL, Group("window", 3, 1, 8, window_tokens=2))
    _store(pool, [1, 1, 1, 2, 2, 2])
    claim = _claim(pool, [1, 1, 1, 2, 2, 5])
    assert claim.partial is not None
    claim.release()
    _store(pool, [3, 3, 3, 4, 4, 4])
    assert pool.holds(hashes_of([1, 1, 1, 2, 2, 2])[1])
    assert not pool.holds(hashes_of([1, 1, 1, 2, 2, 2])[1], 1)
    assert _claim(pool, [1, 1, 1, 2, 2, 5]).partial is None


def test_a_source_is_let_go_where_its_slot_is_needed() -> None:
    pool = _pool(Group("full", 2, 1))
    _store(pool, [1, 1, 1])
    claim = _claim(pool, [1, 1, 2, 3, 3, 3])
    assert claim.partial is None
    assert (claim.compute_tokens, claim.counts.evicted) == (6, 1)


def test_an_evicted_block_is_no_source() -> None:
    pool = _pool(Group("full", 2, 1))
    _store(pool, [1, 1, 1, 2, 2, 2])
    _store(pool, [3, 3, 3, 4, 4, 4])
    assert _claim(pool, [1, 1, 9]).partial is None


def test_what_is_not_written_is_no_source() -> None:
    pool = _pool()
    _claim(pool, [1, 1, 1])
    assert _claim(pool, [1, 1, 2]).partial is None


def test_states_cannot_be_cut() -> None:
    with pytest.raises(BadInputError, match="recurrent state cannot be cut"):
        _pool(_FULL, Group("state", 2, 1, 8, kind=RECURRENT))


def test_what_is_remembered_is_what_was_claimed_whatever_became_of_the_callers_lists() -> None:
    pool = SlotPool(Layout(3, (Group("kv", 8, 1),)), hash_bytes=4, partial=True)
    ids, hashes = [1, 2, 3, 4, 5, 6, 7], [b"aaaa", b"bbbb"]
    (claim,) = pool.claim_batch([Request("r", 7, hashes, token_ids=ids)]).claims
    ids[3:6] = [8, 9, 9]
    hashes[0] = b"zzzz"
    claim.commit()
    claim.release()
    for second, tokens in (([4, 5, 7], 2), ([8, 9, 7], 0)):
        ask = Request("s", 7, [b"aaaa", b"cccc"], token_ids=[1, 2, 3, *second, 7], store=False)
        (found,) = pool.claim_batch([ask]).claims
        assert (found.partial.tokens if found.partial else 0) == tokens
        found.release()
