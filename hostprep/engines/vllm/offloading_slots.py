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

from collections import Counter, OrderedDict
from itertools import chain, dropwhile, takewhile
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
    RECOVERED_LOAD_BYTES,
    group_of,
    in_order,
    keys_from,
    metric_definitions,
)
from hostprep.errors import FailedError
from hostprep.slots import WRITE, Claim, Group, Layout, ShortageError, SlotPool

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Any

    from hostprep.engines.vllm.keeping import Keeper

_KEY_BYTES = 36
"""vLLM's keys by default: a SHA-256, and the number of a group."""


_HIT, _PENDING, _MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
"""Attributes of an enumeration take as long as the rest of a lookup."""


class _Store:
    """A store that is being copied: its claim, and the chunks that are not reported yet."""

    def __init__(self, claim: Claim, keys: list[Any], req_context: Any) -> None:
        self.claim = claim
        self.req_context = req_context
        self.keys = keys
        self.left = set(keys)
        self.has_failed = False


class SlotsManager(OffloadingManager):  # type: ignore[misc]
    """vLLM's interface over a SlotPool."""

    medium = Medium.CPU

    def __init__(
        self,
        chunks: int,
        *,
        chunk_bytes: int = 1,
        keeper: Keeper | None = None,
        has_events: bool = False,
        config_info: Sequence[Any] = ({},),
        grows: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
    ) -> None:
        """All chunks are empty. Raises BadInputError where there are none.

        `grows`: none is used until `extend` says how many.

        `config_info`: what vLLM's own manager would say of itself. `keeper`: who decides what of
        an earlier engine is recovered, and whose directory records what is stored.
        `store_threshold`: how often a chunk has to be offered until it is stored; the latest
        `max_tracker_size` chunks that were offered are remembered for that.
        """
        self._layout = slots_layout(chunks, chunk_bytes)
        self._keeper = keeper
        self._grows = grows
        self._usable = 0 if grows else chunks
        self._holes: Sequence[range] = ()
        self._config_info = config_info
        self._events: list[Any] | None = [] if has_events else None
        self._sizes: list[int] = []
        self._threshold = store_threshold
        self._most_counts = max_tracker_size
        self.counts: OrderedDict[bytes, int] = OrderedDict()
        """How often each chunk was offered, the latest one last; empty without a threshold."""
        self.stores_skipped_in_current_batch = 0
        self._writing: dict[bytes, _Store] = {}
        self._recovered: set[bytes] = set()
        """Chunks of an earlier engine that are still there."""
        self._open(_KEY_BYTES)

    def _open(self, key_bytes: int) -> None:
        # Nothing is kept free: 1/32 less to hit costs up to one point of a full tier's hit rate,
        # and a store's few chunks gain little from lying in a row.
        directory = self._keeper.directory if self._keeper is not None else None
        if directory is not None and directory.key_bytes != key_bytes:
            directory = None  # of a hash that nothing is kept of
        self.pool = SlotPool(
            self._layout,
            hash_bytes=key_bytes,
            keep_evicted=True,
            spare=0,
            usable=(0,) if self._grows else None,
            directory=directory,
        )
        if self._grows:
            self.extend(self._usable, self._holes)
        self._reads = ReadClaims(self.pool)

    def extend(self, chunks: int, holes: Sequence[range] = ()) -> None:
        """Use the first `chunks` chunks, but for holes: so many are registered by now."""
        self._usable, self._holes = chunks, holes
        self.pool.extend((chunks,), (holes,))

    def recover(self) -> SlotPool:
        """Fill the index with what the directory records, and announce it, before all requests."""
        self.pool.recover()
        recovered = self.pool.recovered_hashes()
        self._recovered = set(recovered)
        self._record_event(recovered, is_removed=False)
        return self.pool

    def on_new_request(self, req_context: Any) -> Any:
        """Let chunks be stored as they come, as vLLM's manager does."""
        del req_context
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> Any:
        """Tell whether a chunk can be loaded; if it can, it stays until this request has it."""
        reads = req_context.get_state(_Reads)
        if reads is not None and key in reads.slots and reads.owner is self._reads:
            return _HIT
        if key in self._writing:
            return _PENDING
        return _HIT if self._reads.has(key, req_context) else _MISS

    def get_load_source(self, key: Any, req_context: Any) -> Any:
        """Return what vLLM counts as the origin of a hit."""
        del key, req_context
        return LOAD_SOURCE

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> Any:
        """Return where chunks are. Raises FailedError where one is not, as vLLM's asserts."""
        if self._recovered and self._keeper is not None:
            self._keeper.note_loads(len(self._recovered.intersection(keys)))
        return CPULoadStoreSpec(self._reads.load(keys, req_context))

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Note chunks as used just now, the first of them last."""
        del req_context
        self.pool.touch(keys)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        """Let a request's chunks be evicted again."""
        del keys  # a request has one load at a time
        self._reads.loaded(req_context)

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> Any:
        """Return where those chunks go that are neither stored nor being stored.

        None where there are not slots for all of them: vLLM offers them again, with later ones.
        """
        keys = list(keys)
        if keys and len(keys[0]) != self.pool.hash_bytes and not self.pool.totals().requests:
            self._open(len(keys[0]))
        self._reads.end_waiting(keys, req_context)
        if self._threshold > 1:
            keys = self._admitted(keys)
        claim = self._claim(keys, req_context.req_id)
        if claim is None:
            return None
        use = claim.uses[0]
        written, evicted = use.blocks(WRITE), list(use.evicted)
        new = [keys[block] for block in written]
        if new:
            self._sizes.append(len(new))
            self._record_event(evicted, is_removed=True)
            if self._recovered:
                self._recovered.difference_update(evicted)
            self._writing.update(dict.fromkeys(new, _Store(claim, new, req_context)))
            self._reads.stores(req_context)
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
        if self._keeper is not None:
            self._keeper.finished(req_context.req_id)

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
        self._recovered.clear()
        if self._keeper is not None:
            self._keeper.renew()

    def get_stats(self) -> Any:
        """Return vLLM's gauges of its CPU tier, and sizes of stores since the last call.

        Shares of the chunks that can be used by now. Chunks that are being read include those that
        waiting requests have claimed.
        """
        stats = OffloadingConnectorStats()
        (usage,) = self.pool.usage()
        chunks = max(1, usage.slots)
        writing = len(self._writing) / chunks
        reading = min(self._reads.chunks / chunks, 1 - writing)
        for name, share in (
            (CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, writing + reading),
            (CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing),
            (CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, reading),
        ):
            stats.set_gauge(name, share)
        if self._keeper is not None and metric_definitions():
            stats.increase_counter(RECOVERED_LOAD_BYTES, self._keeper.take_loaded_bytes())
        for size in self._sizes:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self._sizes.clear()
        if self._threshold > 1:
            skipped, self.stores_skipped_in_current_batch = self.stores_skipped_in_current_batch, 0
            stats.increase_counter(CPUOffloadingMetrics.STORES_SKIPPED, skipped)
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
            self._reads.stored(store.req_context)
        self._writing.clear()

    def _admitted(self, offered: list[Any]) -> list[Any]:
        """Count an offer; return what is stored, being stored, or was offered often enough.

        What was offered longest ago is forgotten for new chunks, never what is offered again now:
        an offer of more chunks than are remembered is stored in the end.
        """
        counts = self.counts
        new = []
        for key in offered:
            if key in counts:
                counts[key] += 1
                counts.move_to_end(key)
            else:
                new.append(key)
        room = self._most_counts - (len(offered) - len(new))
        for key in new[: max(0, room)]:
            if len(counts) >= self._most_counts:
                counts.popitem(last=False)
            counts[key] = 1
        admitted = [
            key
            for key in offered
            if counts.get(key, 0) >= self._threshold or key in self._writing or self.pool.holds(key)
        ]
        self.stores_skipped_in_current_batch += len(offered) - len(admitted)
        return admitted

    def _claim(self, keys: list[Any], request_id: str) -> Claim | None:
        """Claim what is there of these and slots for the rest; None where they are short."""
        self._reads.claim_noted()
        keep = self._keeper is not None and self._keeper.may_keep(request_id)
        while True:
            try:
                return self.pool.claim_blocks(keys, name=request_id, keep=keep)
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
        self._reads.stored(store.req_context)

    def _record_event(self, keys: list[Any], *, is_removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys, Medium.CPU, is_removed))


