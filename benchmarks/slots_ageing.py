"""A pool that was in use for long: its blocks lie in rows no longer than use has left them."""

from __future__ import annotations

import random
from itertools import pairwise

from benchmarks.slots_trace import TOKENS_PER_BLOCK
from hostprep.slots import Claim, Request, SlotPool

_OPEN = 64
_KNOWN = 4000
_MOST_BLOCKS = 512
"""Of what one request adds; half of them go on from a random place of an earlier one."""


def age(pool: SlotPool, turnovers: float, seed: int = 5) -> None:
    """Write each slot of the first group so many times, on average.

    Requests of 1 to 512 new blocks, some 64 at a time, which end in random order.
    """
    chance = random.Random(seed)
    known: list[list[bytes]] = []
    held: list[Claim] = []
    left = turnovers * pool.layout.groups[0].slots
    while left > 0:
        prompts = [_prompt(chance, known) for _ in range(chance.randrange(1, 9))]
        known += prompts
        del known[:-_KNOWN]
        for claim in pool.claim_batch([_request(prompt) for prompt in prompts]).claims:
            claim.commit()
            left -= claim.counts.written
            held.append(claim)
        while len(held) > _OPEN:
            held.pop(chance.randrange(len(held))).release()
    for claim in held:
        claim.release()


def _prompt(chance: random.Random, known: list[list[bytes]]) -> list[bytes]:
    before: list[bytes] = []
    if known and chance.random() < 0.5:
        before = chance.choice(known)
        before = before[: chance.randrange(len(before) + 1)]
    new = [chance.randbytes(32) for _ in range(chance.randrange(1, _MOST_BLOCKS + 1))]
    return [*before, *new][: 2 * _MOST_BLOCKS]


def _request(prompt: list[bytes]) -> Request:
    return Request("r", len(prompt) * TOKENS_PER_BLOCK, prompt)


def rows_of(claim: Claim) -> int:
    """Return in how many rows the claim's blocks lie in the first group."""
    slots = claim.uses[0].slots
    return 1 + sum(b != a + 1 for a, b in pairwise(slots))
