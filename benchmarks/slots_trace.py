"""Requests for slots: the same ones for ours and for the rival, which has another interpreter."""

from __future__ import annotations

import random
from collections.abc import Iterator

REQUESTS = 64
BLOCKS = 512
"""Of one request."""
HITS = 256
"""Of these, from the first on: prefixes that are there already."""
TOKENS_PER_BLOCK = 16


class Trace:
    """Prompts that fill the slots, and batches of prompts that begin as some of them do."""

    def __init__(self, slots: int, seed: int = 1) -> None:
        self._random = random.Random(seed + 1)
        self._slots = slots
        self._heads: list[list[bytes]] = []

        for prompt in self.prompts(seed):
            self._heads.append(prompt[:HITS])
        self._seed = seed

    def prompts(self, seed: int | None = None) -> Iterator[list[bytes]]:
        """Hashes of all blocks, prompt by prompt, until the slots are full."""
        chance = random.Random(self._seed if seed is None else seed)
        for _ in range(self._slots // BLOCKS):
            yield [chance.randbytes(32) for _ in range(BLOCKS)]

    def batch(self, requests: int = REQUESTS) -> list[list[bytes]]:
        """Half of each prompt is there; none is asked for by two of one batch.

        Of the youngest quarter of the prompts, which the batches of a run do not evict: a pool that
        was in use before keeps what was used again, and of the prompts as many fewer. Keys are new
        objects, as they are when an engine computes them.
        """
        heads = self._random.sample(self._heads[-(len(self._heads) // 4) :], requests)
        return [
            [bytes(bytearray(key)) for key in head] + self._new(BLOCKS - HITS) for head in heads
        ]

    def _new(self, blocks: int) -> list[bytes]:
        return [self._random.randbytes(32) for _ in range(blocks)]
