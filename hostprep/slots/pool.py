"""Slots of a region for a whole batch of requests: first claim what matches, then take the rest."""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import add

from hostprep.errors import BadInputError, FailedError
from hostprep.layout import RECURRENT, Layout
from hostprep.slots.batch import (
    Draft,
    allocate,
    allocate_blocks,
    claim_blocks_found,
    claim_matches,
    claim_ready,
    evict,
    find_shortage,
    take_over,
)
from hostprep.slots.checksums import Checksum, checksums_of
from hostprep.slots.claim import BatchClaim, Claim
from hostprep.slots.directory import Directory, Kept
from hostprep.slots.group import ABANDONED, READY, SlotGroup
from hostprep.slots.growth import usable_slots
from hostprep.slots.index import Keys
from hostprep.slots.line import Line, Ticket
from hostprep.slots.matching import PartialMatches
from hostprep.slots.request import (
    OUTSIDE,
    SHARED,
    Counts,
    GroupUse,
    Missing,
    Request,
    ShortageError,
    check_request,
    problem_of,
)
from hostprep.slots.rows import Listed, in_a_row, marks_of
from hostprep.slots.step import CHANGING, COUNTING, NOTHING, Step, make_again

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_FORGOTTEN_AT_ONCE = 4096
_COMMITTED_AT_ONCE = 512
"""Some 3 µs each, with the lock held."""
SPARE = 1 / 32
"""Of a group's slots. With 1/64, 512 blocks of a pool long in use lie in twice as many rows."""


@dataclass(frozen=True)
class GroupUsage:
    """One group's slots, now."""

    group: str
    slots: int
    """Those that are handed out."""
    claimed: int
    cached: int
    """Unclaimed, with contents: evictable."""
    free: int


