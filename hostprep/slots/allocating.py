"""A batch's second phase: slots for what nobody has. The pool holds its lock around both phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hostprep.slots.batch import Draft
from hostprep.slots.group import ABANDONED, PENDING, READY, SlotGroup
from hostprep.slots.index import Keys
from hostprep.slots.matching import Part
from hostprep.slots.model import SHARED, STORED, WRITE, Counts, GroupUse
from hostprep.slots.partial import PartialMatches
from hostprep.slots.runs import Listed, in_a_row

__all__ = ["allocate", "evict", "take_over"]


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
    before it is written; what is written once is loaded by whoever comes later. A request's blocks
    lie in rows as far as they can.
    """
    for index, group in enumerate(groups):
        for draft in drafts:
            group.hold(draft.parts[index].first)
            _take_abandoned(group, draft.parts[index])
        count = len(lacking[index])
        fill = _fill if count == sum(d.wanted[index].count for d in drafts) else _fill_or_share
        evicted, hashes = _make_room(group, count, partial, keep_evicted=keep_evicted)
        given = _Given(group.free.take(count), evicted, hashes)
        for draft in drafts:
            part = draft.parts[index]
            fill(group, part, draft.wanted[index], given)
            if not draft.is_whole and (part.present or part.missing or draft.partial):
                group.gapless = False
            more, part.evicted = given.account()
            draft.evicted += more


def _make_room(
    group: SlotGroup, count: int, partial: PartialMatches | None, *, keep_evicted: bool
) -> tuple[int, list[bytes]]:
    """Evict until that many slots are free, and some to spare. Returns how many, and their keys."""
    more = max(0, count + group.spare - group.free.count) if count else 0
    more = min(more, group.order.count)
    return more, evict(group, more, partial, keep_evicted=keep_evicted)


def evict(
    group: SlotGroup, count: int, partial: PartialMatches | None, *, keep_evicted: bool = False
) -> list[bytes]:
    """Empty that many of the slots that can be evicted, the oldest. Returns their keys, if kept."""
    evicted = group.order.take(count)
    hashes = group.index.keys(evicted) if keep_evicted else []
    emptied = Listed(sorted(evicted))  # in rows, as far as they are
    group.empty(emptied)
    if partial is not None and partial.leads(group):
        partial.forget(emptied)
    return hashes


class _Given:
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


def _fill(group: SlotGroup, part: Part, keys: Keys, given: _Given) -> None:
    """Each missing block gets a slot of its own."""
    slots = given.take(keys.count)
    group.fill(keys, slots)
    if isinstance(part.missing, range):
        part.slots[part.missing.start :] = slots
        return
    for block, slot in zip(part.missing, slots):
        part.slots[block] = slot


def _fill_or_share(group: SlotGroup, part: Part, keys: Keys, given: _Given) -> None:
    """As `_fill`, where an earlier block may be the same one."""
    for number, block in enumerate(part.missing):
        key = keys.part(number, number + 1)
        (slot,) = group.index.find(key)
        if slot < 0:
            (slot,) = given.take(1)
            group.fill(key, (slot,))
        else:
            group.claim((slot,))
            part.kinds[block] = SHARED
        part.slots[block] = slot


def _take_abandoned(group: SlotGroup, part: Part) -> None:
    """Make the request the writer of what was left unwritten, unless one before it did."""
    if part.kinds.count(WRITE) == len(part.missing):
        return
    for block, kind in enumerate(part.kinds):
        slot = part.slots[block]
        if kind != WRITE or slot < 0:
            continue
        if group.state[slot] == ABANDONED:
            group.state[slot] = PENDING
        else:
            part.kinds[block] = SHARED


def take_over(group: SlotGroup, use: GroupUse, unwritten: list[int]) -> tuple[GroupUse, Counts]:
    """Look again at a claim's SHARED blocks in one group; what nobody writes becomes its own.

    Returns the use as it is now, and what that adds to the claim's counts.
    """
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
    stored = kinds.count(STORED) - use.kinds.count(STORED)
    written = kinds.count(WRITE) - use.kinds.count(WRITE)
    return replace(use, kinds=bytes(kinds)), Counts(
        stored=stored, written=written, shared=-stored - written
    )
