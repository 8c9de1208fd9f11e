"""A pool and its reference side by side, and the bytes that its slots would hold."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import pytest

from hostprep.slots import (
    OUTSIDE,
    RECURRENT,
    REUSED,
    STORED,
    WRITE,
    Claim,
    Counts,
    Group,
    Layout,
    OverBudgetError,
    Request,
    ShortageError,
    SlotPool,
)
from hostprep.slots.group import MISSING
from hostprep.slots.index import HashIndex
from tests.unit.slots.reference import Held, ReferencePool

TOKENS_PER_BLOCK = 3
HASH_BYTES = 8
WINDOWS = Layout(
    TOKENS_PER_BLOCK,
    (Group("full", 9, 1), Group("near", 6, 1, 9, window_tokens=5), Group("here", 3, 1, 15, 1)),
)
STATES = Layout(TOKENS_PER_BLOCK, (Group("full", 8, 1), Group("state", 4, 1, 8, kind=RECURRENT)))
ONLY_WINDOWS = Layout(TOKENS_PER_BLOCK, (Group("a", 5, 1, 0, 4), Group("b", 5, 1, 5, 8)))
LAYOUTS = (WINDOWS, STATES, ONLY_WINDOWS)


def hashes_of(tokens: Sequence[int], first_block: int = 0) -> list[bytes]:
    """A chain: each block's hash is over all tokens up to its end."""
    ends = range(TOKENS_PER_BLOCK, len(tokens) + 1, TOKENS_PER_BLOCK)
    chain = [hashlib.sha256(bytes(tokens[:end])).digest()[:HASH_BYTES] for end in ends]
    return chain[first_block:]


def request_of(
    tokens: Sequence[int],
    *,
    computed: int = 0,
    first_block: int = 0,
    limit: int | None = None,
    store: bool = True,
    name: str = "r",
) -> Request:
    return Request(
        id=name,
        tokens=len(tokens),
        hashes=hashes_of(tokens, first_block),
        computed_tokens=computed,
        first_block=first_block,
        reuse_limit_tokens=limit,
        store=store,
    )