class SlotPool:
    """The index over the slots of one region; every method may be called from any thread.

    It holds no bytes of the region: who loads and stores takes `layout.offset_bytes`. One process
    keeps the index, the one that leads the region's lease; see `hostprep.slots.over`.

    An exception may come between any two instructions, such as a signal handler's. So each step
    notes what it is about to change, before it does (`Step`), and what it decides takes effect at
    one instruction: a claim is open, or it is not. Where a step was left half done, the next one
    makes everything else again from the open claims and from what the slots hold.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        hash_bytes: int = 32,
        partial: bool = False,
        keep_evicted: bool = False,
        spare: float = SPARE,
        usable: Sequence[int] | None = None,
        directory: Directory | None = None,
        checksum: Checksum | None = None,
    ) -> None:
        """All slots are empty; with a `directory`, until `recover`.

        `usable`: how many slots of each group are handed out, the first ones, until `extend`; by
        default all. Not with a directory. `checksum`: for a directory with checksums.

        `partial` also keeps each block's tokens (4 bytes each).
        With `keep_evicted` a claim reports the hashes of the blocks that it displaced, at 0.1 µs
        each. `spare` is the share of each group's slots that is kept free while there is anything
        to evict: blocks then lie in rows, which are found and claimed, and copied, at once.
        Raises BadInputError.
        """
        self.layout = layout
        self.hash_bytes = hash_bytes
        self._keep_evicted = keep_evicted
        if not (isinstance(spare, (int, float)) and 0 <= spare < 1):
            raise BadInputError(f"spare is {spare}: it is a share of the slots, from 0 to below 1")
        self._spare = spare
        self._groups = tuple(
            SlotGroup(group, hash_bytes, int(group.slots * spare)) for group in layout.groups
        )
        self._usable = usable_slots(layout.groups, [group.slots for group in layout.groups])
        """Which slots of each group may be handed out."""
        if usable is not None:
            if directory is not None:
                raise BadInputError("a directory's slots are all usable, or none")
            self._usable = usable_slots(layout.groups, usable)
            for slots, first in zip(self._groups, self._usable.ends):
                slots.spare = int(first * spare)
                slots.free.withhold(range(first, slots.group.slots))
        self._has_states = any(group.kind == RECURRENT for group in layout.groups)
        if partial and self._has_states:
            raise BadInputError("partial matches: a recurrent state cannot be cut within a block")
        self._partial = (
            PartialMatches(self._groups, layout.tokens_per_block, hash_bytes) if partial else None
        )
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._step: Step | None = None
        """The one that runs, or was left half done; at one instruction it ends whole: None."""
        self._totals = [0] * len(fields(Counts))
        """Of the claims that were released, in the order of the fields of Counts."""
        self._open: set[Claim] = set()
        self._line = Line()
        if directory is not None and (directory.layout, directory.key_bytes) != (
            layout,
            hash_bytes,
        ):
            raise BadInputError(
                f"the directory is of another layout, or of keys of {directory.key_bytes} bytes: "
                f"this pool's have {hash_bytes}"
            )
        if (directory is not None and directory.checksums) != (checksum is not None):
            raise BadInputError("checksums: the directory and the pool both have them, or none")
        self._directory = directory
        self._checksum = checksum
        self.damaged_blocks = 0
        """Blocks whose bytes were not what their records said, at `recover`: they are not there."""
        self._quarantine: list[tuple[SlotGroup, list[int]]] | None = None
        """Slots that a dead engine's copies may still be written to; None before `recover`."""
        self._quarantined_until_s = 0.0

    def recover(self, quarantine_s: float = 60.0) -> int:
        """Fill the pool with the blocks that its directory records. Returns how many.

        To be called once, before the first claim, by who judged `directory.identity` equal to its
        own, or has `reset` the directory. Slots that were being written are not handed out for
        `quarantine_s` seconds: copies of a dead engine may still land there. Raises BadInputError
        for a pool without a directory, or one that is in use.
        """
        self._check_process()
        step = Step()
        with self._lock:
            self._begin(step)
            directory = self._directory
            if directory is None:
                raise BadInputError("this pool has no directory to recover from")
            if self._quarantine is not None or self._open or any(self._totals):
                raise BadInputError(
                    "recover: the pool is in use", remedy="call it once, before the first claim"
                )
            found = directory.read()
            if self._checksum is not None:
                found = [
                    self._undamaged(directory, self._checksum, *each) for each in enumerate(found)
                ]
            quarantine = [
                (slots, kept.writing) for slots, kept in zip(self._groups, found) if kept.writing
            ]
            until_s = time.monotonic() + quarantine_s
            step.changes = CHANGING
            self._quarantined_until_s = until_s
            # One instruction: left half done from here on, it is done, with fewer blocks.
            self._quarantine = quarantine
            for slots, kept in zip(self._groups, found):
                slots.restore(kept)
            self._step = None
            return sum(len(kept.slots) for kept in found)

    def extend(self, usable: Sequence[int], holes: Sequence[Sequence[range]] = ()) -> None:
        """Hand out more slots: the first ones of each group, as many as `usable` says.

        For a region that grows while it is registered. `holes`: by group, in ascending order, what
        is not to be handed out of them. Raises BadInputError for what would take slots back that
        were handed out, or fill a hole.
        """
        self._check_process()
        step = Step()
        with self._lock:
            self._begin(step)
            before = self._usable
            now = usable_slots(self.layout.groups, usable, holes, before=before)
            step.changes = CHANGING
            # One instruction: left half done from here on, all of them are made free.
            self._usable = now
            for slots, count, runs in zip(self._groups, now.counts, now.since(before)):
                slots.spare = int(count * self._spare)
                for run in runs:
                    slots.free.give(run)
            step.changes = NOTHING
            self._line.wake_all()
            self._step = None

    def _undamaged(self, directory: Directory, checksum: Checksum, group: int, kept: Kept) -> Kept:
        """Return the blocks whose bytes are what their records say; void the records of others."""
        checksums = checksums_of(checksum, group, kept.order)
        damaged = {
            slot
            for slot, found in zip(kept.order, checksums)
            if found != directory.checksum(group, slot)
        }
        if not damaged:
            return kept
        self.damaged_blocks += len(damaged)
        directory.begin(group, sorted(damaged), 0)
        return kept.without(damaged)

    def recovered_hashes(self) -> list[bytes]:
        """Return the hashes of the blocks that `recover` found and that are there since then."""
        self._check_process()
        with self._lock:
            self._put_right()
            return [key for slots in self._groups for key in slots.restored_keys()]

    def _end_quarantine(self, step: Step) -> None:
        if self._quarantine and time.monotonic() >= self._quarantined_until_s:
            step.changes = CHANGING
            for slots, held_back in self._quarantine:
                slots.free.give(held_back)
            self._quarantine = []
            step.changes = NOTHING
            self._wake()

    def quarantine_left_s(self) -> float:
        """Return how long slots stay in quarantine; infinity where there are none."""
        if not self._quarantine:
            return math.inf
        return max(0.0, self._quarantined_until_s - time.monotonic())

    def _claim_of(self, draft: Draft) -> Claim:
        claim = Claim(
            self,
            draft.request,
            [GroupUse(part.slots, bytes(part.kinds), part.evicted) for part in draft.parts],
            evicted=draft.evicted,
            reused_tokens=draft.reused_tokens,
            partial=draft.partial,
        )
        ids = draft.request.token_ids
        if self._partial is not None and ids is not None:
            claim.known = replace(
                draft.request, hashes=tuple(draft.request.hashes), token_ids=array("I", ids)
            )
        return claim

    def _enter(self, step: Step, claims: Sequence[Claim], ticket: Ticket | None) -> None:
        """Open claims; void the records of what they will write, before its slots are known."""
        if self._directory is not None:
            for claim in claims:
                self._void_records(self._directory, claim)
        if ticket is not None:
            step.needs = ticket.needs
            step.ticket = ticket
        step.claims = claims
        self._open.update(claims)  # one instruction: from here on they hold their slots
        if ticket is not None and claims:
            self._line.leave(ticket)
            self._wake()

    def _void_records(self, directory: Directory, claim: Claim) -> None:
        claim.generation = directory.new_generation() if claim.request.keep else 0
        for index, (use, blocks) in enumerate(zip(claim.uses, claim.unwritten)):
            slots = use.slots
            if len(blocks) < len(slots):
                slots = [slots[block] for block in blocks]
            directory.begin(index, in_a_row(slots), claim.generation)

    def claim_batch(
        self,
        requests: Iterable[Request],
        *,
        token_budget: int | None = None,
        largest_budget: int | None = None,
        ticket: Ticket | None = None,
        ahead: bool = False,
    ) -> BatchClaim:
        """Claim slots for all requests in one step, under one lock.

        First every block that matches, of every request, is claimed: from here on nothing can
        evict it. Only then are slots taken for the rest, evicting unclaimed ones, least
        recently released first. The result is no estimate: what it says is reusable stays so
        until `release`.

        With `token_budget`, requests are admitted in order while the sum of their
        `compute_tokens` fits; the first that does not fit and all after it are `deferred`:
        nothing of theirs is claimed. `largest_budget` is what later calls may have, where
        that is more: a first request that needs more raises OverBudgetError.

        `ticket` is the batch's place in line (see `line_up`). While others wait there, a claim
        takes no slots from those who came before it, and one without a ticket from none of them,
        unless it goes `ahead`: for sequences that hold slots already, and would hold up the
        line if they waited in it.

        Raises ShortageError, naming what each group lacks, with nothing changed; BadInputError
        for an invalid request, or for a chunk of a prompt where states are kept. Whatever is
        raised, a signal handler's exception too, nothing stays claimed.
        """
        requests = tuple(requests)
        for name, budget in (("token_budget", token_budget), ("largest_budget", largest_budget)):
            if budget is not None and not isinstance(budget, int):
                raise BadInputError(f"{name} is {budget!r}: a whole number, or None")
        self._check_process()
        step = Step()
        try:
            with self._lock:
                self._begin(step)
                self._end_quarantine(step)
                reserved = self._reserved(ticket, ahead=ahead)
                drafts, lacking = self._first_phase(
                    step,
                    requests,
                    token_budget,
                    largest_budget,
                    reserved=reserved,
                    ticket=ticket,
                )
                step.changes = CHANGING
                allocate(
                    self._groups,
                    drafts,
                    lacking,
                    partial=self._partial,
                    keep_evicted=self._keep_evicted,
                )
                claims = tuple([self._claim_of(draft) for draft in drafts])
                batch = BatchClaim(claims, requests[len(drafts) :])
                self._enter(step, claims, ticket)
                self._step = None
        except BaseException:
            self._undo(step)
            raise
        return batch

    def claim_blocks(
        self,
        hashes: Iterable[bytes],
        *,
        name: str = "",
        store: bool = True,
        keep: bool = True,
        ticket: Ticket | None = None,
        ahead: bool = False,
    ) -> Claim:
        """Claim single blocks, wherever they are in their sequences, in the layout's only group.

        Cheaper than `claim_batch` for a few of them. With `store`, those that are there become
        STORED (or SHARED), and the rest get slots to WRITE; without, the blocks up to the first one
        that is not there are REUSED, and the claim has no others. `name` is the request's in
        errors; `keep` as a Request's, `ticket` and `ahead` as a batch's.

        Raises ShortageError with nothing changed; BadInputError for hashes of another kind, or a
        layout of several groups, of windows or of states.
        """
        group = self._groups[0]
        if len(self._groups) > 1 or not group.has_all or self._partial is not None:
            raise BadInputError("claim_blocks: for one group without a window only")
        if not isinstance(hashes, (list, tuple)):
            hashes = list(hashes)
        problem = problem_of(hashes, self.hash_bytes)
        if problem:
            raise BadInputError(problem)
        request = Request(name, len(hashes), hashes, store=store, keep=keep)
        keys = Keys(hashes, self.hash_bytes)
        self._check_process()
        step = Step()
        try:
            with self._lock:
                self._begin(step)
                self._end_quarantine(step)
                (reserved,) = self._reserved(ticket, ahead=ahead) or (0,)
                step.changes = CHANGING
                if store:
                    claim = self._claim_or_allocate(step, request, keys, reserved, ticket)
                else:
                    claim = self._claim_ready(step, request, keys, reserved, ticket)
                self._enter(step, (claim,), ticket)
                self._step = None
        except BaseException:
            self._undo(step)
            raise
        return claim

    def _claim_or_allocate(
        self, step: Step, request: Request, keys: Keys, reserved: int, ticket: Ticket | None
    ) -> Claim:
        group = self._groups[0]
        draft, lack = claim_blocks_found(group, keys, reserved)
        if lack is not None:
            self._refuse(step, (lack,), (len(draft.first) + len(draft.wanted),), ticket)
        use, evicted = allocate_blocks(group, keys, draft, keep_evicted=self._keep_evicted)
        return Claim(self, request, [use], evicted=evicted)

    def _claim_ready(
        self, step: Step, request: Request, keys: Keys, reserved: int, ticket: Ticket | None
    ) -> Claim:
        use, lack, taken = claim_ready(self._groups[0], keys, reserved)
        if lack is not None:
            self._refuse(step, (lack,), (taken,), ticket)
        request.tokens = count = len(use.slots)
        return Claim(self, request, [use], evicted=0, reused_tokens=count)

    def _first_phase(
        self,
        step: Step,
        requests: Sequence[Request],
        token_budget: int | None,
        largest_budget: int | None,
        *,
        reserved: Sequence[int],
        ticket: Ticket | None,
    ) -> tuple[list[Draft], list[set[bytes]]]:
        # Where slots are short, the sources of partial matches are those that it can do without.
        for partial in (self._partial, None) if self._partial is not None else (None,):
            step.changes = COUNTING
            drafts, lacking, wrong = claim_matches(
                self._groups,
                self.layout.tokens_per_block,
                requests,
                partial=partial,
                token_budget=token_budget,
                largest_budget=largest_budget,
                check=self._check_request,
            )
            if wrong is not None:
                step.changes = NOTHING
                raise wrong
            missing, needs = find_shortage(self._groups, drafts, lacking, reserved)
            if not missing:
                break
        else:
            self._refuse(step, missing, needs, ticket)
        return drafts, lacking

    def _refuse(
        self,
        step: Step,
        missing: tuple[Missing, ...],
        needs: tuple[int, ...],
        ticket: Ticket | None,
    ) -> NoReturn:
        """Raise ShortageError: all is as it was before, but for what the ticket waits for."""
        step.changes = NOTHING
        if ticket is not None:
            now, most = self._usable.counts, []
            for slots, end, count in zip(self._groups, self._usable.ends, now):
                most.append(slots.group.slots - (end - count))
            if self._line.note_refused(ticket, needs, most, now):
                self._wake()
        self._step = None
        raise ShortageError(missing)

    def _check_request(self, request: Request) -> None:
        check_request(
            request,
            self.layout.tokens_per_block,
            self.hash_bytes,
            whole=self._has_states,
            partial=self._partial is not None,
        )

    def line_up(self) -> Ticket:
        """Take a place in line, behind all that have one, for one claim (`with` gives it up).

        Nothing is reserved until a claim with it is refused for want of slots: from then on those
        slots are, as they are released. Then ask again in the next step, or after `Ticket.wait`.
        Raises BusyError where 1024 wait already.
        """
        self._check_process()
        with self._lock:
            self._put_right()
            return self._line.join(self)

    def leave_line(self, ticket: Ticket) -> None:
        """See `Ticket.leave`."""
        self._check_process()
        with self._lock:
            self._put_right()
            self._line.leave(ticket)
            self._wake()

    def _reserved(self, ticket: Ticket | None, *, ahead: bool) -> Sequence[int]:
        """Return by group the slots of those who came before; empty for none."""
        if ticket is not None:
            if ahead:
                raise BadInputError("a claim goes ahead of the line, or has a ticket: not both")
            self._line.check(ticket)
        if ahead or not self._line.tickets:
            return ()
        return self._line.reserved(len(self._groups), ticket)

    def _wake(self) -> None:
        self._line.wake([slots.available for slots in self._groups])

    def _begin(self, step: Step) -> None:
        """Have a step be the one that runs: with the lock, before anything else."""
        self._put_right()
        self._step = step

    def _put_right(self) -> None:
        """Put right what an exception left half done."""
        if self._step is not None:
            self._repair(self._step)

    def _undo(self, step: Step) -> None:
        """Take back a step that raised: what it left half done, and claims that nobody got."""
        with self._lock:
            self._put_right()
            if not self._open.isdisjoint(step.claims):
                self._step = step  # it had ended, and nothing ran since that is not whole
                self._repair(step)

    def _repair(self, step: Step) -> None:
        """Make everything again that the step may have left half done.

        What is open, and what each slot holds, tell all. May itself be left half done.
        """
        if step.closing is not None:
            claim, totals = step.closing
            if claim not in self._open:
                self._totals = totals
        self._open.difference_update(step.claims)
        if step.ticket is not None:
            self._line.put(step.ticket, step.needs)
        if step.changes:
            make_again(
                self._groups,
                self._open,
                self._withheld(),
                self._partial,
                rebuild=step.changes == CHANGING,
            )
        self._wake()
        self._step = None

    def _withheld(self) -> Iterable[tuple[SlotGroup, Sequence[int]]]:
        """Return the slots that are neither free nor used."""
        withheld: list[tuple[SlotGroup, Sequence[int]]] = [*(self._quarantine or ())]
        for slots, end, holes in zip(self._groups, self._usable.ends, self._usable.holes):
            withheld += [(slots, hole) for hole in (*holes, range(end, slots.group.slots))]
        return withheld

    def commit(self, claim: Claim, blocks: int | None = None) -> None:
        """Mark the claim's blocks as written: all, or those of its first `blocks` hashes.

        From now on others match them: of many blocks the first ones first, in steps between which
        others may claim. After an exception from outside, call it again for the rest. Raises
        BadInputError for a claim that was released.
        """
        if blocks is not None and not isinstance(blocks, int):
            raise BadInputError(f"commit: blocks is {blocks!r}: a whole number, or None for all")
        self._check_process()
        # Read without the lock: nobody else has these slots.
        checksums = self._checksums_of(claim, blocks)
        left = True
        while left:
            step = Step()
            try:
                with self._lock:
                    self._begin(step)
                    self._check_open(claim)
                    step.changes = CHANGING
                    left = self._commit_some(claim, blocks, checksums)
                    self._step = None
            except BaseException:
                self._undo(step)
                raise

    def _checksums_of(self, claim: Claim, blocks: int | None) -> list[dict[int, int]]:
        """Return by group the checksums of what is to be committed, by block."""
        if self._checksum is None or not claim.generation:
            return [{} for _ in self._groups]
        with self._lock:
            self._put_right()
            self._check_open(claim)
        found = []
        for index, (use, unwritten) in enumerate(zip(claim.uses, claim.unwritten)):
            ready = len(unwritten) if blocks is None else bisect_left(unwritten, blocks)
            done = unwritten[:ready]
            found.append({block: self._checksum(index, use.slots[block]) for block in done})
        return found

    def _commit_some(
        self, claim: Claim, blocks: int | None, checksums: Sequence[Mapping[int, int]]
    ) -> bool:
        """Commit the next of a claim's blocks in each group; return whether there are more."""
        left = False
        for index, slots in enumerate(self._groups):
            use, unwritten = claim.uses[index], claim.unwritten[index]
            ready = len(unwritten) if blocks is None else bisect_left(unwritten, blocks)
            done = unwritten[: min(ready, _COMMITTED_AT_ONCE)]
            places = Listed([use.slots[i] for i in done])
            if self._directory is not None and claim.generation:
                # What the slots were claimed for: the request's list is the caller's, to change.
                keys = slots.index.keys(places)
                known = [checksums[index][i] for i in done] if self._checksum is not None else ()
                self._directory.finish(index, places, keys, claim.generation, known)
            slots.written(places)
            if self._partial is not None and self._partial.leads(slots):
                self._partial.learn(claim.known or claim.request, done, places)
            del unwritten[: len(done)]
            left = left or len(done) < ready
        return left

    def take_over(self, claim: Claim) -> int:
        """Check again what others were to write for this claim (its SHARED blocks).

        What is written by now becomes STORED; what its writer gave up becomes this claim's to
        WRITE. Returns how many blocks are still being written by others.
        """
        self._check_process()
        step = Step()
        try:
            with self._lock:
                self._begin(step)
                self._check_open(claim)
                step.changes = CHANGING
                for index, slots in enumerate(self._groups):
                    known = set(claim.unwritten[index])
                    claim.uses[index] = take_over(slots, claim.uses[index], claim.unwritten[index])
                    if self._directory is not None:
                        blocks = [block for block in claim.unwritten[index] if block not in known]
                        taken = [claim.uses[index].slots[block] for block in blocks]
                        self._directory.begin(index, taken, claim.generation)
                self._step = None
                return sum(use.kinds.count(SHARED) for use in claim.uses)
        except BaseException:
            self._undo(step)
            raise

    def release(self, claim: Claim) -> None:
        """End a claim: its contents stay until they are evicted, the last blocks first.

        What was not committed is forgotten, or left to those who share it (`take_over`).
        Raises BadInputError for a claim that was released before; after an exception from outside
        it may have been.
        """
        self._check_process()
        step = Step()
        try:
            with self._lock:
                self._begin(step)
                self._check_open(claim)
                totals = list(map(add, self._totals, claim.sums()))
                step.changes = CHANGING
                step.closing = claim, totals
                self._open.discard(claim)  # one instruction: from here on it holds nothing
                self._totals = totals
                self._give_back(claim)
                if self._line.tickets:
                    self._wake()
                self._step = None
        except BaseException:
            self._undo(step)
            raise

    def _give_back(self, claim: Claim) -> None:
        for index, (slots, use) in enumerate(zip(self._groups, claim.uses)):
            unwritten = claim.unwritten[index]
            if unwritten:
                slots.mark([use.slots[i] for i in unwritten], ABANDONED)
            held = use.slots
            if OUTSIDE in use.kinds:
                held = [slot for slot in held if slot >= 0]
            if self._directory is not None:
                self._touch(self._directory, index, held)
            slots.note_gaps(held)
            copied = claim.partial.slots[index : index + 1] if claim.partial else ()
            slots.settle(slots.unclaim([*copied, *reversed(held)]))

    def touch(self, hashes: Iterable[bytes], group: int = 0) -> None:
        """Note these blocks as used just now, the first of them last: they are evicted last.

        What is claimed, not there or not a hash of this pool's is passed by.
        """
        width, slots = self.hash_bytes, self._groups[group]
        wanted = [one for one in dict.fromkeys(hashes) if type(one) is bytes and len(one) == width]
        self._check_process()
        step = Step()
        try:
            with self._lock:
                self._begin(step)
                found = slots.index.find(Keys(wanted, width))
                step.changes = CHANGING
                slots.touch(found)
                self._step = None
                if self._directory is not None:
                    self._touch(self._directory, group, [slot for slot in found if slot >= 0])
        except BaseException:
            self._undo(step)
            raise

    def _touch(self, directory: Directory, index: int, slots: Sequence[int]) -> None:
        marks = marks_of(self._groups[index].order.again, slots)
        for again in set(marks):
            some = [slot for slot, mark in zip(slots, marks) if mark == again]
            directory.touch(index, in_a_row(some), again=bool(again))

    def holds(self, block_hash: bytes, group: int = 0) -> bool:
        """Whether a block is there and written. It may be gone at the next call: claim it."""
        if type(block_hash) is not bytes:
            raise BadInputError(f"a hash is bytes, and not {type(block_hash).__name__}")
        if len(block_hash) != self.hash_bytes:
            raise BadInputError(f"a hash of {len(block_hash)} bytes: not {self.hash_bytes}")
        slots = self._groups[group]
        self._check_process()
        with self._lock:
            self._put_right()
            slot = slots.index.slot_of(block_hash)
            return slot >= 0 and slots.state[slot] == READY

    def forget_unclaimed(self) -> int:
        """Empty every unclaimed slot (the model's weights changed). Returns how many.

        In steps, between which others may claim. Claimed blocks stay, and match: release first.
        A directory's records are void, all of them, and what is written from here on is recorded
        after its `reset` only: who forgets knows what the new contents are of.
        """
        if self._directory is not None:
            self._directory.void()
        forgotten = 0
        for slots in self._groups:
            left = slots.order.count  # what is released from here on may be of the new weights
            while left > 0:
                count = self._forget_some(slots, left)
                forgotten += count
                left = left - count if count else 0
        return forgotten

    def _forget_some(self, slots: SlotGroup, most: int) -> int:
        self._check_process()
        step = Step()
        try:
            with self._lock:
                self._begin(step)
                step.changes = CHANGING
                count = min(most, _FORGOTTEN_AT_ONCE, slots.order.count)
                evict(slots, count, self._partial)
                self._step = None
                return count
        except BaseException:
            self._undo(step)
            raise

    def totals(self) -> Counts:
        """Return what was done for all requests so far: the sum of their claims' counts."""
        self._check_process()
        with self._lock:
            self._put_right()
            of_open = [claim.sums() for claim in self._open]
            return Counts(*map(sum, zip(self._totals, *of_open)))

    def open_claims(self) -> int:
        """Return how many claims were not released."""
        self._check_process()
        with self._lock:
            return len(self._open)

    def usage(self) -> tuple[GroupUsage, ...]:
        """Return each group's slots by use (for metrics)."""
        self._check_process()
        with self._lock:
            self._put_right()
            return tuple(map(_usage, self._groups, self._usable.counts))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the index, for all groups."""
        partial = self._partial.memory_bytes if self._partial is not None else 0
        return partial + sum(slots.memory_bytes for slots in self._groups)

    def _check_open(self, claim: Claim) -> None:
        if claim not in self._open:
            raise BadInputError(
                f"the claim of request {claim.request.id!r} is not open in this pool",
                reason="ClaimReleased",
                remedy="a claim ends with its release, once",
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise FailedError(
                f"the index of these slots is process {self._pid}'s",
                reason="OtherProcess",
                remedy="claim in the process that leads the region's lease, and send slot numbers",
            )


def _usage(slots: SlotGroup, usable: int) -> GroupUsage:
    count, cached, free = usable, slots.order.count, slots.free.count
    return GroupUsage(slots.group.name, count, count - cached - free, cached, free)
