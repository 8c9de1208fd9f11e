"""Tickets: claims that wait for slots are served in order of arrival, however much they need."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from hostprep.errors import BadInputError, BusyError
from hostprep.slots import (
    RECURRENT,
    Claim,
    Directory,
    Group,
    Layout,
    Request,
    ShortageError,
    SlotPool,
    Ticket,
)
from hostprep.slots import line as line_module
from hostprep.slots.line import Line

pytestmark = pytest.mark.unit

_SLOTS = 12
_BY_NOW_S = 60.0
"""Nothing takes as long: a test that hangs fails."""


def _pool(*more: Group) -> SlotPool:
    return SlotPool(Layout(1, (Group("kv", _SLOTS, 1), *more)), hash_bytes=4, spare=0)


class _Names:
    """Requests whose blocks nobody else has."""

    def __init__(self) -> None:
        self._last = 0

    def request(self, blocks: int) -> Request:
        hashes = [(self._last + at).to_bytes(4, "big") for at in range(blocks)]
        self._last += blocks
        return Request(f"r{self._last}", blocks, hashes)


_NAMES = _Names()


def _claim(pool: SlotPool, blocks: int, ticket: Ticket | None = None, **how: bool) -> Claim:
    (claim,) = pool.claim_batch([_NAMES.request(blocks)], ticket=ticket, **how).claims
    return claim


def _is_short(
    pool: SlotPool, blocks: int, ticket: Ticket | None = None, **how: bool
) -> ShortageError:
    with pytest.raises(ShortageError) as caught:
        _claim(pool, blocks, ticket, **how)
    return caught.value


def test_what_a_waiting_claim_needs_is_kept_for_it() -> None:
    pool = _pool()
    small = [_claim(pool, 2) for _ in range(5)]
    with pool.line_up() as first, pool.line_up() as second:
        _claim(pool, 2).release()
        _is_short(pool, 8, first)
        error = _is_short(pool, 1)
        assert str(error.missing[0]) == (
            "group 'kv' lacks 7 slots (1 needed, 2 of 12 not claimed, 8 of them for claims that "
            "wait in line)"
        )
        _is_short(pool, 1, second)
        for claim in small[:4]:
            claim.release()
        assert pool.usage()[0].claimed == 2
        assert second.wait(0.0), "there is room for both"
        _claim(pool, 1, second)
        _is_short(pool, 2, None)
        _claim(pool, 1)
        assert _claim(pool, 8, first).counts.written == 8
    assert pool.usage()[0].claimed == _SLOTS


def test_a_claim_goes_ahead_where_that_is_said() -> None:
    pool = _pool()
    _claim(pool, 6)
    with pool.line_up() as ticket:
        _is_short(pool, 8, ticket)
        _is_short(pool, 3)
        _claim(pool, 3, ahead=True)
        with pytest.raises(BadInputError, match="not both"):
            _claim(pool, 1, ticket, ahead=True)


def test_what_takes_nothing_from_those_who_wait_is_served() -> None:
    pool = _pool()
    request = _NAMES.request(6)
    (first,) = pool.claim_batch([request]).claims
    first.commit()
    with pool.line_up() as ticket:
        _is_short(pool, 8, ticket)
        (again,) = pool.claim_batch([request]).claims
        assert again.counts.stored + again.counts.reused == 6
        again.release()
        assert pool.claim_blocks(request.hashes, store=False).counts.reused == 6
        first.release()


def test_what_is_cached_is_kept_for_those_who_wait_too() -> None:
    """Read by one after the other, a claim that waits for its slots would never be served."""
    pool = _pool()
    request = _NAMES.request(6)
    (first,) = pool.claim_batch([request]).claims
    first.commit()
    first.release()
    _claim(pool, 6)
    with pool.line_up() as ticket:
        _is_short(pool, 8, ticket)
        for read in (
            partial(pool.claim_blocks, request.hashes, store=False),
            partial(pool.claim_batch, [request]),
        ):
            with pytest.raises(ShortageError, match=r"0 needed, 0 of 12 not claimed, 8 of them"):
                read()
        assert pool.usage()[0].cached == 6
        assert pool.claim_blocks(request.hashes, store=False, ahead=True).counts.reused == 6


def test_each_group_keeps_what_is_needed_of_it() -> None:
    pool = _pool(Group("state", 2, 1, _SLOTS, kind=RECURRENT))
    request = Request("r", 9, _NAMES.request(9).hashes)
    (held,) = pool.claim_batch([request]).claims
    with pool.line_up() as ticket:
        (full,) = _is_short(pool, 4, ticket).missing
        assert (full.group, full.needed, full.reserved) == ("kv", 4, 0)
        assert ticket.needs == (4, 1)
        short = _is_short(pool, 2).missing
        assert [(lack.group, lack.needed, lack.reserved) for lack in short] == [
            ("kv", 2, 4),
            ("state", 1, 1),
        ]
        held.release()
        _claim(pool, 1)
        assert _claim(pool, 4, ticket).counts.written == 5


def test_a_ticket_serves_one_claim_of_its_own_pool() -> None:
    pool = _pool()
    ticket = pool.line_up()
    _claim(pool, 1, ticket)
    uses: list[Callable[[], object]] = [
        lambda: _claim(pool, 1, ticket),
        lambda: _claim(pool, 1, _pool().line_up()),
        lambda: pool.claim_blocks([b"abcd"], ticket=ticket),
    ]
    for use in uses:
        with pytest.raises(BadInputError, match="is not in this pool's line") as caught:
            use()
        assert caught.value.reason == "TicketUsed"
    ticket.leave()
    with pool.line_up() as left:
        left.leave()
    with pytest.raises(BadInputError, match="is not in"):
        _claim(pool, 1, left)


def test_what_never_fits_reserves_nothing_and_is_not_waited_for() -> None:
    pool = _pool()
    with pool.line_up() as ticket:
        assert ticket.wait(0.0), "not refused yet"
        assert "split the batch" in str(_is_short(pool, _SLOTS + 1, ticket))
        assert not ticket.wait(_BY_NOW_S)
        assert not asyncio.run(ticket.wait_async(_BY_NOW_S))
        _claim(pool, _SLOTS)


def test_a_line_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "MOST_WAITING", 3)
    pool = _pool()
    tickets = [pool.line_up() for _ in range(3)]
    with pytest.raises(BusyError, match="wait in line") as caught:
        pool.line_up()
    assert caught.value.reason == "LineFull"
    tickets.pop()
    pool.line_up()


def test_the_end_of_a_ticket_that_nobody_has_wakes_those_behind_it() -> None:
    pool = _pool()
    _claim(pool, 6)
    dead = pool.line_up()
    _is_short(pool, 8, dead)
    with pool.line_up() as living:
        _is_short(pool, 2, living)
        assert not living.wait(0.0)
        waking = threading.Thread(target=_drop, args=([dead],))
        del dead
        waking.start()
        assert living.wait(_BY_NOW_S)
        waking.join()
        _claim(pool, 2, living)


def _drop(tickets: list[Ticket]) -> None:
    tickets.clear()
    gc.collect()  # the ShortageError's frames had it too


@pytest.mark.parametrize("ends", ["leaves", "is served"])
def test_those_behind_are_woken_when_a_place_is_given_up(ends: str) -> None:
    pool = _pool()
    held = _claim(pool, 8)
    first, second = pool.line_up(), pool.line_up()
    _is_short(pool, 8, first)
    _is_short(pool, 4, second)
    assert not second.wait(0.0)
    if ends == "leaves":
        first.leave()
        assert second.wait(0.0)
        _claim(pool, 4, second)
        return
    held.release()
    assert first.wait(0.0)
    assert second.wait(0.0)
    _claim(pool, 8, first)
    _claim(pool, 4, second)


def _take(pool: SlotPool, blocks: int, wait_s: float = _BY_NOW_S) -> Claim:
    """As a thread does that waits for its turn."""
    with pool.line_up() as ticket:
        while True:
            try:
                return _claim(pool, blocks, ticket)
            except ShortageError:
                if not ticket.wait(wait_s):
                    raise


def test_a_wait_ends() -> None:
    pool = _pool()
    _claim(pool, _SLOTS)
    with pytest.raises(ShortageError):
        _take(pool, 1, wait_s=0.01)
    assert not pool._line.tickets


def test_threads_are_served_in_the_order_in_which_they_came() -> None:
    pool = _pool()
    held = [_claim(pool, 1) for _ in range(_SLOTS)]
    sizes = [3, 1, 12, 2, 5, 11, 1, 1, 12, 7]
    served: list[int] = []

    def work(number: int) -> None:
        claim = _take(pool, sizes[number])
        served.append(number)
        claim.release()

    threads = []
    for number in range(len(sizes)):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
        while sum(1 for ticket in pool._line._in_order() if ticket.needs) <= number:
            threads[-1].join(0.001)
    order = [len(ticket.needs) and ticket.needs[0] for ticket in pool._line._in_order()]
    assert order == sizes
    for claim in held:
        claim.release()
    for thread in threads:
        thread.join(_BY_NOW_S)
    assert sorted(served) == list(range(len(sizes)))
    largest, later = sizes.index(12), {3, 4, 5, 6, 7, 8, 9}
    assert not later & set(served[: served.index(largest)]), "others came ahead of the largest"
    assert pool.open_claims() == 0


def _shares(take: Callable[[SlotPool, int], Claim | None]) -> Counter[str]:
    """Return how often each was served: one that needs 10 of 12 slots beside 8 that need 2 each.

    In steps, as a scheduler asks for those who wait: each holds its slots for some steps.
    """
    pool, served = _pool(), Counter[str]()
    running: list[tuple[int, str, Claim]] = []
    waiting = ["large", *(f"small {n}" for n in range(8))]
    for step in range(2000):
        for ends, name, claim in list(running):
            if ends <= step:
                claim.release()
                running.remove((ends, name, claim))
                waiting.append(name)
        for name in list(waiting):
            got = take(pool, 10 if name == "large" else 2)
            if got is not None:
                served["large" if name == "large" else "small"] += 1
                waiting.remove(name)
                running.append((step + 2 + (step + len(running)) % 3, name, got))
    return served


def test_a_large_claim_beside_small_ones_has_its_share() -> None:
    tickets: dict[int, Ticket] = {}

    def in_turn(pool: SlotPool, blocks: int) -> Claim | None:
        """The large one has a ticket; the small ones ask whenever they like."""
        ticket = None if blocks == 2 else tickets.setdefault(id(pool), pool.line_up())
        try:
            claim = _claim(pool, blocks, ticket)
        except ShortageError:
            return None
        tickets.pop(id(pool), None) if ticket else None
        return claim

    def at_random(pool: SlotPool, blocks: int) -> Claim | None:
        try:
            return _claim(pool, blocks)
        except ShortageError:
            return None

    without, fair = _shares(at_random), _shares(in_turn)
    assert without["large"] <= 2, "it would be served without"
    assert fair["large"] >= 2000 // 16, "a turn takes no longer than what runs, and itself"
    assert fair["small"] > fair["large"], "and leaves the rest to others"


def test_an_event_loop_waits_without_blocking() -> None:
    pool = _pool()
    served: list[int] = []

    async def work(number: int, blocks: int) -> None:
        with pool.line_up() as ticket:
            while True:
                try:
                    claim = _claim(pool, blocks, ticket)
                    break
                except ShortageError:
                    assert await ticket.wait_async(_BY_NOW_S)
        served.append(number)
        await asyncio.sleep(0)
        claim.release()

    async def main() -> None:
        held = _claim(pool, _SLOTS)
        tasks = [asyncio.create_task(work(n, blocks)) for n, blocks in enumerate((12, 1, 9, 12))]
        cancelled = asyncio.create_task(work(9, 12))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.to_thread(held.release)  # of another thread
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert served == [0, 1, 2, 3]
    assert pool.open_claims() == 0
    assert not pool._line.tickets


def test_a_wait_in_an_event_loop_ends() -> None:
    pool = _pool()
    _claim(pool, _SLOTS)
    with pool.line_up() as ticket:
        _is_short(pool, 1, ticket)
        assert not asyncio.run(ticket.wait_async(0.01))
        pool.leave_line(ticket)
        assert asyncio.run(ticket.wait_async(0.01)), "somebody gave its place up"


def test_what_is_no_longer_reserved_wakes_those_behind() -> None:
    pool = _pool()
    _claim(pool, 6)
    first, second = pool.line_up(), pool.line_up()
    _is_short(pool, 12, first)
    _is_short(pool, 2, second)
    assert not second.wait(0.0)
    _is_short(pool, _SLOTS + 1, first)
    assert second.wait(0.0), "nothing is kept for a claim that never fits"
    _claim(pool, 2, second)


def test_of_a_full_line_only_those_are_looked_at_for_whom_there_may_be_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, woken = _pool(), Counter[int]()
    held = [_claim(pool, 1) for _ in range(_SLOTS)]
    tickets = [pool.line_up() for _ in range(line_module.MOST_WAITING)]
    for ticket in tickets:
        with pytest.raises(ShortageError):
            _claim(pool, 2, ticket)
    own = Ticket.wake

    def wake(self: Ticket) -> None:
        woken[self.number] += 1
        own(self)

    monkeypatch.setattr(Ticket, "wake", wake)
    asked, needs = 0, pool._line._in_order

    def in_order() -> Iterator[Ticket]:
        nonlocal asked
        for ticket in needs():
            asked += 1
            yield ticket

    monkeypatch.setattr(pool._line, "_in_order", in_order)
    held.pop().release()
    assert not woken, "one slot is free, and each needs two"
    held.pop().release()
    assert set(woken) == {tickets[0].number}
    assert asked < 10, "those behind the first one were asked too"
    woken.clear()
    del ticket
    tickets.pop(1000)
    gc.collect()
    assert set(woken) == {ticket.number for ticket in tickets[1000:]}, "those behind it"
    for ticket in tickets:
        ticket.leave()
    assert not pool._line.tickets


@pytest.mark.parametrize("in_loop", [False, True])
def test_those_who_wait_are_awake_when_a_quarantine_ends(in_loop: bool) -> None:
    """With nobody else at hand, as in an engine that starts again: its first large request."""
    layout = Layout(1, (Group("kv", _SLOTS, 1),))
    memory = memoryview(bytearray(Directory.size_bytes_for(_SLOTS, 4)))
    directory = Directory(memory, layout, key_bytes=4)
    directory.reset({"model": "m"})
    _claim(SlotPool(layout, hash_bytes=4, spare=0, directory=directory), 8)
    directory = Directory(memory, layout, key_bytes=4)
    pool = SlotPool(layout, hash_bytes=4, spare=0, directory=directory)
    pool.recover(quarantine_s=1.0)
    with pool.line_up() as ticket:
        _is_short(pool, 6, ticket)
        assert not ticket.wait(0.0)
        while ticket.needs:
            awake = asyncio.run(ticket.wait_async(60)) if in_loop else ticket.wait(60)
            assert awake
            with suppress(ShortageError):  # it may be a moment early
                _claim(pool, 6, ticket)


def test_a_line_that_keeps_nothing_for_those_in_it_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Line, "reserved", lambda self, groups, ticket: [0] * groups)
    with pytest.raises(AssertionError, match="a turn takes no longer"):
        test_a_large_claim_beside_small_ones_has_its_share()


def test_a_pool_that_wakes_nobody_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "_wake", lambda self: None)
    with pytest.raises(AssertionError):
        test_those_behind_are_woken_when_a_place_is_given_up("is served")
