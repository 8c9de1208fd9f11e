"""What of a request is in the slots already: looked up for all groups, nothing changed."""

from __future__ import annotations

from collections.abc import Sequence

from hostprep.layout import ATTENTION
from hostprep.slots.group import ABANDONED, MISSING, PENDING, READY, SlotGroup
from hostprep.slots.index import Keys
from hostprep.slots.model import OUTSIDE, REUSED, SHARED, STORED, WRITE, Request
from hostprep.slots.runs import in_a_row
from hostprep.slots.windows import needed_from, stored_range

__all__ = ["Part", "match"]

_KIND_OF_STATE = bytearray(range(256))
_KIND_OF_STATE[MISSING] = WRITE
_KIND_OF_STATE[PENDING] = SHARED
_KIND_OF_STATE[READY] = STORED
_KIND_OF_STATE[ABANDONED] = WRITE
_READY = bytes([READY])


class Part:
    """One request in one group, while its batch is being claimed."""

    def __init__(self, slots: list[int], kinds: bytearray, present: Sequence[int]) -> None:
        self.slots = slots
        self.kinds = kinds
        self.present = present
        """Slots of the blocks that are there, to be claimed."""
        self.first: Sequence[int] = ()
        """Those that nobody claimed before."""
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
) -> tuple[int, list[Part]]:
    """Return how many of the request's blocks are behind it after reuse, and its parts.

    All groups reuse up to the same block. Every block before it is there in a group without a
    window, those in its window in a group with one, and the state after it in a recurrent one.
    """
    hashes = request.hashes
    begin = _begin(request, tokens_per_block)
    end = begin
    looks = [_look(slots, tokens_per_block, request, keys, begin) for slots in groups]
    limit = request.reuse_limit_tokens
    tokens = max(0, request.tokens - 1) if limit is None else min(limit, request.tokens)
    wanted = min(len(hashes), tokens // tokens_per_block - request.first_block)
    if wanted > begin:
        end = _agree(looks, begin, wanted)
    return end, [look.part(begin, end) for look in looks]


def _begin(request: Request, tokens_per_block: int) -> int:
    """Return the first block, counted as the hashes are, that the engine has not computed."""
    whole = request.computed_tokens // tokens_per_block - request.first_block
    return min(len(request.hashes), max(0, whole))


def _agree(looks: Sequence[_All | _Some], begin: int, wanted: int) -> int:
    """Return the last block up to which every group can reuse."""
    end = wanted
    while True:
        before = end
        for look in looks:
            end = look.reusable(begin, end)
        if end in {before, begin}:
            return end


def _look(
    slots: SlotGroup, tokens_per_block: int, request: Request, keys: Keys, begin: int
) -> _All | _Some:
    if slots.group.kind == ATTENTION and slots.group.window_tokens is None:
        return _All(slots, request, keys, begin)
    return _Some(slots, tokens_per_block, request, keys)


class _All:
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

    def part(self, begin: int, end: int) -> Part:
        count = len(self._slots)
        if self._store:
            kinds = bytearray(self._states.translate(_KIND_OF_STATE))
            slots, present = self._slots, self._present
        else:
            kinds = bytearray(count)
            reused = self._slots[begin:end]
            present = in_a_row(reused)
            slots = [-1] * begin + reused + [-1] * (count - end)
        kinds[begin:end] = bytes([REUSED]) * (end - begin)
        return Part(slots, kinds, present)


class _Some:
    """A group with a window, or with states: looked up from the end, no more than is needed."""

    def __init__(
        self, group: SlotGroup, tokens_per_block: int, request: Request, keys: Keys
    ) -> None:
        self._group = group
        self._keys = keys
        self._tokens_per_block = tokens_per_block
        self._request = request
        self._known = -1
        """States are known from this block to where the first look ended."""
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

    def part(self, begin: int, end: int) -> Part:
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
        return Part(slots, kinds, [slot for slot in slots if slot >= 0])

    def _stored(self, slots: list[int], kinds: bytearray) -> None:
        request, first = self._request, self._request.first_block
        low, high = stored_range(
            self._group.group, self._tokens_per_block, first + len(slots), request.tokens
        )
        low, high = max(0, low - first), max(0, high - first)
        slots[low:high], states, _ = self._group.find(self._keys.part(low, high))
        kinds[low:high] = states.translate(_KIND_OF_STATE)
