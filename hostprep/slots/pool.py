"""Slots of a region for a whole batch of requests: first claim what matches, then take the rest."""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hostprep.errors import BadInputError, BusyError, FailedError
from hostprep.layout import RECURRENT, Layout
from hostprep.slots.batch import Draft, allocate, check_shortage, claim_matches, evict, take_over
from hostprep.slots.group import ABANDONED, READY, SlotGroup
from hostprep.slots.matching import PartialMatches
from hostprep.slots.request import (
    WRITE,
    Counts,
    GroupUse,
    PartialMatch,
    Request,
    ShortageError,
    check_request,
)
from hostprep.slots.rows import Listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.attach import Attachment

_FORGOTTEN_AT_ONCE = 4096
_COMMITTED_AT_ONCE = 512
"""Some 3 µs each, with the lock held."""
SPARE = 1 / 32
"""Of a group's slots. With 1/64, 512 blocks of a pool long in use lie in twice as many rows."""


class Claim:
    """Slots of one request, none of which is evicted before `release`.

    One thread at a time commits it, takes over for it, or releases it. A claim that is dropped
    without a release keeps its slots for good.
    """

    def __init__(self, pool: SlotPool, draft: Draft) -> None:
        self._pool = pool
        self.request: Request = draft.request
        self.partial: PartialMatch | None = draft.partial
        """Further tokens to copy, beyond the blocks that are REUSED."""
        self.uses: list[GroupUse] = [
            GroupUse(part.slots, bytes(part.kinds), part.evicted) for part in draft.parts
        ]
        """By group, in the layout's order."""
        self.counts: Counts = draft.counts()
        self._unwritten: list[list[int]] | None = None
        copied = self.partial.slots if self.partial else ()
        self.copied_from = [copied[i : i + 1] for i in range(len(self.uses))]

    @property
    def unwritten(self) -> list[list[int]]:
        """By group: blocks still to be committed."""
        if self._unwritten is None:  # not needed while claiming
            self._unwritten = [use.blocks(WRITE) for use in self.uses]
        return self._unwritten

    @property
    def reused_tokens(self) -> int:
        """Tokens to load, partial match included."""
        return self.counts.reused_tokens

    @property
    def compute_tokens(self) -> int:
        """Tokens left to compute."""
        return self.counts.compute_tokens

    def commit(self, blocks: int | None = None) -> None:
        """See `SlotPool.commit`."""
        self._pool.commit(self, blocks)

    def release(self) -> None:
        """See `SlotPool.release`."""
        self._pool.release(self)

    def __repr__(self) -> str:
        return f"<Claim {self.request.id!r} {self.counts!r}>"


@dataclass(frozen=True)
class BatchClaim:
    """A whole batch's claims, in the order of its requests."""

    claims: tuple[Claim, ...]
    deferred: tuple[Request, ...] = ()
    """Requests beyond the token budget: nothing of theirs is claimed."""

    @property
    def compute_tokens(self) -> int:
        """What the batch has to compute: never more than the budget."""
        return sum(claim.compute_tokens for claim in self.claims)

    def release(self) -> None:
        """Release every claim. Raises BadInputError, once all are, if one was before."""
        released_before: BadInputError | None = None
        for claim in self.claims:
            try:
                claim.release()
            except BadInputError as error:
                released_before = error
        if released_before is not None:
            raise released_before


@dataclass(frozen=True)
class GroupUsage:
    """One group's slots, now."""

    group: str
    slots: int
    claimed: int
    cached: int
    """Unclaimed, with contents: evictable."""
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
        evict it. Only then are slots taken for the rest, evicting unclaimed ones, least
        recently released first. The result is no estimate: what it says is reusable stays so
        until `release`.

        With `token_budget`, requests are admitted in order while the sum of their
        `compute_tokens` fits; the first that does not fit and all after it are `deferred`:
        nothing of theirs is claimed.

        Raises ShortageError, naming what each group lacks, with nothing changed; BadInputError
        for an invalid request, or for a chunk of a prompt where states are kept.
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
            self._totals = self._totals.plus(*[claim.counts for claim in claims])
            self._open.update(claims)
        return BatchClaim(claims, tuple(requests[len(drafts) :]))

    def _first_phase(
        self, requests: Sequence[Request], token_budget: int | None
    ) -> tuple[list[Draft], list[set[bytes]]]:
        try:
            return self._claim_matches(requests, token_budget, self._partial)
        except ShortageError:
            if self._partial is None:
                raise
        # The sources of partial matches take slots that the batch can do without.
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

    def commit(self, claim: Claim, blocks: int | None = None) -> None:
        """Mark the claim's blocks as written: all, or those of its first `blocks` hashes.

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
        """Check again what others were to write for this claim (its SHARED blocks).

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
        """Empty every unclaimed slot (the model's weights changed). Returns how many.

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
        """Bytes of the index, for all groups."""
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
                remedy="claim in the process that leads the region's lease, and send slot numbers",
            )


def _usage(slots: SlotGroup) -> GroupUsage:
    count, cached, free = slots.group.slots, slots.order.count, slots.free.count
    return GroupUsage(slots.group.name, count, count - cached - free, cached, free)


_lock = threading.Lock()
_pools: weakref.WeakKeyDictionary[Attachment, weakref.ref[SlotPool]] = weakref.WeakKeyDictionary()
"""By attachment, not by the file's inode: a pool that outlives its attachment is no reason to
refuse the next, and a file system mounted anew starts its inodes again."""


def over(
    attachment: Attachment,
    *,
    layout: Layout | None = None,
    hash_bytes: int = 32,
    partial: bool = False,
    keep_evicted: bool = False,
    spare: float = SPARE,
) -> SlotPool:
    """Return a pool over a region's slots, all empty; see SlotPool for what is named alike.

    `layout` stands in for the handoff's, where the pool was not sized for a model. The process
    that leads the region's lease keeps the one index; those that joined it (other ranks) receive
    slot numbers from it, and have the same layout. The pool holds nothing of the attachment: keep
    that open while slots are used.

    Raises BadInputError: the attachment joined another's lease or only reads, the handoff has no
    layout, or one that does not fit. Raises BusyError where this process has a pool over it.
    """
    region = attachment.region
    if not attachment.is_leader:
        raise BadInputError(
            f"region {region.name} is not this process's to hand out slots of",
            reason="NotTheLeader",
            remedy="make the pool in the process that claimed the region, and send slot numbers",
        )
    if layout is None and region.layout is None:
        raise BadInputError(
            f"region {region.name} has no layout",
            reason="NoLayout",
            remedy="size the pool for the model (`hostprep size`), or give a layout",
        )
    chosen = layout or Layout.parse(region.layout or {}, region.size_bytes)
    chosen.check_fits(region.size_bytes)
    with _lock:
        earlier = _pools.get(attachment)
        if earlier is not None and earlier() is not None:
            raise BusyError(
                f"this process has a pool over region {region.name}",
                reason="PoolExists",
                remedy="use that one, from any thread: two would hand out the same slots",
            )
        pool = SlotPool(
            chosen,
            hash_bytes=hash_bytes,
            partial=partial,
            keep_evicted=keep_evicted,
            spare=spare,
        )
        _pools[attachment] = weakref.ref(pool)
    return pool
