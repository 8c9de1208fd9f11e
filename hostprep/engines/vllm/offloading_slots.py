"""The scheduler's half with Hostprep's slots in place of vLLM's own manager (`hostprep.slots`).

Both answer alike. The difference is what a store may evict: with vLLM's manager the least recently
used chunks, also those that it has just told a waiting request to be there; with this one chunks
that nobody was told of, as long as there are any.

All groups of layers share vLLM's chunks, and a key names its group: one group of slots, one slot a
chunk, found by the whole key. It is entered by the scheduler's thread alone, as vLLM's is.
"""

from __future__ import annotations

from itertools import chain
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

from hostprep.engines.vllm.offloading_compat import LOAD_SOURCE
from hostprep.engines.vllm.offloading_reads import ReadClaims, request_for
from hostprep.slots import WRITE, Claim, Group, Layout, ShortageError, SlotPool

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Any

__all__ = ["SlotsManager"]

_KEY_BYTES = 36
"""vLLM's keys by default: a SHA-256, and the number of a group."""


class _Store:
    """One store that is being copied: a claim, and which of its chunks were not reported yet."""

    def __init__(self, claim: Claim, keys: Iterable[bytes]) -> None:
        self.claim = claim
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
        """Have chunks stored as they come, as vLLM's manager does."""
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
        """Return where those chunks go that nobody has stored, or is storing.

        None where there are not slots for all of them: vLLM offers them again, with later ones.
        """
        self._reads.run(req_context)
        keys = list(keys)
        if keys and len(keys[0]) != self.pool.hash_bytes and not self.pool.totals().requests:
            self._open(len(keys[0]))
        claim = self._claim(keys, req_context.req_id)
        if claim is None:
            return None
        use = claim.uses[0]
        written = use.blocks(WRITE)
        if not written:
            claim.release()
            return PrepareStoreOutput(
                keys_to_store=[], store_spec=CPULoadStoreSpec([]), evicted_keys=[]
            )
        self._sizes.append(len(written))
        evicted: list[Any] = list(use.evicted)
        self._tell(evicted, is_removed=True)
        new = [keys[block] for block in written]
        self._writing.update(dict.fromkeys(new, _Store(claim, new)))
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
        """Take note of a step, and of the requests that it began with."""
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

        Chunks that are being read include what waiting requests were told of.
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

    def _claim(self, keys: list[Any], request_id: str) -> Claim | None:
        """Claim what is there of these and slots for the rest; None where they are short."""
        self._reads.settle()
        request = request_for(request_id, keys, store=True)
        while True:
            try:
                return self.pool.claim_batch([request]).claims[0]
            except ShortageError as short:
                (lack,) = short.missing
            stored = chain(keys, *(one.claim.request.hashes for one in self._stores()))
            if not self._reads.give_up(lack.needed - lack.available, stored):
                self._sizes.append(lack.needed)
                return None

    def _finish(self, store: _Store) -> None:
        if not store.has_failed:
            store.claim.commit()
            use = store.claim.uses[0]
            self._tell([store.claim.request.hashes[i] for i in use.blocks(WRITE)], is_removed=False)
        store.claim.release()

    def _stores(self) -> set[_Store]:
        return set(self._writing.values())

    def _end_claims(self) -> None:
        self._reads.clear()
        for store in self._stores():
            store.claim.release()
        self._writing.clear()

    def _tell(self, keys: list[Any], *, is_removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys, Medium.CPU, is_removed))