class _Reads:
    """What one request has claimed; kept in its context, and gone with it."""

    def __init__(self, request_id: str, owner: ReadClaims) -> None:
        self.request_id = request_id
        self.owner = owner
        """A context that another manager has seen begins again."""
        self.claims: list[Claim] = []
        self.slots: dict[bytes, int] = {}
        """Of everything that is claimed."""
        self.notes: dict[bytes, None] = {}
        """Keys that were hits, to be claimed before anything is evicted."""
        self.tried: dict[bytes, int] = {}
        """By group: in which step its chunks were last claimed in order."""
        self.loads = 0
        """Being copied to the GPU."""
        self.stores = 0
        """Being copied from the GPU."""
        self.used: dict[bytes, None] = {}
        """Keys that it loaded or offered. What vLLM neither loads nor stores of it, such as chunks
        that a window has left behind, it did not use: others are to stay for longer than those."""


class ReadClaims:
    """The claims of all requests that wait, or load."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._step = 0
        self._waiting: dict[str, _Reads] = {}
        """By request, in the order of their first hits."""
        self._loading: dict[_Reads, None] = {}
        self._noted: dict[_Reads, None] = {}
        self._ended: dict[_Reads, list[bytes]] = {}
        """What requests used, in the order in which they ended: of the first one that is still
        being stored, and of those after it."""

    @property
    def chunks(self) -> int:
        """How many are claimed; one that several requests read counts for each of them."""
        return sum(len(reads.slots) for reads in (*self._waiting.values(), *self._loading))

    def has(self, key: bytes, req_context: Any) -> bool:
        """Tell whether a chunk is there, to be loaded. If it is, it stays."""
        reads = req_context.get_state(_Reads)
        if reads is not None and reads.owner is self and (key in reads.slots or key in reads.notes):
            return True
        if len(key) != self._pool.hash_bytes or not self._pool.holds(key):
            return False
        reads = self._of(req_context)
        if not reads.loads:
            self._keep(key, reads, req_context)
        return True

    def load(self, keys: Collection[bytes], req_context: Any) -> list[int]:
        """Return the chunks' slots, claimed until `loaded`; the request's other claims end.

        Raises FailedError where a chunk is not there: it was not looked up in this step.
        """
        reads = self._of(req_context)
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
        reads.used.update(dict.fromkeys(keys))
        return [reads.slots[key] for key in keys]

    def loaded(self, req_context: Any) -> None:
        """End a load. One from before `clear` no longer counts."""
        reads = self._of(req_context)
        reads.loads = max(0, reads.loads - 1)
        self._leave(reads)

    def end_waiting(self, offered: Iterable[bytes], req_context: Any) -> None:
        """End what a request claimed that runs without loading it, and offers chunks now."""
        reads = self._of(req_context)
        reads.used.update(dict.fromkeys(offered))
        self._leave(reads)

    def finish(self, req_context: Any) -> None:
        """End what a request claimed; what is being loaded stays until `loaded`.

        Then have its last chunks evicted before its first ones, without which they are of no use:
        they were stored a few at a time, the first ones first.
        """
        reads = self._of(req_context)
        self._leave(reads)
        self._ended[reads] = used = in_order(reads.used, req_context)
        self._pool.touch(used)
        self._forget_ended()

    def stores(self, req_context: Any) -> None:
        """Note a store that has begun."""
        self._of(req_context).stores += 1

    def stored(self, req_context: Any) -> None:
        """Note that a store's chunks were released: they are the newest of all now.

        If the request has ended meanwhile, its end is when they were used last: put them back
        behind its first ones, and those of requests that ended later behind its own.
        """
        reads = self._of(req_context)
        reads.stores -= 1
        if reads in self._ended:
            for _, used in dropwhile(lambda one: one[0] is not reads, self._ended.items()):
                self._pool.touch(used)
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Forget the requests that ended before every one that is still being stored."""
        for reads in list(takewhile(lambda one: not one.stores, self._ended)):
            del self._ended[reads]

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
        for reads in list(self._noted):
            self._claim(reads, list(reads.notes))
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
        self._ended.clear()

    def _of(self, req_context: Any) -> _Reads:
        reads: _Reads | None = req_context.get_state(_Reads)
        if reads is None or reads.owner is not self:
            reads = _Reads(req_context.req_id, self)
            req_context.set_state(reads)
        return reads

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
        if not keys:
            return
        claim = self._pool.claim_blocks(keys, name=reads.request_id, store=False)
        found = claim.uses[0].slots
        if found:
            reads.claims.append(claim)
            reads.slots.update(zip(keys, found))
        else:
            claim.release()

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


def slots_layout(chunks: int, chunk_bytes: int) -> Layout:
    """Return the one group of slots that all of vLLM's groups share: a chunk is a slot."""
    return Layout(1, (Group("chunks", chunks, chunk_bytes),))
