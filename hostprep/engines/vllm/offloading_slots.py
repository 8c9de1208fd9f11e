"""The scheduler's half with Hostprep's slots in place of vLLM's own manager (`hostprep.slots`).

Both answer alike. The difference is what a store may evict: with vLLM's manager the least recently
used chunks, also those for which a waiting request has just got a hit; with this one chunks that
no request waits for, as long as there are any.

All groups of layers share vLLM's chunks, and a key names its group: one group of slots, one slot a
chunk, found by the whole key. Only the scheduler's thread uses it, as vLLM's.

vLLM looks a waiting request up in each step in which it may be scheduled, key by key, and loads
within that step or looks up again (v1/core/sched/scheduler.py). Stores come at the end of a step,
and only they evict. So a claim has to be made before the next store, and not at each hit: chunks
that a request looks up in their order are claimed at once, up to the first that is not there, and
what it looks up otherwise (windows of attention, from their end) is noted and claimed then.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics

from hostprep.engines.vllm.offloading_compat import (
    LOAD_SOURCE,
    group_of,
    keys_by_group,
    keys_from,
)
from hostprep.errors import FailedError
from hostprep.slots import WRITE, Claim, Group, Layout, Request, ShortageError, SlotPool

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Any

_KEY_BYTES = 36
"""vLLM's keys by default: a SHA-256, and the number of a group."""


class _Store:
    """A store that is being copied: its claim, and the chunks that are not reported yet."""

    def __init__(self, claim: Claim, keys: list[Any]) -> None:
        self.claim = claim
        self.keys = keys
        self.left = set(keys)
        self.has_failed = False


class SlotsManager(OffloadingManager):  # type: ignore[misc]
    """vLLM's interface over a SlotPool."""

    def __init__(
        self,
        chunks: int,
        *,
        chunk_bytes: int = 1,
        has_events: bool = False,
        config_info: Sequence[Any] = ({},),
    ) -> None:
        """All chunks are empty. Raises BadInputError where there are none.

        `config_info`: what vLLM's own manager would say of itself.
        """
        self._layout = Layout(1, (Group("chunks", chunks, chunk_bytes),))
        self._chunks = chunks
        self._config_info = config_info
        self._events: list[Any] | None = [] if has_events else None
        self._sizes: list[int] = []
        self._writing: dict[bytes, _Store] = {}
        self._open(_KEY_BYTES)

    def _open(self, key_bytes: int) -> None:
        self.pool = SlotPool(self._layout, hash_bytes=key_bytes, keep_evicted=True)
        self._reads = ReadClaims(self.pool)

    def on_new_request(self, req_context: Any) -> Any:
        """Let chunks be stored as they come, as vLLM's manager does."""
        del req_context
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> Any:
        """Tell whether a chunk can be loaded; if it can, it stays until this request has it."""
        if key in self._writing:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if self._reads.has(key, req_context) else LookupResult.MISS

    def get_load_source(self, key: Any, req_context: Any) -> Any:
        """Return what vLLM counts as the origin of a hit."""
        del key, req_context
        return LOAD_SOURCE

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> Any:
        """Return where chunks are. Raises FailedError where one is not, as vLLM's asserts."""
        return CPULoadStoreSpec(self._reads.load(keys, req_context))

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        """Let a request's chunks be evicted again."""
        del keys  # a request has one load at a time
        self._reads.loaded(req_context)

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> Any:
        """Return where those chunks go that are neither stored nor being stored.

        None where there are not slots for all of them: vLLM offers them again, with later ones.
        """
        self._reads.end_waiting(req_context)
        keys = list(keys)
        if keys and len(keys[0]) != self.pool.hash_bytes and not self.pool.totals().requests:
            self._open(len(keys[0]))
        claim = self._claim(keys, req_context.req_id)
        if claim is None:
            return None
        use = claim.uses[0]
        written, evicted = use.blocks(WRITE), list(use.evicted)
        new = [keys[block] for block in written]
        if new:
            self._sizes.append(len(new))
            self._record_event(evicted, is_removed=True)
            self._writing.update(dict.fromkeys(new, _Store(claim, new)))
        else:
            claim.release()
        return PrepareStoreOutput(
            keys_to_store=new,
            store_spec=CPULoadStoreSpec([use.slots[block] for block in written]),
            evicted_keys=evicted,
        )

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        """Let chunks be loaded. One that was not copied takes its whole store with it.

        Chunks of one store can be loaded once all of it was reported; vLLM reports it at once.
        """
        del req_context
        for key in keys:
            store = self._writing.pop(key, None)
            if store is None:  # from before reset_cache
                continue
            store.left.discard(key)
            store.has_failed = store.has_failed or not success
            if not store.left:
                self._finish(store)

    def on_request_finished(self, req_context: Any) -> None:
        """End what it claimed, unless that is being copied; its chunks are the last used."""
        self._reads.finish(req_context)

    def on_schedule_end(self, context: Any) -> None:
        """Note a step, and the requests that it began with."""
        self._reads.end_step(context.new_req_ids)

    def take_events(self) -> Iterable[Any]:
        """Return what was stored and evicted since the last call, if vLLM wants to know."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> None:
        """Empty all slots, claimed ones as well: vLLM forgets its jobs, and drains its workers."""
        self._end_claims()
        self.pool.forget_unclaimed()

    def get_stats(self) -> Any:
        """Return vLLM's gauges of its CPU tier, and sizes of stores since the last call.

        Chunks that are being read include those that waiting requests have claimed.
        """
        stats = OffloadingConnectorStats()
        writing = len(self._writing) / self._chunks
        reading = min(self._reads.chunks / self._chunks, 1 - writing)
        for name, share in (
            (CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, writing + reading),
            (CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing),
            (CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, reading),
        ):
            stats.set_gauge(name, share)
        for size in self._sizes:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self._sizes.clear()
        return stats

    def config_info(self) -> Sequence[Any]:
        """Return what vLLM 0.33 shows once of the tier's size."""
        return self._config_info

    def shutdown(self) -> None:
        """End all claims."""
        self._end_claims()

    def _end_claims(self) -> None:
        self._reads.clear()
        for store in set(self._writing.values()):
            store.claim.release()
        self._writing.clear()

    def _claim(self, keys: list[Any], request_id: str) -> Claim | None:
        """Claim what is there of these and slots for the rest; None where they are short."""
        self._reads.claim_noted()
        request = _request(request_id, keys, store=True)
        while True:
            try:
                return self.pool.claim_batch([request]).claims[0]
            except ShortageError as short:
                (lack,) = short.missing
            stores = set(self._writing.values())
            stored = chain(keys, *(store.claim.request.hashes for store in stores))
            if not self._reads.give_up(lack.needed - lack.available, stored):
                self._sizes.append(lack.needed)
                return None

    def _finish(self, store: _Store) -> None:
        if not store.has_failed:
            store.claim.commit()
            self._record_event(store.keys, is_removed=False)
        store.claim.release()

    def _record_event(self, keys: list[Any], *, is_removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys, Medium.CPU, is_removed))


