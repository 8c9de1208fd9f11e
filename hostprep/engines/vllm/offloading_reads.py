"""What requests were told is in host memory: claimed, so that it is there when they load it.

vLLM looks a waiting request up in each step in which it may be scheduled, key by key, and loads
within that step or asks again (v1/core/sched/scheduler.py). Stores come at the end of a step, and
only they evict. So a claim has to be made before the next store, and not at each answer: chunks
that a request asks for in their order are claimed at once, up to the first that is not there, and
what it asks for otherwise (windows of attention, from their end) is noted and claimed then.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from hostprep.engines.vllm.offloading_compat import keys_by_group, keys_from
from hostprep.errors import FailedError
from hostprep.slots import Claim, Request

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Any

    from hostprep.slots import SlotPool

__all__ = ["ReadClaims", "request_for"]

_GROUP_BYTES = 4
"""vLLM's keys end with the number of a group of layers (v1/kv_offload/base.py)."""


class _Reads:
    """One request's; kept in its own context, and gone with it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.claims: list[Claim] = []
        self.slots: dict[bytes, int] = {}
        """Of everything that is claimed."""
        self.notes: dict[bytes, None] = {}
        """Told to be there, and to be claimed before anything is evicted."""
        self.tried: set[bytes] = set()
        """Groups whose chunks were claimed in order, in this step."""
        self.step = -1
        self.loads = 0
        """Being copied to the GPU."""
        self.has_run = False
        """Loaded or stored something."""


class ReadClaims:
    """The claims of all requests that wait, or load."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._step = 0
        self._waiting: dict[str, _Reads] = {}
        """By request, the first that was told something first."""
        self._loading: dict[_Reads, None] = {}
        self._noted: dict[_Reads, None] = {}

    @property
    def chunks(self) -> int:
        """How many are claimed; one that several requests read counts for each of them."""
        return sum(len(reads.slots) for reads in (*self._waiting.values(), *self._loading))

    def has(self, key: bytes, req_context: Any) -> bool:
        """Tell whether a chunk is there, to be loaded. If it is, it stays."""
        reads = req_context.get_state(_Reads)
        if reads is not None and (key in reads.slots or key in reads.notes):
            return True
        if len(key) != self._pool.hash_bytes or not self._pool.holds(key):
            return False
        reads = _reads_of(req_context)
        if not reads.loads:
            self._keep(key, reads, req_context)
        return True

    def load(self, keys: Collection[bytes], req_context: Any) -> list[int]:
        """Return the chunks' slots; they stay until `loaded`, and others that it was told of go.

        Raises FailedError where a chunk is not there: nobody looked it up in this step.
        """
        reads = _reads_of(req_context)
        if reads.slots.keys() != set(keys):
            before, reads.claims, reads.slots = reads.claims, [], {}
            self._claim(reads, list(keys))
            _release(before)
        gone = [key for key in keys if key not in reads.slots]
        if gone:
            raise FailedError(
                f"{len(gone)} of {len(keys)} chunks that request {reads.request_id} is to load are "
                "not in host memory",
                reason="ChunksGone",
            )
        self._forget_notes(reads)
        self._waiting.pop(reads.request_id, None)
        self._loading[reads] = None
        reads.loads += 1
        reads.has_run = True
        return [reads.slots[key] for key in keys]

    def loaded(self, req_context: Any) -> None:
        """End a load. One from before `clear` is none any more."""
        reads = _reads_of(req_context)
        reads.loads = max(0, reads.loads - 1)
        if not reads.loads:
            self._end(reads)

    def run(self, req_context: Any) -> None:
        """End what a request claimed that runs, and does not load it."""
        reads = _reads_of(req_context)
        reads.has_run = True
        self._leave(reads)

    def finish(self, req_context: Any) -> None:
        """End what a request claimed; what is being loaded stays until `loaded`.

        Then have its last chunks evicted before its first ones, without which they are of no use:
        they were stored a few at a time, the first ones first.
        """
        reads = _reads_of(req_context)
        self._leave(reads)
        if reads.has_run:
            groups = keys_by_group(req_context)
            self._pool.claim_batch([_request(reads, keys) for keys in groups]).release()

    def end_step(self, scheduled: Iterable[str]) -> None:
        """Take note of a step, and of the requests that wait no longer.

        Before the step's stores, or after them as of vLLM 0.33: those have more given up then.
        """
        self._step += 1
        for request_id in scheduled:
            if request_id in self._waiting:
                self._end(self._waiting[request_id])

    def settle(self) -> None:
        """Claim what was noted. To be called before anything is evicted."""
        if not self._noted:
            return
        noted = list(self._noted)
        batch = self._pool.claim_batch([_request(one, list(one.notes)) for one in noted])
        for reads, claim in zip(noted, batch.claims):
            self._take(reads, claim)
            self._forget_notes(reads)

    def give_up(self, lacking: int, stored: Iterable[bytes]) -> bool:
        """Release what waiting requests claim, the latest one's first, for `lacking` slots more.

        `stored`: the chunks of stores, of that one as well that lacks slots; they stay claimed, as
        those of loads do. Returns whether that was done: nothing is released where all of it would
        not be enough. What is left is claimed again when vLLM looks those requests up again.
        """
        reading = (*self._waiting.values(), *self._loading)
        claims = Counter(chain(stored, *(reads.slots for reads in reading)))
        given_up = []
        for reads in reversed(self._waiting.values()):
            if lacking <= 0:
                break
            given_up.append(reads)
            claims.subtract(reads.slots.keys())
            lacking -= sum(not claims[key] for key in reads.slots)
        if lacking > 0:
            return False
        for reads in given_up:
            self._end(reads)
        return True

    def clear(self) -> None:
        """End all claims, those of loads as well: vLLM forgets its jobs."""
        for reads in (*self._waiting.values(), *self._loading):
            reads.loads = 0
            self._end(reads)

    def _keep(self, key: bytes, reads: _Reads, req_context: Any) -> None:
        before = self._waiting.setdefault(reads.request_id, reads)
        if before is not reads:  # of a request that vLLM began anew under its name
            self._end(before)
            self._waiting[reads.request_id] = reads
        if reads.step != self._step:
            reads.step = self._step
            reads.tried.clear()
        group = key[-_GROUP_BYTES:]
        if group in reads.tried:
            reads.notes[key] = None
            self._noted[reads] = None
            return
        reads.tried.add(group)
        following = keys_from(key, req_context)
        if reads.slots:
            following = list(takewhile(lambda one: one not in reads.slots, following))
        self._claim(reads, following)

    def _claim(self, reads: _Reads, keys: list[bytes]) -> None:
        """Claim the first of these keys, up to one that is not there."""
        if keys:
            self._take(reads, self._pool.claim_batch([_request(reads, keys)]).claims[0])

    def _take(self, reads: _Reads, claim: Claim) -> None:
        if not claim.counts.reused:
            claim.release()
            return
        reads.claims.append(claim)
        found = claim.uses[0].slots[: claim.counts.reused]
        reads.slots.update(zip(claim.request.hashes, found))

    def _leave(self, reads: _Reads) -> None:
        if not reads.loads:
            self._end(reads)

    def _forget_notes(self, reads: _Reads) -> None:
        reads.notes.clear()
        self._noted.pop(reads, None)

    def _end(self, reads: _Reads) -> None:
        _release(reads.claims)
        reads.claims.clear()
        reads.slots.clear()
        self._forget_notes(reads)
        self._loading.pop(reads, None)
        if self._waiting.get(reads.request_id) is reads:
            del self._waiting[reads.request_id]


def _release(claims: Iterable[Claim]) -> None:
    for claim in claims:
        claim.release()


def _reads_of(req_context: Any) -> _Reads:
    reads = req_context.get_state(_Reads)
    if reads is None:
        reads = _Reads(req_context.req_id)
        req_context.set_state(reads)
    found: _Reads = reads
    return found


def _request(reads: _Reads, keys: list[bytes]) -> Request:
    return request_for(reads.request_id, keys, store=False)


def request_for(request_id: str, keys: list[bytes], *, store: bool) -> Request:
    """Ask for all of these chunks, to be stored or to be loaded; a chunk is one token.

    They may be from anywhere in a sequence: not from its first block on.
    """
    end = 1 + len(keys)
    limit = 0 if store else end
    return Request(
        request_id,
        end,
        keys,
        computed_tokens=1,
        first_block=1,
        reuse_limit_tokens=limit,
        store=store,
    )
