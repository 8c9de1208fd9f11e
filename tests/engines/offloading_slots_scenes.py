"""Who is overtaken in vLLM's own scheduler, with its own manager and with ours of slots.

A whole engine but for the model: vLLM's Scheduler and its OffloadingConnector's two halves, our
spec, a region, real copies. Wherever the scheduler says that tokens need not be computed, the bytes
in the KV blocks are checked.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.request import RequestStatus

from hostprep.engines.vllm.offloading_slots import SlotsManager
from tests.engines.offloading_world import HANG_S, leased, refusal, spec_of
from tests.engines.simple_engine import BLOCK_TOKENS, LAYERS, ROW_BYTES, SmallEngine, configuration

_OURS: dict[str, Any] = {
    "spec_name": "HostprepOffloadingSpec",
    "spec_module_path": "hostprep.engines.vllm",
}
_CHUNKS = 80
_BLOCKS = 20
_TOKENS = _BLOCKS * BLOCK_TOKENS
SLOTS_SCENES: list[Callable[[], None]] = []


def scene(function: Callable[[], None]) -> Callable[[], None]:
    SLOTS_SCENES.append(function)
    return function


def _prompt(seed: int, blocks: int = _BLOCKS) -> list[int]:
    return [3 + (at * 7 + seed * 131) % 900 for at in range(blocks * BLOCK_TOKENS + 5)]


class Engine(SmallEngine):
    """With our spec; notes what each request was told that it can load."""

    def __init__(self, *, has_slots: bool) -> None:
        config = configuration(
            sys.argv[2],
            connector={"kv_connector": "OffloadingConnector"},
            cpu_bytes_to_use=_CHUNKS * ROW_BYTES * len(LAYERS),
            **_OURS | {"hostprep.slots": has_slots},
        )
        super().__init__(config)
        for rank in self.ranks:
            layers = {name: rank.rows(number) for number, name in enumerate(LAYERS)}
            rank.connector.register_kv_caches(layers)
        connector = self.scheduler.connector
        self.half = connector.connector_scheduler
        self.told: dict[str, list[int | None]] = {}
        ask = connector.get_num_new_matched_tokens

        def noted(request: Any, computed: int) -> Any:
            answer = ask(request, computed)
            self.told.setdefault(request.request_id, []).append(answer[0])
            return answer

        connector.get_num_new_matched_tokens = noted
        self.step()  # the first poll of the rank
        assert self.half.manager.gate.wait(HANG_S)

    @property
    def pool(self) -> Any:
        return self.half.manager.inner.pool

    def serve(self, tokens: list[int], count: int = 4) -> Any:
        request = self.ask(tokens, count)
        self.run_until(lambda: request.is_finished() and self.is_idle())
        return request

    def is_idle(self) -> bool:
        return not (self.half._jobs or self.half._req_status or self.scheduler.has_requests())


@contextlib.contextmanager
def _engine(*, has_slots: bool) -> Iterator[Engine]:
    with leased():
        engine = Engine(has_slots=has_slots)
        try:
            yield engine
        finally:
            engine.close()


def _overtake(engine: Engine) -> Any:
    """Have a request wait for GPU memory that it could load all of; return it, done.

    Its chunks are the oldest, and those who have the GPU's memory store more than is free.
    """
    for seed in (1, 2):
        engine.serve(_prompt(seed))
    engine.forget_gpu()
    running = [engine.ask(_prompt(seed, 28), 6) for seed in (3, 4)]
    waiting = engine.ask(_prompt(1))
    engine.run_until(waiting.is_finished)
    assert all(one.is_finished() for one in running)
    engine.run_until(engine.is_idle)
    return waiting


@scene
def a_waiting_request_is_overtaken_with_vllms_own_manager() -> None:
    with _engine(has_slots=False) as engine:
        told = engine.told[_overtake(engine).request_id]
        assert len(told) > 3, told
        assert told[0] == _TOKENS, told
        assert (told[-1] or 0) < _TOKENS, told


@scene
def with_slots_it_loads_what_it_was_told() -> None:
    with _engine(has_slots=True) as engine:
        told = engine.told[_overtake(engine).request_id]
        assert len(told) > 3, told
        assert set(told) == {_TOKENS}, told
        (usage,) = engine.pool.usage()
        assert (engine.pool.open_claims(), usage.claimed) == (0, 0)
        assert usage.free == 0  # none is kept free


@scene
def one_that_waits_and_is_aborted_or_forgotten_leaves_nothing_claimed() -> None:
    with _engine(has_slots=True) as engine:
        engine.serve(_prompt(1))
        engine.forget_gpu()
        for end in ("abort", "reset"):
            running = [engine.ask(_prompt(seed, 28), 40) for seed in (3, 4)]
            waiting = engine.ask(_prompt(1))
            engine.run_until(lambda one=waiting: engine.told.get(one.request_id) == [_TOKENS])
            assert engine.pool.open_claims() > 0
            if end == "reset":
                engine.scheduler.connector.reset_cache()
                assert engine.pool.open_claims() == 0
            ids = [one.request_id for one in (*running, waiting)]
            engine.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            engine.run_until(engine.is_idle)
            assert engine.pool.open_claims() == 0
            engine.forget_gpu()


@scene
def what_slots_cannot_have_beside_them_is_refused() -> None:
    refusal(
        lambda: spec_of(**{"hostprep.slots": True, "eviction_policy": "mine"}),
        "hostprep.slots does not go with eviction_policy 'mine'",
    )


def _keys(*names: int) -> list[Any]:
    return [make_offload_key(bytes([name]) * 32, 0) for name in names]


@scene
def a_chunk_is_stored_when_it_was_offered_often_enough_however_many_are_offered() -> None:
    manager = SlotsManager(8, store_threshold=2, max_tracker_size=3)
    context = ReqContext("r")

    def stored(*names: int) -> list[Any]:
        taken: list[Any] = manager.prepare_store(_keys(*names), context).keys_to_store
        manager.complete_store(set(taken), context)
        return taken

    assert stored(1, 2) == []
    # 1 and 2 are offered again: neither is forgotten for the many that come with them.
    assert stored(3, 4, 5, 6, 1, 2) == _keys(1, 2)
    assert (list(manager.counts), manager.stores_skipped_in_current_batch) == (_keys(1, 2, 3), 6)


@scene
def what_another_manager_left_in_a_requests_context_is_not_believed() -> None:
    context = ReqContext("r")
    for _ in range(2):
        manager = SlotsManager(4)
        assert manager.lookup(_keys(1)[0], context) is LookupResult.MISS
        stored = manager.prepare_store(_keys(1, 2), context).keys_to_store
        assert stored == _keys(1, 2)
        manager.complete_store(set(stored), context)
        assert manager.lookup(_keys(1)[0], context) is LookupResult.HIT
        assert manager.prepare_load(_keys(1), context).block_ids.tolist() == [0]
