"""A batch's two phases: claim what matches, then slots for the rest. The pool holds its lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hostprep.errors import BadInputError
from hostprep.slots.group import ABANDONED, PENDING, READY, SlotGroup
from hostprep.slots.index import Keys
from hostprep.slots.matching import KIND_OF_STATE, GroupMatch, PartialMatches, match
from hostprep.slots.request import (
    REUSED,
    SHARED,
    STORED,
    WRITE,
    GroupUse,
    Missing,
    OverBudgetError,
    PartialMatch,
    Request,
)
from hostprep.slots.rows import Listed, in_a_row, marks_of, set_marks

_READY = bytes([READY])
_REUSED = bytes([REUSED])
_WRITE = bytes([WRITE])


class Draft:
    """One request while its batch is being claimed."""

    def __init__(
        self,
        request: Request,
        keys: Keys,
        parts: Sequence[GroupMatch],
        reused_tokens: int,
        partial: PartialMatch | None,
        *,
        is_whole: bool,
    ) -> None:
        self.request = request
        self.parts = parts
        self.reused_tokens = reused_tokens
        self.partial = partial
        self.is_whole = is_whole
        """Whether it holds its blocks from the sequence's first on: none of them can go before."""
        self.wanted = [_missing(keys, part.missing) for part in parts]
        """By group: the keys of the blocks that have no slot."""
        self.evicted = 0

    @property
    def compute_tokens(self) -> int:
        """Tokens that are neither reused nor computed already."""
        return self.request.tokens - self.request.computed_tokens - self.reused_tokens


def _missing(keys: Keys, blocks: Sequence[int]) -> Keys:
    return (
        keys.part(blocks.start, blocks.stop) if isinstance(blocks, range) else keys.chosen(blocks)
    )


def claim_matches(
    groups: Sequence[SlotGroup],
    tokens_per_block: int,
    requests: Sequence[Request],
    *,
    partial: PartialMatches | None,
    token_budget: int | None,
    largest_budget: int | None,
    check: Callable[[Request], None],
) -> tuple[list[Draft], list[set[bytes]], BadInputError | None]:
    """First phase: claim what every request matches. Nothing is allocated, nothing evicted.

    Returns the requests that the budget admits, and the keys that they lack together in each
    group. `check` looks at every request: just before it is looked up, since its keys lie in the
    processor's caches then. What it raises as a BadInputError is returned, or an OverBudgetError
    where the first request needs more than `largest_budget`: then nothing is claimed. After any
    other exception the groups' counts of claims are to be made again.
    """
    lacking: list[set[bytes]] = [set() for _ in groups]
    drafts: list[Draft] = []
    budget = token_budget
    for number, request in enumerate(requests):
        wrong = _wrong(check, requests[number : number + 1])
        if wrong is not None:
            _give_up(groups, drafts)
            return drafts, lacking, wrong
        draft = _draft(groups, tokens_per_block, request, partial)
        if budget is not None:
            if draft.compute_tokens > budget:
                wrong = _wrong(check, requests[number + 1 :])
                largest = max(budget, largest_budget or 0)
                if wrong is None and not number and draft.compute_tokens > largest:
                    wrong = OverBudgetError(request, draft.compute_tokens, largest)
                if wrong is not None:
                    _give_up(groups, drafts)
                return drafts, lacking, wrong
            budget -= draft.compute_tokens
        drafts.append(draft)
        for index, (group, part) in enumerate(zip(groups, draft.parts)):
            part.first = group.claim(_held(draft, index))
            lacking[index].update(draft.wanted[index].keys)
    return drafts, lacking, None


def _wrong(check: Callable[[Request], None], requests: Sequence[Request]) -> BadInputError | None:
    try:
        for request in requests:
            check(request)
    except BadInputError as error:
        return error
    return None


