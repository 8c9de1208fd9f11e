"""First phase, lookup: which blocks of a request are in slots already. Nothing is changed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from hostprep.layout import ATTENTION, RECURRENT, Group
from hostprep.slots.group import ABANDONED, MISSING, PENDING, READY, SlotGroup
from hostprep.slots.index import HashIndex, Keys
from hostprep.slots.request import OUTSIDE, REUSED, SHARED, STORED, WRITE, PartialMatch, Request
from hostprep.slots.rows import in_a_row

_READY = bytes([READY])
KIND_OF_STATE = bytes.maketrans(
    bytes([MISSING, PENDING, READY, ABANDONED]), bytes([WRITE, SHARED, STORED, WRITE])
)
_MOST_COMPARED = 16
"""Blocks that follow one and the same block; no more are compared: the time is bounded."""
_TOKEN_BYTES = 4


def needed_from(group: Group, tokens_per_block: int, blocks: int) -> int:
    """Return the first block that the group needs to go on after so many full blocks.

    The token at position p attends to the window's last tokens, its own included: to p - w + 1
    and later. A recurrent group needs the state after the last block only.
    """
    if group.kind == RECURRENT:
        return max(0, blocks - 1)
    if group.window_tokens is None:
        return 0
    return max(0, blocks * tokens_per_block - group.window_tokens + 1) // tokens_per_block


def stored_range(group: Group, tokens_per_block: int, blocks: int, tokens: int) -> tuple[int, int]:
    """Return the blocks, first and end, that are worth keeping for later requests.

    Of a window: what is needed after the last block, and one more to the left, since a prompt
    that ends on a block's edge is resumed a block earlier (its last token has to be computed):
    ceil((window - 1) / tokens_per_block) + 1 blocks, the floor in `hostprep size`. Of a state:
    the last one before the last token.
    """
    if group.kind == RECURRENT:
        end = (tokens - 1) // tokens_per_block
        return max(0, end - 1), end
    return needed_from(group, tokens_per_block, max(0, blocks - 1)), blocks


class GroupMatch:
    """One request in one group, while its batch is being claimed."""

    def __init__(self, slots: list[int], kinds: bytearray, present: Sequence[int]) -> None:
        self.slots = slots
        self.kinds = kinds
        self.present = present
        """Slots of the blocks that are there, to be claimed."""
        self.first: Sequence[int] = ()
        """Those that were unclaimed before."""
        self.missing: Sequence[int] = ()
        """Indices of the blocks that need a slot."""
        self.evicted: Sequence[bytes] = ()
        first = kinds.find(WRITE)
        if first < 0:
            return
        left = len(slots) - first
        if first == len(present) and kinds.count(WRITE) == left and OUTSIDE not in kinds:
            self.missing = range(first, len(slots))
            return
        self.missing = [i for i, s in enumerate(slots) if s < 0 and kinds[i] == WRITE]


def match(
    groups: Sequence[SlotGroup], tokens_per_block: int, request: Request, keys: Keys
) -> tuple[int, list[GroupMatch]]:
    """Return how many of the request's blocks are behind it after reuse, and its parts.

    All groups reuse up to the same block. Every block before it is there in a group without a
    window, those in its window in a group with one, and the state after it in a recurrent one.
    """
    hashes = request.hashes
    begin = _begin(request, tokens_per_block)
    end = begin
    lookups = [_lookup(slots, tokens_per_block, request, keys, begin) for slots in groups]
    limit = request.reuse_limit_tokens
    tokens = max(0, request.tokens - 1) if limit is None else min(limit, request.tokens)
    wanted = min(len(hashes), tokens // tokens_per_block - request.first_block)
    if wanted > begin:
        end = _agree(lookups, begin, wanted)
    return end, [lookup.part(begin, end) for lookup in lookups]


def _begin(request: Request, tokens_per_block: int) -> int:
    """Return the first block, counted as the hashes are, that the engine has not computed."""
    whole = request.computed_tokens // tokens_per_block - request.first_block
    return min(len(request.hashes), max(0, whole))


def _agree(lookups: Sequence[_FullLookup | _WindowLookup], begin: int, wanted: int) -> int:
    """Return the last block up to which every group can reuse."""
    end = wanted
    while True:
        before = end
        for lookup in lookups:
            end = lookup.reusable(begin, end)
        if end in {before, begin}:
            return end


def _lookup(
    slots: SlotGroup, tokens_per_block: int, request: Request, keys: Keys, begin: int
) -> _FullLookup | _WindowLookup:
    if slots.group.kind == ATTENTION and slots.group.window_tokens is None:
        return _FullLookup(slots, request, keys, begin)
    return _WindowLookup(slots, tokens_per_block, request, keys)


class _FullLookup:
    """A group that needs every block."""

    def __init__(self, group: SlotGroup, request: Request, keys: Keys, begin: int) -> None:
        self._store = request.store
        if request.store:
            self._slots, self._states, self._present = group.find(keys, until_missing=group.gapless)
            return
        rest = keys.part(begin, keys.count)
        found, states, _ = group.find(rest, until_missing=True)
        self._slots, self._states = [-1] * begin + found, bytes(begin) + states
        self._present = ()  # chosen by `part`

    def reusable(self, begin: int, end: int) -> int:
        """Return the end of the blocks from `begin` that are ready without a gap."""
        wanted = self._states[begin:end]
        return end - len(wanted.lstrip(_READY))

    def part(self, begin: int, end: int) -> GroupMatch:
        count = len(self._slots)
        if self._store:
            kinds = bytearray(self._states.translate(KIND_OF_STATE))
            slots, present = self._slots, self._present
        else:
            kinds = bytearray(count)
            reused = self._slots[begin:end]
            present = in_a_row(reused)
            slots = [-1] * begin + reused + [-1] * (count - end)
        kinds[begin:end] = bytes([REUSED]) * (end - begin)
        return GroupMatch(slots, kinds, present)


class _WindowLookup:
    """A group with a window, or with states: looked up from the end, no more than is needed."""

    def __init__(
        self, group: SlotGroup, tokens_per_block: int, request: Request, keys: Keys
    ) -> None:
        self._group = group
        self._keys = keys
        self._tokens_per_block = tokens_per_block
        self._request = request
        self._known = -1
        """States are known from this block to where the first lookup ended."""
        self._states = bytearray()

    def reusable(self, begin: int, end: int) -> int:
        """Return the last block, at most `end`, after which all that is needed is ready."""
        while end > begin:
            low = self._needed_from(begin, end)
            self._learn(low, end)
            ready = self._states[low:end].rstrip(_READY)
            if not ready:
                return end
            end = low + len(ready) - 1
        return begin

    def _needed_from(self, begin: int, end: int) -> int:
        first = self._request.first_block
        needed = needed_from(self._group.group, self._tokens_per_block, first + end)
        return min(end, max(begin, needed - first))

    def _learn(self, low: int, end: int) -> None:
        if self._known < 0:
            self._states, self._known = bytearray(end), end
        if low < self._known:
            _, states, _ = self._group.find(self._keys.part(low, self._known))
            self._states[low : self._known] = states
            self._known = low

    def part(self, begin: int, end: int) -> GroupMatch:
        request, count = self._request, len(self._request.hashes)
        slots, kinds = [-1] * count, bytearray(count)
        if request.store:
            self._stored(slots, kinds)
            for index in range(begin, end):  # skipped by the engine: it cannot write these
                if kinds[index] != STORED:
                    kinds[index], slots[index] = OUTSIDE, -1
        if end > begin:
            low = self._needed_from(begin, end)
            slots[low:end], _, _ = self._group.find(self._keys.part(low, end))
            kinds[low:end] = bytes([REUSED]) * (end - low)
        return GroupMatch(slots, kinds, [slot for slot in slots if slot >= 0])

    def _stored(self, slots: list[int], kinds: bytearray) -> None:
        request, first = self._request, self._request.first_block
        low, high = stored_range(
            self._group.group, self._tokens_per_block, first + len(slots), request.tokens
        )
        low, high = max(0, low - first), max(0, high - first)
        slots[low:high], states, _ = self._group.find(self._keys.part(low, high))
        kinds[low:high] = states.translate(KIND_OF_STATE)


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
        """Forget the tokens of slots that are used again."""
        self._by_parent.remove(slots)

    def match(self, request: Request, block: int) -> PartialMatch | None:
        """Return the longest match for the first block that cannot be reused whole."""
        limit = self._limit(request, block)
        parent = self._parent(request, block)
        if limit < 1 or request.token_ids is None or parent is None:
            return None
        wanted = self._tokens_of(request, block)[: limit * _TOKEN_BYTES]
        best: PartialMatch | None = None
        for slot in self._by_parent.find_all(parent, _MOST_COMPARED):
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
        limit = request.reuse_limit_tokens
        most = request.tokens - 1 if limit is None else min(limit, request.tokens)
        return min(self._tokens_per_block, most - begin)

    def _parent(self, request: Request, block: int) -> bytes | None:
        if block > 0:
            return request.hashes[block - 1]
        return self._root if request.first_block == 0 else None

    def _tokens_of(self, request: Request, block: int) -> bytes:
        begin = (request.first_block + block) * self._tokens_per_block
        ids = () if request.token_ids is None else request.token_ids
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

    def rebuild(self) -> None:
        """Make the index again, of the slots that the leading group has (see `SlotGroup`)."""
        state, before = self._leading.state, self._by_parent
        kept = [(slot, key) for slot, key in before.items() if state[slot] == READY]
        after = HashIndex(self._leading.group.slots, before.key_bytes)
        slots = [slot for slot, _ in kept]
        after.insert(Keys([key for _, key in kept], before.key_bytes), slots)
        after.settle(slots)
        self._by_parent = after

    @property
    def memory_bytes(self) -> int:
        """What the arrays take."""
        return len(self._tokens) + self._by_parent.memory_bytes


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
