"""Slots of a region for a whole batch of requests: first claim what matches, then take the rest."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hostprep.errors import BadInputError, FailedError
from hostprep.layout import RECURRENT, Layout
from hostprep.slots.allocating import allocate, evict, take_over
from hostprep.slots.batch import Draft, check_shortage, claim_matches
from hostprep.slots.checks import check_request
from hostprep.slots.claims import BatchClaim, Claim
from hostprep.slots.group import ABANDONED, READY, SlotGroup
from hostprep.slots.model import Counts, Request, ShortageError
from hostprep.slots.partial import PartialMatches
from hostprep.slots.runs import Listed

__all__ = ["SPARE", "GroupUsage", "SlotPool"]

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
    claimed: int
    cached: int
    """With contents that nobody claims: evictable."""
    free: int


class SlotPool:
    """The index over the slots of one region; every method may be called from any thread.

    It holds no bytes of the region: who loads and stores takes `layout.offset_bytes`. One process
    keeps the index, the one that leads the region's lease; see `hostprep.slots.over`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        hash_bytes: int = 32,
        partial: bool = False,
        keep_evicted: bool = False,
        spare: float = SPARE,
    ) -> None:
        """All slots are empty. `partial` also keeps each block's tokens (4 bytes each).

        With `keep_evicted` a claim tells the hashes of the blocks that it displaced, at 0.1 µs
        each. `spare` is the share of each group's slots that is kept free while there is anything
        to evict: blocks then lie in rows, which are found and claimed, and copied, at once.
        Raises BadInputError.
        """
        self.layout = layout
        self.hash_bytes = hash_bytes
        self._keep_evicted = keep_evicted
        if not (isinstance(spare, (int, float)) and 0 <= spare < 1):
            raise BadInputError(f"spare is {spare}: it is a share of the slots, from 0 to below 1")
        self._groups = tuple(
            SlotGroup(group, hash_bytes, int(group.slots * spare)) for group in layout.groups
        )
        self._has_states = any(group.kind == RECURRENT for group in layout.groups)
        if partial and self._has_states:
            raise BadInputError("partial matches: a recurrent state cannot be cut within a block")
        self._partial = (
            PartialMatches(self._groups, layout.tokens_per_block, hash_bytes) if partial else None
        )
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._totals = Counts()
        self._open: set[Claim] = set()

    def claim_batch(
        self, requests: Sequence[Request], *, token_budget: int | None = None
    ) -> BatchClaim:
        """Claim slots for all requests in one step, under one lock.

        First every block that matches, of every request, is claimed: from here on nothing can
        evict it. Only then are slots taken for the rest, evicting what nobody claims, least
        recently released first. The result is no estimate: what it says is reusable stays so
        until `release`.

        With `token_budget`, requests are admitted in order while the sum of their
        `compute_tokens` fits; the first that does not fit and all after it are `deferred`:
        nothing of theirs is claimed.

        Raises ShortageError, saying what each group lacks, with nothing changed; BadInputError
        for a request that makes no sense, or for a chunk of a prompt where states are kept.
        """
        with self._lock:
            self._check_process()
            drafts, lacking = self._first_phase(requests, token_budget)
            allocate(
                self._groups,
                drafts,
                lacking,
                partial=self._partial,
                keep_evicted=self._keep_evicted,
            )
            claims = tuple(Claim(self, draft) for draft in drafts)
            self._credit(claims)
        return BatchClaim(claims, tuple(requests[len(drafts) :]))

    def _first_phase(
        self, requests: Sequence[Request], token_budget: int | None
    ) -> tuple[list[Draft], list[set[bytes]]]:
        try:
            return self._claim_matches(requests, token_budget, self._partial)
        except ShortageError:
            if self._partial is None:
                raise
        # The sources of partial matches take slots that somebody could do without.
        return self._claim_matches(requests, token_budget, None)

    def _claim_matches(
        self, requests: Sequence[Request], token_budget: int | None, partial: PartialMatches | None
    ) -> tuple[list[Draft], list[set[bytes]]]:
        drafts, lacking = claim_matches(
            self._groups,
            self.layout.tokens_per_block,
            requests,
            partial=partial,
            token_budget=token_budget,
            check=self._check_request,
        )
        check_shortage(self._groups, drafts, lacking)
        return drafts, lacking

    def _check_request(self, request: Request) -> None:
        check_request(
            request, self.layout.tokens_per_block, self.hash_bytes, whole=self._has_states
        )

    def _credit(self, claims: Sequence[Claim]) -> None:
        self._totals = self._totals.plus(*[claim.counts for claim in claims])
        self._open.update(claims)

    def commit(self, claim: Claim, blocks: int | None = None) -> None:
        """Say that the claim's blocks were written: all, or those of its first `blocks` hashes.

        From now on others match them: of many blocks the first ones first, in steps between which
        others may claim. Raises BadInputError for a claim that was released.
        """
        left = True
        while left:
            with self._lock:
                self._check_open(claim)
                left = self._commit_some(claim, blocks)

    def _commit_some(self, claim: Claim, blocks: int | None) -> bool:
        """Commit the next of a claim's blocks in each group; return whether there are more."""
        left = False
        for slots, use, unwritten in zip(self._groups, claim.uses, claim.unwritten):
            ready = len(unwritten) if blocks is None else bisect_left(unwritten, blocks)
            done = unwritten[: min(ready, _COMMITTED_AT_ONCE)]
            places = Listed([use.slots[i] for i in done])
            slots.written(places)
            if self._partial is not None and self._partial.leads(slots):
                self._partial.learn(claim.request, done, places)
            del unwritten[: len(done)]
            left = left or len(done) < ready
        return left

    def take_over(self, claim: Claim) -> int:
        """Look again at what others were to write for this claim (its SHARED blocks).

        What is written by now becomes STORED; what its writer gave up becomes this claim's to
        WRITE. Returns how many blocks are still being written by others.
        """
        with self._lock:
            self._check_open(claim)
            moved = Counts()
            for index, slots in enumerate(self._groups):
                claim.uses[index], more = take_over(
                    slots, claim.uses[index], claim.unwritten[index]
                )
                moved = moved.plus(more)
            claim.counts = claim.counts.plus(moved)
            self._totals = self._totals.plus(moved)
            return claim.counts.shared

    def release(self, claim: Claim) -> None:
        """End a claim: its contents stay until they are evicted, the last blocks first.

        What was not committed is forgotten, or left to those who share it (`take_over`).
        Raises BadInputError for a claim that was released before.
        """
        with self._lock:
            self._check_open(claim)
            self._open.discard(claim)
            for slots, use, unwritten, copied in zip(
                self._groups, claim.uses, claim.unwritten, claim.copied_from
            ):
                slots.mark([use.slots[i] for i in unwritten], ABANDONED)
                held = [slot for slot in use.slots if slot >= 0]
                slots.note_gaps(held)
                slots.settle(slots.unclaim([*copied, *reversed(held)]))

    def holds(self, block_hash: bytes, group: int = 0) -> bool:
        """Whether a block is there and written. It may be gone at the next call: claim it."""
        if len(block_hash) != self.hash_bytes:
            raise BadInputError(f"a hash of {len(block_hash)} bytes: not {self.hash_bytes}")
        slots = self._groups[group]
        with self._lock:  # what is written has its entry in the index
            found = slots.index.find_all(block_hash, 1)
            return bool(found) and slots.state[found[0]] == READY

    def forget_unclaimed(self) -> int:
        """Empty every slot that nobody claims (the model's weights changed). Returns how many.

        In steps, between which others may claim. Claimed blocks stay, and match: release first.
        """
        forgotten = 0
        for slots in self._groups:
            left = slots.order.count  # what is released from here on may be of the new weights
            while left > 0:
                with self._lock:
                    count = min(left, _FORGOTTEN_AT_ONCE, slots.order.count)
                    evict(slots, count, self._partial)
                forgotten += count
                left = left - count if count else 0
        return forgotten

    def totals(self) -> Counts:
        """Return what was done for all requests so far: the sum of their claims' counts."""
        with self._lock:
            return self._totals

    def open_claims(self) -> int:
        """Return how many claims were not released."""
        with self._lock:
            return len(self._open)

    def usage(self) -> tuple[GroupUsage, ...]:
        """Return each group's slots by use (for metrics)."""
        with self._lock:
            return tuple(_usage(slots) for slots in self._groups)

    @property
    def memory_bytes(self) -> int:
        """What the index takes, for all groups."""
        partial = self._partial.memory_bytes if self._partial is not None else 0
        return partial + sum(slots.memory_bytes for slots in self._groups)

    def _check_open(self, claim: Claim) -> None:
        self._check_process()
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
                remedy="claim in the process that leads the region's lease, and tell the others",
            )


def _usage(slots: SlotGroup) -> GroupUsage:
    count, cached, free = slots.group.slots, slots.order.count, slots.free.count
    return GroupUsage(slots.group.name, count, count - cached - free, cached, free)
