"""Blocks that begin as a wanted one does: which tokens of them can be copied."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from hostprep.slots.group import READY, SlotGroup
from hostprep.slots.index import HashIndex, Keys
from hostprep.slots.model import PartialMatch, Request

__all__ = ["PartialMatches"]

_MOST_LOOKED_AT = 16
"""Blocks that follow one and the same block; more are not looked at: the time is bounded."""
_TOKEN_BYTES = 4


class PartialMatches:
    """The tokens of the blocks of one group, found by the block before them."""

    def __init__(self, groups: Sequence[SlotGroup], tokens_per_block: int, hash_bytes: int) -> None:
        """Let the first group without a window lead; the first one, where all have windows."""
        self._groups = groups
        whole = [slots for slots in groups if slots.group.window_tokens is None]
        self._leading = (whole or list(groups))[0]
        count = self._leading.group.slots
        self._tokens_per_block = tokens_per_block
        self._width = tokens_per_block * _TOKEN_BYTES
        self._tokens = bytearray(count * self._width)
        self._by_parent = HashIndex(count, hash_bytes)
        self._root = bytes(hash_bytes)
        """Stands for the block before the first."""

    def leads(self, group: SlotGroup) -> bool:
        """Whether `learn` and `forget` are about this group's slots."""
        return group is self._leading

    def learn(self, request: Request, blocks: Iterable[int], slots: Iterable[int]) -> None:
        """Remember the tokens of blocks that were written into these slots."""
        if request.token_ids is None:
            return
        for block, slot in zip(blocks, slots):
            parent = self._parent(request, block)
            if parent is None:
                continue
            tokens = self._tokens_of(request, block)
            if len(tokens) == self._width:
                self._tokens[slot * self._width : slot * self._width + self._width] = tokens
                self._by_parent.insert(Keys((parent,), len(parent)), (slot,))
                self._by_parent.settle((slot,))

    def forget(self, slots: Sequence[int]) -> None:
        """Drop what was known of slots that are used anew."""
        self._by_parent.remove(slots)

    def match(self, request: Request, block: int) -> PartialMatch | None:
        """Return the longest match for the first block that cannot be reused whole."""
        limit = self._limit(request, block)
        parent = self._parent(request, block)
        if limit < 1 or request.token_ids is None or parent is None:
            return None
        wanted = self._tokens_of(request, block)[: limit * _TOKEN_BYTES]
        best: PartialMatch | None = None
        for slot in self._by_parent.find_all(parent, _MOST_LOOKED_AT):
            at = slot * self._width
            tokens = _common(wanted, self._tokens[at : at + len(wanted)])
            if tokens > (best.tokens if best else 0):
                slots = self._in_all_groups(slot)
                best = PartialMatch(block, tokens, slots) if slots else best
        return best

    def _limit(self, request: Request, block: int) -> int:
        """Return how many of the block's tokens may be reused."""
        begin = (request.first_block + block) * self._tokens_per_block
        if begin < request.computed_tokens:
            return 0
        given = request.reuse_limit_tokens
        most = request.tokens - 1 if given is None else min(given, request.tokens)
        return min(self._tokens_per_block, most - begin)

    def _parent(self, request: Request, block: int) -> bytes | None:
        if block > 0:
            return request.hashes[block - 1]
        return self._root if request.first_block == 0 else None

    def _tokens_of(self, request: Request, block: int) -> bytes:
        begin = (request.first_block + block) * self._tokens_per_block
        ids = request.token_ids or ()
        return array("I", ids[begin : begin + self._tokens_per_block]).tobytes()

    def _in_all_groups(self, slot: int) -> tuple[int, ...]:
        """Return where each group has the block, or nothing if one has not."""
        if self._leading.state[slot] != READY:
            return ()
        key = Keys((self._leading.index.key_of(slot),), self._leading.index.key_bytes)
        found: list[int] = []
        for group in self._groups:
            slots, states, _ = group.find(key)
            if states != _READY:
                return ()
            found += slots
        return tuple(found)

    @property
    def memory_bytes(self) -> int:
        """What the arrays take."""
        return len(self._tokens) + self._by_parent.memory_bytes


_READY = bytes([READY])


def _common(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Return how many tokens both begin with."""
    low, high = 0, min(len(one), len(other)) // _TOKEN_BYTES
    while low < high:  # one[:low] is common, and more than one[:high] is not
        middle = (low + high + 1) // 2
        if one[: middle * _TOKEN_BYTES] == other[: middle * _TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