class _Reads:
    """What one request has claimed; kept in its context, and gone with it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.claims: list[Claim] = []
        self.slots: dict[bytes, int] = {}
        """Of everything that is claimed."""
        self.notes: dict[bytes, None] = {}
        """Keys that were hits, to be claimed before anything is evicted."""
        self.tried: dict[bytes, int] = {}
        """By group: in which step its chunks were last claimed in order."""
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
        """By request, in the order of their first hits."""
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
        """Return the chunks' slots, claimed until `loaded`; the request's other claims end.

        Raises FailedError where a chunk is not there: it was not looked up in this step.
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
        """End a load. One from before `clear` no longer counts."""
        reads = _reads_of(req_context)
        reads.loads = max(0, reads.loads - 1)
        self._leave(reads)

    def end_waiting(self, req_context: Any) -> None:
        """End what a request claimed that runs without loading it."""
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
            self._pool.claim_batch([_request(reads.request_id, keys) for keys in groups]).release()

    def end_step(self, scheduled: Iterable[str]) -> None:
        """Note a step, and the requests that wait no longer.

        Before the step's stores, or after them as of vLLM 0.33: those have more given up then.
        """
        self._step += 1
        for request_id in scheduled:
            if request_id in self._waiting:
                self._end(self._waiting[request_id])

    def claim_noted(self) -> None:
        """Claim what was noted. To be called before anything is evicted."""
        if not self._noted:
            return
        noted = list(self._noted)
        requests = [_request(reads.request_id, list(reads.notes)) for reads in noted]
        batch = self._pool.claim_batch(requests)
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
        if before is not reads:  # of a request that vLLM restarted under the same name
            self._end(before)
            self._waiting[reads.request_id] = reads
        group = group_of(key)
        if reads.tried.get(group) == self._step:
            reads.notes[key] = None
            self._noted[reads] = None
            return
        reads.tried[group] = self._step
        following = keys_from(key, req_context)
        if reads.slots:
            following = list(takewhile(lambda one: one not in reads.slots, following))
        self._claim(reads, following)

    def _claim(self, reads: _Reads, keys: list[bytes]) -> None:
        """Claim the first of these keys, up to one that is not there."""
        if keys:
            batch = self._pool.claim_batch([_request(reads.request_id, keys)])
            self._take(reads, batch.claims[0])

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
    reads: _Reads | None = req_context.get_state(_Reads)
    if reads is None:
        reads = _Reads(req_context.req_id)
        req_context.set_state(reads)
    return reads


def _request(request_id: str, keys: list[bytes], *, store: bool = False) -> Request:
    """Return the request for all of these chunks, to store or to load; a chunk is one token.

    They may be from anywhere in a sequence: not from its first block on.
    """
    end = 1 + len(keys)
    return Request(
        request_id,
        end,
        keys,
        computed_tokens=1,
        first_block=1,
        reuse_limit_tokens=0 if store else end,
        store=store,
    )
