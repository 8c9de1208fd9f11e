"""Slots of a region for a whole batch of requests: first claim what matches, then take the rest."""

from __future__ import annotations

import os
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import add, sub

from hostprep.errors import BadInputError, BusyError, FailedError
from hostprep.layout import RECURRENT, Layout
from hostprep.slots.batch import (
    Draft,
    allocate,
    check_shortage,
    claim_matches,
    claim_or_allocate,
    claim_ready,
    evict,
    take_over,
)
from hostprep.slots.checksums import Checksum, checksum_in, checksums_of
from hostprep.slots.claim import BatchClaim, Claim
from hostprep.slots.directory import Directory, Kept, void_any
from hostprep.slots.group import ABANDONED, READY, SlotGroup
from hostprep.slots.index import Keys
from hostprep.slots.matching import PartialMatches
from hostprep.slots.request import (
    OUTSIDE,
    SHARED,
    Counts,
    GroupUse,
    Request,
    ShortageError,
    check_request,
)
from hostprep.slots.rows import Listed, in_a_row, marks_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.attach import Attachment

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
        directory: Directory | None = None,
        checksum: Checksum | None = None,
    ) -> None:
        """All slots are empty; with a `directory`, until `recover`.

        `checksum`: for a directory with checksums.

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
        self._totals = [0] * len(fields(Counts))
        """In the order of its fields: an object for each call would cost more than the sums."""
        self._open: set[Claim] = set()
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
        self._quarantine: list[tuple[SlotGroup, Sequence[int]]] = []
        self._quarantined_until_s = 0.0
        self._recovered: list[bytes] | None = None

    def recover(self, quarantine_s: float = 60.0) -> int:
        """Fill the pool with the blocks that its directory records. Returns how many.

        To be called once, before the first claim, by who judged `directory.identity` equal to its
        own, or has `reset` the directory. Slots that were being written are not handed out for
        `quarantine_s` seconds: copies of a dead engine may still land there. Raises BadInputError
        for a pool without a directory, or one that is in use.
        """
        with self._lock:
            self._check_process()
            if self._directory is None:
                raise BadInputError("this pool has no directory to recover from")
            if self._recovered is not None or any(self._totals):
                raise BadInputError(
                    "recover: the pool is in use", remedy="call it once, before the first claim"
                )
            self._recovered = []
            found = self._directory.read()
            if self._checksum is not None:
                found = [
                    self._undamaged(self._directory, self._checksum, *each)
                    for each in enumerate(found)
                ]
            for slots, kept in zip(self._groups, found):
                slots.restore(kept)
                self._recovered += kept.slots
                if kept.writing:
                    self._quarantine.append((slots, kept.writing))
            self._quarantined_until_s = time.monotonic() + quarantine_s
            return len(self._recovered)

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
        """Return the hashes of the blocks that `recover` found, group by group."""
        with self._lock:
            return list(self._recovered or ())

    def _end_quarantine(self) -> None:
        if self._quarantine and time.monotonic() >= self._quarantined_until_s:
            for slots, held_back in self._quarantine:
                slots.free.give(held_back)
            self._quarantine.clear()

    def _claim_of(self, draft: Draft) -> Claim:
        return Claim(
            self,
            draft.request,
            [GroupUse(part.slots, bytes(part.kinds), part.evicted) for part in draft.parts],
            evicted=draft.evicted,
            reused_tokens=draft.reused_tokens,
            partial=draft.partial,
        )

    def _enter(self, claim: Claim) -> None:
        """Count a claim; void the records of what it will write, before its slots are known."""
        directory = self._directory
        if directory is not None:
            claim.generation = directory.new_generation() if claim.request.keep else 0
            for index, (use, blocks) in enumerate(zip(claim.uses, claim.unwritten)):
                slots = use.slots
                if len(blocks) < len(slots):
                    slots = [slots[block] for block in blocks]
                slots = in_a_row(slots)
                directory.begin(index, slots, claim.generation)
        self._totals = list(map(add, self._totals, claim.sums()))
        self._open.add(claim)

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
            self._end_quarantine()
            drafts, lacking = self._first_phase(requests, token_budget)
            allocate(
                self._groups,
                drafts,
                lacking,
                partial=self._partial,
                keep_evicted=self._keep_evicted,
            )
            claims = tuple([self._claim_of(draft) for draft in drafts])
            for claim in claims:
                self._enter(claim)
        return BatchClaim(claims, tuple(requests[len(drafts) :]))

    def claim_blocks(
        self, hashes: Sequence[bytes], *, name: str = "", store: bool = True, keep: bool = True
    ) -> Claim:
        """Claim single blocks, wherever they are in their sequences, in the layout's only group.

        Cheaper than `claim_batch` for a few of them. With `store`, those that are there become
        STORED (or SHARED), and the rest get slots to WRITE; without, the blocks up to the first one
        that is not there are REUSED, and the claim has no others. `name` is the request's in
        errors; `keep` as a Request's.

        Raises ShortageError with nothing changed; BadInputError for hashes of another kind, or a
        layout of several groups, of windows or of states.
        """
        group = self._groups[0]
        if len(self._groups) > 1 or not group.has_all or self._partial is not None:
            raise BadInputError("claim_blocks: for one group without a window only")
        for length in set(map(len, hashes)) - {self.hash_bytes}:
            raise BadInputError(f"a hash of {length} bytes: this pool's have {self.hash_bytes}")
        request = Request(name, len(hashes), hashes, store=store, keep=keep)
        keys = Keys(hashes, self.hash_bytes)
        with self._lock:
            self._check_process()
            self._end_quarantine()
            if store:
                use, evicted = claim_or_allocate(group, keys, keep_evicted=self._keep_evicted)
                claim = Claim(self, request, [use], evicted=evicted)
            else:
                use = claim_ready(group, keys)
                request.tokens = count = len(use.slots)
                claim = Claim(self, request, [use], evicted=0, reused_tokens=count)
            self._enter(claim)
        return claim

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
        # Read without the lock: nobody else has these slots.
        checksums = self._checksums_of(claim, blocks)
        left = True
        while left:
            with self._lock:
                self._check_open(claim)
                left = self._commit_some(claim, blocks, checksums)

    def _checksums_of(self, claim: Claim, blocks: int | None) -> list[dict[int, int]]:
        """Return by group the checksums of what is to be committed, by block."""
        if self._checksum is None or not claim.generation:
            return [{} for _ in self._groups]
        with self._lock:
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
                keys = [claim.request.hashes[i] for i in done]
                known = [checksums[index][i] for i in done] if self._checksum is not None else ()
                self._directory.finish(index, places, keys, claim.generation, known)
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
            before = claim.sums()
            for index, slots in enumerate(self._groups):
                known = set(claim.unwritten[index])
                claim.uses[index] = take_over(slots, claim.uses[index], claim.unwritten[index])
                if self._directory is not None:
                    blocks = [block for block in claim.unwritten[index] if block not in known]
                    taken = [claim.uses[index].slots[block] for block in blocks]
                    self._directory.begin(index, taken, claim.generation)
            after = claim.sums()
            self._totals = list(map(add, self._totals, map(sub, after, before)))
            return sum(use.kinds.count(SHARED) for use in claim.uses)

    def release(self, claim: Claim) -> None:
        """End a claim: its contents stay until they are evicted, the last blocks first.

        What was not committed is forgotten, or left to those who share it (`take_over`).
        Raises BadInputError for a claim that was released before.
        """
        with self._lock:
            self._check_open(claim)
            self._open.discard(claim)
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
        wanted = [one for one in dict.fromkeys(hashes) if len(one) == width]
        with self._lock:
            self._check_process()
            found = slots.index.find(Keys(wanted, width))
            slots.touch(found)
            if self._directory is not None:
                self._touch(self._directory, group, [slot for slot in found if slot >= 0])

    def _touch(self, directory: Directory, index: int, slots: Sequence[int]) -> None:
        marks = marks_of(self._groups[index].order.again, slots)
        for again in set(marks):
            some = [slot for slot, mark in zip(slots, marks) if mark == again]
            directory.touch(index, in_a_row(some), again=bool(again))

    def holds(self, block_hash: bytes, group: int = 0) -> bool:
        """Whether a block is there and written. It may be gone at the next call: claim it."""
        if len(block_hash) != self.hash_bytes:
            raise BadInputError(f"a hash of {len(block_hash)} bytes: not {self.hash_bytes}")
        slots = self._groups[group]
        with self._lock:
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
                with self._lock:
                    count = min(left, _FORGOTTEN_AT_ONCE, slots.order.count)
                    evict(slots, count, self._partial)
                forgotten += count
                left = left - count if count else 0
        return forgotten

    def totals(self) -> Counts:
        """Return what was done for all requests so far: the sum of their claims' counts."""
        with self._lock:
            return Counts(*self._totals)

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
    keep: Mapping[str, str] | None = None,
    checksum: bool = False,
) -> SlotPool:
    """Return a pool over a region's slots, all empty; see SlotPool for what is named alike.

    With `keep`, the identity of what will be stored (model, weights, types: all that the bytes
    depend on beside the hashes), blocks are recorded in the region's last bytes, and those that an
    earlier process recorded under an equal identity are there from the start. The bytes outlive the
    process where the region was claimed with an `Owner`. The pool then keeps the mapping open.
    With `checksum` too, `commit` reads the bytes that were written and records their CRC-32, and
    those of an earlier process are read again, all of them, before this returns: what differs is
    not there (`SlotPool.damaged_blocks`). It is for bytes of this region alone. Without `keep`,
    records that an earlier process left there are void.

    `layout` stands in for the handoff's, where the pool was not sized for a model. The process
    that leads the region's lease keeps the one index; those that joined it (other ranks) receive
    slot numbers from it, and have the same layout. The pool holds nothing of the attachment: keep
    that open while slots are used.

    Raises BadInputError: the attachment joined another's lease or only reads, the handoff has no
    layout, or one that does not fit; `checksum` without `keep`. Raises BusyError where this process
    has a pool over it.
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
    if checksum and keep is None:
        raise BadInputError(
            "checksum without keep: there is no record to hold it", remedy="give keep, or neither"
        )
    directory = None if keep is None else _directory(attachment, chosen, hash_bytes, checksum)
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
            directory=directory,
            checksum=checksum_in(attachment.buffer, chosen) if checksum else None,
        )
        if directory is None:
            void_any(attachment.buffer)
        elif keep is not None:
            if directory.identity != keep:
                directory.reset(keep)
            pool.recover()
        _pools[attachment] = weakref.ref(pool)
    return pool


def _directory(
    attachment: Attachment, layout: Layout, hash_bytes: int, checksum: bool
) -> Directory:
    """Return the directory in a region's last bytes. Raises BadInputError where slots lie there."""
    slots = sum(group.slots for group in layout.groups)
    size_bytes = Directory.size_bytes_for(slots, hash_bytes)
    room_bytes = attachment.region.size_bytes - max(group.end_bytes for group in layout.groups)
    if room_bytes < size_bytes:
        raise BadInputError(
            f"the directory of {slots} slots takes the last {size_bytes} bytes of region "
            f"{attachment.region.name}, and its layout leaves {room_bytes}",
            reason="NoRoomForDirectory",
            remedy="give a layout of fewer slots, or a larger region",
        )
    end = attachment.buffer[-size_bytes:]
    return Directory(end, layout, key_bytes=hash_bytes, checksums=checksum)
