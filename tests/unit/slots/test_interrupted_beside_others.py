"""Exceptions from outside while other threads use the pool: no slot has two claims.

Python looks for signals, and for exceptions that another thread sent, when a call ends: that of
the lock's release too. What the step claimed is to be taken back then, and nothing that others
claimed since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType

import pytest

from hostprep.slots import Group, Layout, Request, SlotPool
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
