"""Eight threads and one pool: nobody's slot is another's, and the sums are right."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter

import pytest

from hostprep.slots import (
    REUSED,
    STORED,
    WRITE,
    Claim,
    Counts,
    Group,
    Layout,
    Request,
    ShortageError,
    SlotPool,
)

pytestmark = pytest.mark.unit

_THREADS = 8
_ROUNDS = 150
_LAYOUT = Layout(4, (Group("full", 120, 1), Group("window", 60, 1, 120, window_tokens=9)))


class Hammer:
    def __init__(self) -> None:
        self.pool = SlotPool(_LAYOUT)
        self.memory: dict[tuple[int, int], bytes] = {}
        self.sums: list[Counts] = []
        self.problems: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.start = threading.Barrier(_THREADS)

    def work(self, seed: int) -> None:
        choose = random.Random(seed)
        mine = Counts()
        self.start.wait()
        try:
            for _ in range(_ROUNDS):
                mine = mine.plus(self._round(choose))
        except Exception as error:
            self.problems.append(f"thread {seed}: {error!r}")
        self.sums.append(mine)

    def _round(self, choose: random.Random) -> Counts:
        requests = [_request(choose) for _ in range(choose.randrange(1, 4))]
        try:
            batch = self.pool.claim_batch(requests)
        except ShortageError:
            self.outcomes["short"] += 1
            return Counts()
        total = Counts()
        for claim in batch.claims:
            self._use(claim, write=choose.random() < 0.8)
            total = total.plus(claim.counts)
        batch.release()
        self.outcomes["done"] += 1
        return total

    def _use(self, claim: Claim, *, write: bool) -> None:
        for group, use in enumerate(claim.uses):
            for key, slot, kind in zip(claim.request.hashes, use.slots, use.kinds, strict=True):
                if kind in {REUSED, STORED} and self.memory.get((group, slot)) != key:
                    self.problems.append(f"slot {slot} of group {group} holds another block")
                if kind == WRITE and write:
                    self.memory[group, slot] = key
                    self.outcomes["written"] += 1
        if write:
            claim.commit()


def _request(choose: random.Random) -> Request:
    name, blocks = choose.randrange(40), choose.randrange(1, 16)
    shared = min(blocks, choose.choice((0, 4)))
    hashes = [
        hashlib.sha256(f"{'all' if i < shared else name}:{shared}:{i}".encode()).digest()
        for i in range(blocks)
    ]
    return Request(f"r{name}", blocks * 4 + 1, hashes)


def test_eight_threads_hammer_one_pool() -> None:
    hammer = Hammer()
    threads = [threading.Thread(target=hammer.work, args=(n,)) for n in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not hammer.problems, hammer.problems[:5]
    assert hammer.outcomes["done"] > _THREADS * _ROUNDS // 4
    assert hammer.outcomes["written"] > 1000
    total = Counts()
    for mine in hammer.sums:
        total = total.plus(mine)
    assert hammer.pool.totals() == total
    assert hammer.pool.open_claims() == 0
    assert [usage.claimed for usage in hammer.pool.usage()] == [0, 0]