def _draft(
    groups: Sequence[SlotGroup],
    tokens_per_block: int,
    request: Request,
    partial: PartialMatches | None,
) -> Draft:
    hashes = request.hashes  # of any sequence; what reads them cuts pieces out
    if not isinstance(hashes, (list, tuple)):
        hashes = tuple(hashes)
    keys = Keys(hashes, groups[0].index.key_bytes)
    end, parts = match(groups, tokens_per_block, request, keys)
    found = partial.match(request, end) if partial is not None else None
    behind = (request.first_block + end) * tokens_per_block
    reused_tokens = max(0, behind - request.computed_tokens) + (found.tokens if found else 0)
    first = 0 if request.store else request.computed_tokens // tokens_per_block
    return Draft(
        request, keys, parts, reused_tokens, found, is_whole=not request.first_block + first
    )


def _held(draft: Draft, group: int) -> Sequence[int]:
    present = draft.parts[group].present
    return present if draft.partial is None else [*present, draft.partial.slots[group]]


def _give_up(groups: Sequence[SlotGroup], drafts: Sequence[Draft]) -> None:
    """Undo the first phase: it only counted, so the order of eviction is as it was."""
    for draft in drafts:
        for index, group in enumerate(groups):
            group.unclaim(_held(draft, index))


def find_shortage(
    groups: Sequence[SlotGroup],
    drafts: Sequence[Draft],
    lacking: Sequence[set[bytes]],
    reserved: Sequence[int],
) -> tuple[tuple[Missing, ...], tuple[int, ...]]:
    """Return which groups lack slots for the second phase, and how many slots it takes of each.

    What the first phase claimed is not available; a block that several requests lack counts once.
    `reserved`: by group, slots for those who came before. Where one lacks slots, the first phase
    is taken back.
    """
    missing, taken = [], []
    for index, (group, keys) in enumerate(zip(groups, lacking)):
        first = sum(len(draft.parts[index].first) for draft in drafts)
        taken.append(first + len(keys))
        lack = _lack(group, len(keys), first, reserved[index] if reserved else 0)
        if lack is not None:
            missing.append(lack)
    if missing:
        _give_up(groups, drafts)
    return tuple(missing), tuple(taken)


def _lack(group: SlotGroup, needed: int, first: int, reserved: int) -> Missing | None:
    """Return what a group lacks for that many new slots, with `first` cached ones claimed."""
    available = group.available - first
    if needed <= available - reserved or not (needed or first):
        return None
    return Missing(group.group.name, needed, available, group.group.slots, reserved)


def allocate(
    groups: Sequence[SlotGroup],
    drafts: Sequence[Draft],
    lacking: Sequence[set[bytes]],
    *,
    partial: PartialMatches | None,
    keep_evicted: bool,
) -> None:
    """Give every missing block, its key among `lacking`, an empty slot; evict for it first.

    A block that several requests of the batch lack gets one slot: the first of them writes it,
    for the others it is SHARED. All of them compute it, as they would if they came one by one
    before it is written; what is written once is loaded by later requests. A request's blocks
    lie in rows as far as they can.
    """
    for index, group in enumerate(groups):
        for draft in drafts:
            group.hold(draft.parts[index].first, draft.parts[index].present)
            _take_abandoned(group, draft.parts[index])
        count = len(lacking[index])
        fill = _fill if count == sum(d.wanted[index].count for d in drafts) else _fill_or_share
        evicted, hashes = _make_room(group, count, partial, keep_evicted=keep_evicted)
        taken = _TakenSlots(group.free.take(count), evicted, hashes)
        for draft in drafts:
            part = draft.parts[index]
            fill(group, part, draft.wanted[index], taken)
            returned = part.missing[: group.returned(draft.wanted[index])]
            set_marks(group.order.again, [part.slots[block] for block in returned], 1)
            if not draft.is_whole and (part.present or part.missing or draft.partial):
                group.gapless = False
            more, part.evicted = taken.account()
            draft.evicted += more


