"""The fourth seed's mechanism: GPU memory over host memory, and a budget of tokens a step.

Loading a block from the host takes a slot of the GPU, which evicts a block to the host, which
evicts a host block that a later request was counted to reuse: it has to compute more than the
scheduler had budgeted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, strategies

from hostprep.slots import REUSED, Claim, Group, Layout, Request, ShortageError, SlotPool

pytestmark = pytest.mark.unit

_TOKENS_PER_BLOCK = 4


def _chain(name: str, blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}:{block}".encode()).digest() for block in range(blocks)]


def _tier(slots: int) -> SlotPool:
    layout = Layout(_TOKENS_PER_BLOCK, (Group("kv", slots, 1),))
    return SlotPool(layout, keep_evicted=True)


class Tiers:
    """An engine with both tiers; a prompt is whole blocks and one token more."""

    def __init__(self, gpu_slots: int, host_slots: int) -> None:
        self.gpu = _tier(gpu_slots)
        self.host = _tier(host_slots)

    def request(self, name: str, blocks: int, *, on_gpu: int = 0) -> Request:
        size = _TOKENS_PER_BLOCK
        return Request(name, blocks * size + 1, _chain(name, blocks), on_gpu * size)

    def run(self, request: Request) -> None:
        """Compute a request and let it go: its blocks stay on the GPU, others move down."""
        (claim,) = self.gpu.claim_batch([request]).claims
        self.offload(claim)
        claim.commit()
        claim.release()

    def offload(self, claim: Claim) -> None:
        """Move to the host what made room on the GPU, in the order in which it went."""
        for evicted in (one for use in claim.uses for one in use.evicted):
            # A block of its own: the host's index does not ask what came before it.
            block = Request("down", _TOKENS_PER_BLOCK, [evicted], _TOKENS_PER_BLOCK)
            try:
                (down,) = self.host.claim_batch([block]).claims
            except ShortageError:  # the host is full of claims: the block is dropped
                continue
            down.commit()
            down.release()

    def found(self, request: Request) -> tuple[int, int]:
        """Look without claiming: blocks on the GPU, and on the host behind them."""
        on_gpu = next(
            (i for i, key in enumerate(request.hashes) if not self.gpu.holds(key)),
            len(request.hashes),
        )
        rest = request.hashes[on_gpu:]
        on_host = next((i for i, key in enumerate(rest) if not self.host.holds(key)), len(rest))
        return on_gpu, on_host

    def lift(self, request: Request) -> int:
        """Load what the host has, take slots for all of it. Returns the tokens to compute."""
        on_gpu, on_host = self.found(request)
        have = (on_gpu + on_host) * _TOKENS_PER_BLOCK
        loading = Request(request.id, request.tokens, request.hashes, on_gpu * _TOKENS_PER_BLOCK)
        (claim,) = self.gpu.claim_batch([loading]).claims
        self.offload(claim)
        claim.commit()
        return request.tokens - have


def count_then_take(tiers: Tiers, requests: Sequence[Request], budget: int) -> int:
    """Admit by what was counted, then take one by one. Returns the tokens that were computed."""
    admitted, left = [], budget
    for request in requests:
        left -= request.tokens - sum(tiers.found(request)) * _TOKENS_PER_BLOCK
        if left < 0:
            break
        admitted.append(request)
    return sum(tiers.lift(request) for request in admitted)


def claim_batches(tiers: Tiers, requests: Sequence[Request], budget: int) -> int:
    """Claim the whole batch on the host, then take slots of the GPU."""
    counted = [
        Request(r.id, r.tokens, r.hashes, tiers.found(r)[0] * _TOKENS_PER_BLOCK, store=False)
        for r in requests
    ]
    batch = tiers.host.claim_batch(counted, token_budget=budget, largest_budget=1000)
    gpu = tiers.gpu.claim_batch([claim.request_to_store() for claim in map(_Lifted, batch.claims)])
    for claim in gpu.claims:
        tiers.offload(claim)
        claim.commit()
    computed = 0
    for claim in batch.claims:
        for block in claim.uses[0].blocks(REUSED):  # what was claimed is there to be loaded
            assert tiers.host.holds(claim.request.hashes[block])
        computed += claim.compute_tokens
        claim.release()
    return computed


class _Lifted:
    """A claim on the host, as the request that the GPU gets for it."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    def request_to_store(self) -> Request:
        wanted = self._claim.request
        return Request(wanted.id, wanted.tokens, wanted.hashes, wanted.computed_tokens)


def _seed_case() -> tuple[Tiers, list[Request]]:
    """Two prompts on the host, the GPU full of others, the host full."""
    tiers = Tiers(gpu_slots=8, host_slots=8)
    for name in ("second", "first", "x", "y"):
        tiers.run(tiers.request(name, 4))
    return tiers, [tiers.request("first", 4), tiers.request("second", 4)]


def test_count_then_take_overflows_the_budget() -> None:
    tiers, requests = _seed_case()
    assert [tiers.found(request) for request in requests] == [(0, 4), (0, 4)]
    assert count_then_take(tiers, requests, budget=8) > 8


def test_claim_batch_stays_within_the_budget() -> None:
    tiers, requests = _seed_case()
    assert claim_batches(tiers, requests, budget=8) == 2


Way = Callable[[Tiers, Sequence[Request], int], int]


def _compute(way: Way, names: list[str], again: list[str], slots: int, budget: int) -> int:
    tiers = Tiers(gpu_slots=slots, host_slots=slots)
    for name in names:
        tiers.run(tiers.request(name, 1 + ord(name) % 4))
    return way(tiers, [tiers.request(name, 1 + ord(name) % 4) for name in again], budget)


names = strategies.lists(strategies.sampled_from("abcdefg"), min_size=1, max_size=12)


@given(
    before=names,
    again=strategies.lists(strategies.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True),
    slots=strategies.integers(16, 24),
    budget=strategies.integers(0, 40),
)
def test_claim_batch_never_overflows(
    before: list[str], again: list[str], slots: int, budget: int
) -> None:
    assert _compute(claim_batches, before, again, slots, budget) <= budget
