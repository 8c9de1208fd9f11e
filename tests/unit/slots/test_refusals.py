"""Layouts and requests that make no sense are refused, naming the field; nothing is changed."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hostprep.errors import BadInputError, BusyError
from hostprep.slots import Group, Layout, OverBudgetError, Request, SlotPool, over

pytestmark = pytest.mark.unit

_GROUP = {"name": "kv", "slots": 4, "slot_bytes": 100, "offset_bytes": 0}
_LAYOUT = {"tokens_per_block": 3, "groups": [_GROUP]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "layout: not an object"),
        ({}, "groups is not a list"),
        ({"tokens_per_block": 3, "groups": []}, "no groups"),
        ({"groups": [_GROUP]}, "tokens_per_block is 0"),
        ({**_LAYOUT, "tokens_per_block": True}, "tokens_per_block is True"),
        ({**_LAYOUT, "groups": [7]}, r"groups\[0\] is not an object"),
        ({**_LAYOUT, "groups": [{"name": "kv"}]}, "lacks slots, slot_bytes, offset_bytes"),
        ({**_LAYOUT, "groups": [{**_GROUP, "name": 7}]}, "name is not a string"),
        ({**_LAYOUT, "groups": [{**_GROUP, "slots": 0}]}, "slots is 0"),
        ({**_LAYOUT, "groups": [{**_GROUP, "slots": 1 << 32}]}, "slots is 4294967296"),
        ({**_LAYOUT, "groups": [{**_GROUP, "slot_bytes": 1.5}]}, "slot_bytes is 1.5"),
        ({**_LAYOUT, "groups": [{**_GROUP, "offset_bytes": -1}]}, "offset_bytes is -1"),
        ({**_LAYOUT, "groups": [{**_GROUP, "window_tokens": 0}]}, "window_tokens is 0"),
        ({**_LAYOUT, "groups": [{**_GROUP, "kind": "odd"}]}, "kind is 'odd'"),
        (
            {**_LAYOUT, "groups": [{**_GROUP, "kind": "recurrent", "window_tokens": 5}]},
            "a recurrent group has no window_tokens",
        ),
        ({**_LAYOUT, "groups": [_GROUP, _GROUP]}, "two groups of one name"),
        (
            {**_LAYOUT, "groups": [_GROUP, {**_GROUP, "name": "b", "offset_bytes": 399}]},
            "begins at 399, inside group 'kv', which ends at 400",
        ),
        (
            {**_LAYOUT, "groups": [{**_GROUP, "offset_bytes": 1000}]},
            "ends at 1400, and the region at 1000",
        ),
    ],
)
def test_a_layout_that_is_none(document: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        Layout.parse(document, 1000)
    assert caught.value.exit_code == 2


def test_a_layout_that_fits() -> None:
    layout = Layout.parse({**_LAYOUT, "groups": [{**_GROUP, "offset_bytes": 600}]}, 1000)
    assert layout.offset_bytes(0, 3) == 900
    with pytest.raises(BadInputError, match="slots 0 to 3"):
        layout.offset_bytes(0, 4)


def _request(**changes: Any) -> Request:
    fields = {"id": "r", "tokens": 7, "hashes": [b"a" * 4, b"b" * 4], **changes}
    return Request(**fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 10}, "2 hashes for 3 full blocks"),
        ({"tokens": -1}, "tokens is -1"),
        ({"tokens": 7.0}, "tokens is 7.0"),
        ({"computed_tokens": 8}, "computed_tokens is 8, more than its 7 tokens"),
        ({"first_block": 1, "hashes": [b"bbbb"]}, "beyond the 0 computed_tokens"),
        ({"reuse_limit_tokens": -2}, "reuse_limit_tokens is -2"),
        ({"hashes": [b"aaaa", b"bbb"]}, "a hash of 3 bytes: this pool's have 4"),
        ({"hashes": [b"aaaa", "bbbb"]}, "hashes are bytes"),
        ({"hashes": iter([b"aaaa", b"bbbb"])}, "hashes is a list_iterator: a list or a tuple"),
        ({"hashes": {b"aaaa", b"bbbb"}}, "hashes is a set: a list or a tuple"),
        ({"hashes": b"aaaabbbb"}, "hashes is a bytes: a list or a tuple"),
        ({"token_ids": [1, 2]}, "token_ids has 2 of 7 tokens"),
        ({"token_ids": iter([1, 2])}, "token_ids is a list_iterator: a list, a tuple or an array"),
        ({"token_ids": deque(range(7))}, "token_ids is a deque: a list, a tuple or an array"),
    ],
)
def test_a_request_that_is_none(changes: dict[str, Any], message: str) -> None:
    pool = SlotPool(Layout(3, (Group("kv", 4, 1),)), hash_bytes=4)
    with pytest.raises(BadInputError, match=message):
        pool.claim_batch([_request(), _request(**changes)])
    assert pool.open_claims() == 0
    assert pool.usage()[0].free == 4


@pytest.mark.parametrize("ids", [[-1] * 7, [1 << 32] * 7, [0.5] * 7])
def test_tokens_that_cannot_be_kept_are_refused_before_they_are_written(ids: list[Any]) -> None:
    pool = SlotPool(Layout(3, (Group("kv", 4, 1),)), hash_bytes=4, partial=True)
    with pytest.raises(BadInputError, match="whole numbers from 0"):
        pool.claim_batch([_request(token_ids=ids)])
    assert pool.open_claims() == 0


def _nothing_stays(pool: SlotPool) -> None:
    assert pool.open_claims() == 0
    assert [usage.free for usage in pool.usage()] == [4]
    (claim,) = pool.claim_batch([_request()]).claims
    claim.release()


def test_a_batch_is_any_iterable_and_one_that_breaks_claims_nothing() -> None:
    pool = SlotPool(Layout(3, (Group("kv", 4, 1),)), hash_bytes=4)

    def broken() -> Iterator[Request]:
        yield _request()
        raise LookupError

    with pytest.raises(LookupError):
        pool.claim_batch(broken())
    with pytest.raises(BadInputError, match="'no request' is no Request"):
        pool.claim_batch(iter([_request(), "no request"]))  # type: ignore[arg-type]
    _nothing_stays(pool)
    batch = pool.claim_batch((_request(id=name) for name in "abc"), token_budget=14)
    assert [claim.request.id for claim in batch.claims] == ["a", "b"]
    assert [request.id for request in batch.deferred] == ["c"]
    batch.release()


def test_hashes_of_any_sequence() -> None:
    pool = SlotPool(Layout(3, (Group("kv", 4, 1),)), hash_bytes=4)
    for kind in (list, tuple, deque, UserList):
        for store in (True, False):
            request = _request(hashes=kind([b"aaaa", b"bbbb"]), store=store)
            (claim,) = pool.claim_batch([request]).claims
            claim.commit()
            claim.release()
    assert pool.usage()[0].cached == 2


class _Tail(UserList[bytes]):
    """A sequence that breaks when it is read."""

    def __iter__(self) -> Iterator[bytes]:
        raise LookupError


def test_a_sequence_that_breaks_claims_nothing() -> None:
    pool = SlotPool(Layout(3, (Group("kv", 4, 1),)), hash_bytes=4)
    with pytest.raises(LookupError):
        pool.claim_batch([_request(), _request(hashes=_Tail([b"aaaa", b"cccc"]))])
    with pytest.raises(LookupError):
        pool.claim_blocks(_Tail([b"aaaa"]))
    _nothing_stays(pool)


def test_single_blocks_of_any_iterable() -> None:
    pool = SlotPool(Layout(1, (Group("kv", 4, 1),)), hash_bytes=4)
    claim = pool.claim_blocks(iter([b"aaaa", b"bbbb"]))
    claim.commit()
    claim.release()
    pool.touch(key for key in (b"aaaa", b"bb", "bbbb", 7))  # type: ignore[misc]
    assert pool.claim_blocks((key for key in [b"aaaa"]), store=False).counts.reused == 1
    for bad in (["aaaa"], [b"aaaa", 7], "aaaa"):
        with pytest.raises(BadInputError, match="hashes are bytes"):
            pool.claim_blocks(bad)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="a hash is bytes"):
        pool.holds("aaaa")  # type: ignore[arg-type]


def test_a_first_request_that_never_fits_the_budget_is_refused_and_none_waits_behind_it() -> None:
    pool = SlotPool(Layout(3, (Group("kv", 4, 1),)), hash_bytes=4)
    with pytest.raises(OverBudgetError, match=r"'r' has 7 tokens .* budget is 6") as caught:
        pool.claim_batch([_request(), _request(id="s", tokens=1, hashes=[])], token_budget=6)
    assert (caught.value.compute_tokens, caught.value.token_budget) == (7, 6)
    assert caught.value.request.id == "r"
    _nothing_stays(pool)
    left = pool.claim_batch([_request()], token_budget=3, largest_budget=7)
    assert [request.id for request in left.deferred] == ["r"]
    with pytest.raises(OverBudgetError, match="budget is 6"):
        pool.claim_batch([_request()], token_budget=3, largest_budget=6)
    later = pool.claim_batch([_request(id="s", tokens=1, hashes=[]), _request()], token_budget=6)
    assert [request.id for request in later.deferred] == ["r"], "those before it are served"


def test_keys_of_another_length() -> None:
    pool = SlotPool(Layout(3, (Group("kv", 4, 1),)))
    with pytest.raises(BadInputError, match="4 bytes: not 32"):
        pool.holds(b"aaaa")
    with pytest.raises(BadInputError, match="at least one byte"):
        SlotPool(Layout(3, (Group("kv", 4, 1),)), hash_bytes=0)


@pytest.mark.parametrize("spare", [-0.1, 1.0, float("nan")])
def test_a_share_of_spare_slots_that_cannot_be_is_refused(spare: float) -> None:
    with pytest.raises(BadInputError, match="spare is"):
        SlotPool(Layout(3, (Group("kv", 4, 1),)), spare=spare)


class _Attachment:
    def __init__(self, region: SimpleNamespace, *, is_leader: bool) -> None:
        self.region = region
        self.is_leader = is_leader
        self.buffer = memoryview(bytearray(region.size_bytes))


def _attachment(*, is_leader: bool = True, **changes: Any) -> Any:
    region = {"name": "r0", "layout": _LAYOUT, "size_bytes": 1000, **changes}
    return _Attachment(SimpleNamespace(**region), is_leader=is_leader)


def test_one_pool_over_a_region_and_only_the_leaders() -> None:
    with pytest.raises(BadInputError, match="is not this process's") as caught:
        over(_attachment(is_leader=False))
    assert caught.value.reason == "NotTheLeader"
    with pytest.raises(BadInputError, match="has no layout"):
        over(_attachment(layout=None))
    with pytest.raises(BadInputError, match="ends at 400, and the region at 300"):
        over(_attachment(size_bytes=300))
    attachment = _attachment()
    pool = over(attachment, hash_bytes=4)
    with pytest.raises(BusyError, match="has a pool over region r0"):
        over(attachment)
    assert over(_attachment()).layout == pool.layout, "the same region, attached once more"
    del pool
    assert over(attachment).hash_bytes == 32


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ([_request(), _request(hashes=[b"a"])], {}, "1 hashes for 2"),
        ([_request(tokens=7)], {"token_budget": 0}, "budget is 0"),
        ([_request(), _request(id="s"), 5], {"token_budget": 7}, "5 is no Request"),
        ([_request()], {"token_budget": "x"}, "token_budget is 'x'"),
        ([_request()], {"token_budget": 7, "largest_budget": 1.5}, "largest_budget is 1.5"),
        ([_request()], {"ticket": "x"}, "ticket is 'x'"),
    ],
)
def test_a_callers_error_costs_nobody_a_pause(
    batch: Any, options: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is made again for it, which takes as long as the pool is large."""
    pool = SlotPool(Layout(3, (Group("kv", 4, 1),)), hash_bytes=4)
    (held,) = pool.claim_batch([_request()]).claims
    held.commit()
    monkeypatch.setattr("hostprep.slots.pool.make_again", _is_not_called)
    with pytest.raises(BadInputError, match=message):
        pool.claim_batch(batch, **options)
    for blocks in ("x", 1.5):
        with pytest.raises(BadInputError, match=f"commit: blocks is {blocks!r}"):
            held.commit(blocks)  # type: ignore[arg-type]
    held.release()
    with pytest.raises(BadInputError, match="is not open"):
        held.release()
    assert pool.usage()[0].claimed == 0
    assert sum(pool._groups[0].refs) == 0


def _is_not_called(*_: object, **__: object) -> None:
    pytest.fail("all was made again")