def _make_room(
    group: SlotGroup, count: int, partial: PartialMatches | None, *, keep_evicted: bool
) -> tuple[int, list[bytes]]:
    """Evict until that many slots are free, and some to spare. Returns how many, and their keys."""
    more = max(0, count + group.spare - group.free.count) if count else 0
    more = min(more, group.order.count)
    return more, evict(group, more, partial, keep_evicted=keep_evicted, remember=True)


def evict(
    group: SlotGroup,
    count: int,
    partial: PartialMatches | None,
    *,
    keep_evicted: bool = False,
    remember: bool = False,
) -> list[bytes]:
    """Empty that many of the slots that can be evicted, those that go first.

    Returns their keys, if kept. `remember`: what is stored again soon is known to have been there.
    """
    if not count:
        return []
    evicted = group.order.take(count)
    hashes = group.index.keys(evicted) if keep_evicted else []
    emptied = Listed(sorted(evicted))  # in rows, as far as they are
    if remember:
        group.remember(emptied)
    group.empty(emptied)
    if partial is not None and partial.leads(group):
        partial.forget(emptied)
    return hashes


class _TakenSlots:
    """Free slots, as they are handed out, and what was evicted for them.

    It is booked on those who get slots, the first ones first and no more than slots; on the last
    one, what is left: what was evicted to spare.
    """

    def __init__(self, slots: Listed, evicted: int, hashes: Sequence[bytes]) -> None:
        self._slots = slots
        self._next = 0
        self._evicted = evicted
        self._hashes = hashes
        self._booked = 0

    def take(self, count: int) -> Sequence[int]:
        """Return the next ones."""
        slots = self._slots[self._next : self._next + count]
        self._next += count
        return in_a_row(slots)

    def account(self) -> tuple[int, Sequence[bytes]]:
        """Return what was evicted since the last call: how many, and which if they are kept."""
        last = self._next == len(self._slots)
        begin, end = self._booked, self._evicted if last else min(self._next, self._evicted)
        self._booked = end
        return end - begin, self._hashes[begin:end]


def _fill(group: SlotGroup, part: GroupMatch, keys: Keys, taken: _TakenSlots) -> None:
    """Each missing block gets a slot of its own."""
    slots = taken.take(keys.count)
    group.fill(keys, slots)
    if isinstance(part.missing, range):
        part.slots[part.missing.start :] = slots
        return
    for block, slot in zip(part.missing, slots):
        part.slots[block] = slot


def _fill_or_share(group: SlotGroup, part: GroupMatch, keys: Keys, taken: _TakenSlots) -> None:
    """As `_fill`, where an earlier block may be the same one."""
    for number, block in enumerate(part.missing):
        key = keys.part(number, number + 1)
        (slot,) = group.index.find(key)
        if slot < 0:
            (slot,) = taken.take(1)
            group.fill(key, (slot,))
        else:
            group.claim((slot,))
            part.kinds[block] = SHARED
        part.slots[block] = slot


def _take_abandoned(group: SlotGroup, part: GroupMatch) -> None:
    """Make the request the writer of what was left unwritten, unless one before it did."""
    if part.kinds.count(WRITE) > len(part.missing):
        _write_abandoned(group, part.slots, part.kinds)


def _write_abandoned(group: SlotGroup, slots: Sequence[int], kinds: bytearray) -> None:
    for block, slot in enumerate(slots):
        if kinds[block] != WRITE or slot < 0:
            continue
        if group.state[slot] == ABANDONED:
            group.state[slot] = PENDING
        else:
            kinds[block] = SHARED


def take_over(group: SlotGroup, use: GroupUse, unwritten: list[int]) -> GroupUse:
    """Check a claim's SHARED blocks in one group again; what has no writer becomes its own."""
    kinds = bytearray(use.kinds)
    for block in use.blocks(SHARED):
        slot = use.slots[block]
        if group.state[slot] == READY:
            kinds[block] = STORED
        elif group.state[slot] == ABANDONED:
            group.state[slot] = PENDING
            kinds[block] = WRITE
            unwritten.append(block)
    unwritten.sort()
    return replace(use, kinds=bytes(kinds))


