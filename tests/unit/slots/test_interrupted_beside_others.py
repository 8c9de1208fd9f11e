"""Exceptions from outside while other threads use the pool: no slot has two claims.

Python looks for signals, and for exceptions that another thread sent, when a call ends: that of
the lock's release too. What the step claimed is to be taken back then, and nothing that others
claimed since.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType

import pytest

from hostprep.errors import BadInputError, FailedError
from hostprep.slots import WRITE, Group, Layout, Request, ShortageError, SlotPool
from hostprep.slots.step import Step
from tests.unit.slots.interrupting import InterruptError

pytestmark = pytest.mark.unit

_SLOTS = 20


class _Lock:
    """A pool's lock. Once, right after it is released, others come first; then it raises."""

    def __init__(self) -> None:
        self._own = threading.Lock()
        self.others: Callable[[], object] | None = None

    def __enter__(self) -> None:
        self._own.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._own.release()
        others, self.others = self.others, None
        if others is not None:
            beside(others)
            raise InterruptError

    def locked(self) -> bool:
        return self._own.locked()


def beside(work: Callable[[], object]) -> None:
    """Run it in another thread, to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class _Pool:
    def __init__(self) -> None:
        self.lock = _Lock()
        self.pool = SlotPool(Layout(1, (Group("kv", _SLOTS, 1),)), hash_bytes=4, spare=0)
        self.pool._lock = self.lock  # type: ignore[assignment]
        self._names = 0

    def request(self, blocks: int) -> Request:
        first, self._names = self._names, self._names + blocks
        hashes = [name.to_bytes(4, "big") for name in range(first, first + blocks)]
        return Request(f"r{first}", blocks, hashes)

    def claim(self, blocks: int) -> list[int]:
        (claim,) = self.pool.claim_batch([self.request(blocks)]).claims
        return list(claim.uses[0].slots)


@pytest.mark.parametrize("how", ["batch", "blocks"])
def test_what_another_claimed_before_it_was_taken_back_stays_claimed(how: str) -> None:
    at = _Pool()
    theirs: list[int] = []
    request = at.request(5)
    at.lock.others = lambda: theirs.extend(at.claim(10))
    claim: Callable[[], object] = partial(at.pool.claim_batch, [request])
    if how == "blocks":
        claim = partial(at.pool.claim_blocks, request.hashes)
    with pytest.raises(InterruptError):
        claim()
    assert at.pool.open_claims() == 1
    ours = at.claim(_SLOTS - 10)
    assert len(theirs) == 10
    assert not set(ours) & set(theirs), "two claims have one slot"
    assert at.pool.usage()[0].claimed == _SLOTS


@pytest.mark.parametrize("is_repaired_by", ["itself", "another"])
def test_a_claim_that_is_taken_back_gives_the_place_in_line_back(
    is_repaired_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes it back, and with what was reserved for it."""
    at = _Pool()
    (held,) = at.pool.claim_batch([at.request(_SLOTS)]).claims
    ticket, wake, undo = at.pool.line_up(), SlotPool._wake, SlotPool._undo
    request = at.request(10)
    with pytest.raises(ShortageError):
        at.pool.claim_batch([request], ticket=ticket)
    held.release()

    def interrupted(self: SlotPool) -> None:
        monkeypatch.setattr(SlotPool, "_wake", wake)
        raise InterruptError

    def after_another(self: SlotPool, step: Step) -> None:
        beside(self.usage)
        undo(self, step)

    monkeypatch.setattr(SlotPool, "_wake", interrupted)
    if is_repaired_by == "another":
        monkeypatch.setattr(SlotPool, "_undo", after_another)
    with pytest.raises(InterruptError):
        at.pool.claim_batch([request], ticket=ticket)
    assert at.pool.open_claims() == 0
    with pytest.raises(ShortageError, match="10 of them for claims that wait"):
        at.claim(11)
    assert at.pool.claim_batch([request], ticket=ticket).claims[0].counts.written == 10


def test_a_place_is_given_back_too_where_the_step_had_ended() -> None:
    at = _Pool()
    ticket = at.pool.line_up()
    request = at.request(5)
    at.lock.others = at.pool.usage
    with pytest.raises(InterruptError):
        at.pool.claim_batch([request], ticket=ticket)
    assert at.pool.claim_batch([request], ticket=ticket).claims
    ticket.leave()


_USES: dict[str, Callable[[SlotPool], object]] = {
    "usage": SlotPool.usage,
    "totals": SlotPool.totals,
    "open_claims": SlotPool.open_claims,
    "holds": lambda pool: pool.holds(b"abcd"),
    "line_up": SlotPool.line_up,
    "claim_blocks": lambda pool: pool.claim_blocks([b"abcd"]),
}


@pytest.mark.parametrize("use", _USES.values(), ids=_USES)
def test_a_child_that_was_forked_while_the_lock_was_held_is_refused(
    use: Callable[[SlotPool], object],
) -> None:
    """It would wait for ever for a thread that it does not have."""
    pool = _Pool().pool
    with pool._lock:
        child = os.fork()
        if not child:
            signal.alarm(30)
            try:
                use(pool)
            except FailedError as error:
                os._exit(0 if error.reason == "OtherProcess" else 2)
            finally:
                os._exit(3)
    assert os.waitpid(child, 0)[1] == 0


class _Stop(BaseException):
    pass


def test_threads_that_are_stopped_anywhere_never_write_to_one_slot(play_s: float) -> None:
    """Four threads claim and write what each owns; one after the other is sent exceptions."""
    pool = SlotPool(Layout(1, (Group("kv", 16, 1),)), hash_bytes=4, spare=0.1)
    writers: dict[int, object] = {}
    wrong: list[str] = []
    claiming = [False] * 4
    ends_s = time.monotonic() + play_s
    served = [0] * 4

    def work(number: int) -> None:
        choose = random.Random(number)
        while time.monotonic() < ends_s and not wrong:
            with suppress(_Stop, ShortageError):
                turn(number, choose)

    def turn(number: int, choose: random.Random) -> None:
        name, blocks, held = choose.randrange(6), choose.randrange(1, 6), None
        hashes = [bytes([name, block, 0, 0]) for block in range(blocks)]
        try:
            claiming[number] = True
            try:
                held = pool.claim_batch([Request("r", blocks, hashes)], ahead=True).claims[0]
            finally:
                claiming[number] = False
            mine = [held.uses[0].slots[block] for block in held.uses[0].blocks(WRITE)]
            wrong.extend(f"slot {slot} has two writers" for slot in mine if slot in writers)
            writers.update(dict.fromkeys(mine, held))
            time.sleep(choose.random() * 1e-4)
            served[number] += 1
        finally:
            while held is not None:
                with suppress(_Stop):
                    for slot in [at for at, by in list(writers.items()) if by is held]:
                        del writers[slot]
                    with suppress(BadInputError):  # released when it was stopped
                        held.release()
                    held = None

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    choose = random.Random(7)
    while time.monotonic() < ends_s and not wrong:
        number = choose.randrange(4)
        if claiming[number]:
            _send(threads[number])
        time.sleep(choose.random() * 1e-3)
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert sum(served) > 20


def _send(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop)
    )


@pytest.fixture
def play_s() -> Iterator[float]:
    """Seconds to play; threads take turns as often as they can meanwhile."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield 2.0
    sys.setswitchinterval(before)