class Play:
    """Every step is made on both, and everything that can be seen is compared."""

    def __init__(self, layout: Layout, spare: float = 0.0, *, has_table: bool = False) -> None:
        """`has_table`: as in groups of many slots."""
        self.layout = layout
        self.pool = SlotPool(layout, hash_bytes=HASH_BYTES, keep_evicted=True, spare=spare)
        for slots in self.pool._groups if has_table else ():
            slots.index = HashIndex(slots.group.slots, HASH_BYTES)
        self.model = ReferencePool(layout, spare)
        self.open: list[tuple[Claim, Held]] = []
        self.memory: dict[tuple[int, int], bytes] = {}
        """What was last written into each slot of each group."""
        self.sum = Counts()

    def claim(self, requests: Sequence[Request], budget: int | None = None) -> None:
        expected = self.model.claim_batch(requests, budget)
        before = self._seen()
        if expected is None:
            with pytest.raises(ShortageError):
                self.pool.claim_batch(requests, token_budget=budget)
            assert self._seen() == before, "a shortage changed something"
            return
        if requests and not expected:
            with pytest.raises(OverBudgetError):
                self.pool.claim_batch(requests, token_budget=budget)
            assert self._seen() == before, "a request beyond the budget changed something"
            batch = self.pool.claim_batch(requests, token_budget=budget, largest_budget=10**6)
            assert batch.deferred == tuple(requests)
            assert not batch.claims
            assert self._seen() == before, "what is deferred changed something"
            return
        batch = self.pool.claim_batch(requests, token_budget=budget)
        held = expected
        assert len(batch.claims) + len(batch.deferred) == len(requests)
        assert len(batch.claims) == len(held), "another number admitted"
        if budget is not None:
            assert sum(claim.compute_tokens for claim in batch.claims) <= budget
        for claim, one in zip(batch.claims, held, strict=True):
            self._check_claim(claim, one)
            self.sum = self.sum.plus(claim.counts)
            self.open.append((claim, one))
        self.check()

    def _check_claim(self, claim: Claim, held: Held) -> None:
        assert [list(use.kinds) for use in claim.uses] == held.kinds
        assert claim.unwritten == held.unwritten
        counts, kinds = claim.counts, [kind for use in claim.uses for kind in use.kinds]
        assert counts.blocks == len(kinds)
        assert counts.reused == kinds.count(REUSED)
        assert counts.written == kinds.count(WRITE)
        assert (
            counts.reused + counts.stored + counts.shared + counts.written + counts.outside
            == counts.blocks
        )
        assert counts.computed_tokens + counts.reused_tokens + counts.compute_tokens == (
            counts.tokens
        ), "tokens do not add up"
        assert [list(use.evicted) for use in claim.uses] == held.evicted
        assert counts.evicted == sum(map(len, held.evicted))
        for group, use in enumerate(claim.uses):
            for key, slot, kind in zip(claim.request.hashes, use.slots, use.kinds, strict=True):
                assert (slot < 0) == (kind == OUTSIDE)
                if kind in {REUSED, STORED}:
                    assert self.memory[group, slot] == key, "the slot holds something else"

    def commit(self, index: int, blocks: int | None) -> None:
        claim, held = self.open[index % len(self.open)]
        for group, unwritten in enumerate(claim.unwritten):
            for block in unwritten:
                if blocks is None or block < blocks:
                    slot = claim.uses[group].slots[block]
                    self.memory[group, slot] = claim.request.hashes[block]
        claim.commit(blocks)
        self.model.commit(held, blocks)
        self.check()

    def take_over(self, index: int) -> None:
        claim, held = self.open[index % len(self.open)]
        before = claim.counts
        assert self.pool.take_over(claim) == self.model.take_over(held)
        self._check_claim(claim, held)
        self.sum = self.sum.plus(
            Counts(
                stored=claim.counts.stored - before.stored,
                shared=claim.counts.shared - before.shared,
                written=claim.counts.written - before.written,
            )
        )
        self.check()

    def release(self, index: int) -> None:
        claim, held = self.open.pop(index % len(self.open))
        claim.release()
        self.model.release(held)
        self.check()

    def touch(self, keys: Sequence[bytes], group: int) -> None:
        self.pool.touch(keys, group)
        self.model.touch(keys, group)
        self.check()

    def forget(self) -> None:
        assert self.pool.forget_unclaimed() == self.model.forget_unclaimed()
        self.check()

    def check(self) -> None:
        assert self.pool.totals() == self.sum, "the totals are not the sum of the claims"
        assert self.pool.open_claims() == len(self.open)
        for index, (slots, model) in enumerate(
            zip(self.pool._groups, self.model.groups, strict=True)
        ):
            order = slots.order.oldest_first()
            assert len(order) == slots.order.count
            assert slots.index.keys(order) == model.in_order(), "another order of eviction"
            claimed: dict[int, bytes] = {}
            for claim, held in self.open:
                for key, slot in zip(claim.request.hashes, claim.uses[index].slots, strict=True):
                    if slot >= 0:
                        assert claimed.setdefault(slot, key) == key, "one slot for two blocks"
                for block, kind in enumerate(held.kinds[index]):
                    slot, key = claim.uses[index].slots[block], held.request.hashes[block]
                    if kind in {REUSED, STORED}:
                        assert self.memory[index, slot] == key, "a claimed block was overwritten"
            assert not claimed.keys() & set(order), "a claimed slot can be evicted"
            assert len(claimed) + len(order) + slots.free.count == slots.group.slots
            assert slots.free.count == slots.state.count(MISSING)
            for key, known in model.blocks.items():
                assert self.pool.holds(key, index) == known.written
            usage = self.pool.usage()[index]
            assert (usage.free, usage.cached) == (model.free, len(model.idle))

    def _seen(self) -> object:
        return [
            (slots.order.oldest_first(), slots.free.count, bytes(slots.state), slots.refs.tolist())
            for slots in self.pool._groups
        ]


def random_request(choose: random.Random, kind: str) -> Request:
    """`whole` sequences hold all of their blocks, so that nothing is there behind a gap.

    Those that are `loaded` may hold their later blocks only, and others (`any`) ask for no others.
    """
    tokens = [choose.randrange(2) // choose.randrange(1, 3) for _ in range(choose.randrange(15))]
    if kind == "whole":
        return request_of(tokens)
    later = choose.randrange(len(tokens) // TOKENS_PER_BLOCK + 1) if kind == "any" else 0
    first_block = choose.choice((0, 0, 0, later))
    least = first_block * TOKENS_PER_BLOCK
    return request_of(
        tokens,
        first_block=first_block,
        computed=choose.choice((least, choose.randint(least, len(tokens)))),
        limit=choose.choice((None, None, len(tokens), choose.randint(0, 15))),
        store=choose.random() < (0.9 if kind == "any" else 0.6),
    )


def play_at_random(seed: int, steps: int = 60) -> None:
    """Random steps; raises where pool and reference differ."""
    choose = random.Random(seed)
    play = Play(choose.choice(LAYOUTS), choose.choice((0.0, 0.0, 0.3)), has_table=bool(seed % 2))
    kind = choose.choice(("whole", "loaded", "any"))
    for _ in range(steps):
        step = choose.randrange(9)
        if step < 3:
            requests = [random_request(choose, kind) for _ in range(choose.randrange(1, 4))]
            play.claim(requests, choose.choice((None, None, choose.randrange(30))))
        elif step == 8 and choose.random() < 0.1:
            play.forget()
        elif step == 8 and choose.random() < 0.2:
            keys = random_request(choose, kind).hashes
            play.touch(keys, choose.randrange(len(play.layout.groups)))
        elif play.open and step < 6:
            play.commit(choose.randrange(9), choose.choice((None, None, choose.randrange(4))))
        elif play.open and step == 6:
            play.take_over(choose.randrange(9))
        elif play.open:
            play.release(choose.randrange(9))