def claim_ready(
    group: SlotGroup, keys: Keys, reserved: int
) -> tuple[GroupUse, Missing | None, int]:
    """Claim the first of these blocks, up to one that is not written; it has those only.

    Returns also how many of them were unclaimed. Where all of those are `reserved`, it is taken
    back, and what lacks is returned.
    """
    slots = group.index.find(keys, until_missing=True)
    if slots and slots[-1] < 0:
        slots.pop()
    held = in_a_row(slots)
    ready = len(slots) - len(marks_of(group.state, held).lstrip(_READY))
    if ready < len(slots):
        held = in_a_row(slots[:ready])
    first = group.claim(held)
    use = GroupUse(held, _REUSED * ready)
    lack = _lack(group, 0, len(first), reserved)
    if lack is not None:
        group.unclaim(held)
        return use, lack, len(first)
    group.hold(first, held)
    group.gapless = group.gapless and not held
    return use, None, len(first)


@dataclass
class BlocksDraft:
    """Single blocks while they are being claimed: as a Draft, in the only group."""

    slots: list[int]
    kinds: bytearray
    present: Sequence[int]
    first: Sequence[int]
    blocks: Sequence[int]
    """Numbers of those that are missing."""
    wanted: dict[bytes, int]
    """Of each missing key, the first number."""


def claim_blocks_found(
    group: SlotGroup, keys: Keys, reserved: int
) -> tuple[BlocksDraft, Missing | None]:
    """First phase for single blocks: claim those that are there. Taken back where slots lack."""
    slots = group.index.find(keys)
    draft = BlocksDraft(slots, bytearray(_WRITE * keys.count), (), (), range(keys.count), {})
    if slots.count(-1) < keys.count:
        draft.kinds = bytearray([KIND_OF_STATE[group.state[s]] if s >= 0 else WRITE for s in slots])
        draft.present = in_a_row([slot for slot in slots if slot >= 0])
        draft.blocks = [block for block, slot in enumerate(slots) if slot < 0]
        draft.first = group.claim(draft.present)
    draft.wanted = {keys.keys[block]: block for block in reversed(draft.blocks)}
    lack = _lack(group, len(draft.wanted), len(draft.first), reserved)
    if lack is not None:
        group.unclaim(draft.present)
    return draft, lack


def allocate_blocks(
    group: SlotGroup, keys: Keys, draft: BlocksDraft, *, keep_evicted: bool
) -> tuple[GroupUse, int]:
    """Second phase for single blocks. Returns also how many blocks were evicted."""
    slots, kinds, wanted = draft.slots, draft.kinds, draft.wanted
    group.hold(draft.first, draft.present)
    if draft.present:
        _write_abandoned(group, slots, kinds)
    evicted, hashes = _make_room(group, len(wanted), None, keep_evicted=keep_evicted)
    taken = in_a_row(group.free.take(len(wanted)))
    if len(wanted) == keys.count:
        group.fill(keys, taken)
        set_marks(group.order.again, taken[: group.returned(keys)], 1)
        slots = list(taken)
    elif wanted:
        own = sorted(wanted.values())
        new = keys.chosen(own)
        group.fill(new, taken)
        set_marks(group.order.again, taken[: group.returned(new)], 1)
        for block, slot in zip(own, taken):
            slots[block] = slot
        for block in draft.blocks:
            if slots[block] < 0:  # the same as an earlier one
                slots[block] = slots[wanted[keys.keys[block]]]
                group.claim((slots[block],))
                kinds[block] = SHARED
    group.gapless = group.gapless and not slots
    return GroupUse(slots, bytes(kinds), hashes), evicted
