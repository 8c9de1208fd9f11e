"""Scenes of the gate: who may use the tier, and when."""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from tests.engines.simple_engine import (
    BLOCK_TOKENS,
    LAYERS,
    MIB,
    OURS,
    VLLMS,
    Rank,
    SmallEngine,
    cache_of,
    configuration,
)
from tests.engines.simple_scene import (
    ALWAYS,
    MODEL,
    OTHER,
    PROMPT,
    SAID,
    busy_driver,
    calls,
    engine,
    is_open,
    leased,
    scene,
    wait_for,
    worker,
)


@scene
def scheduler_misses_until_every_rank_has_said_ready() -> None:
    """The seed: (0, False) while not ready; flips after tp_size reports."""
    with leased():
        config = configuration(MODEL, world=2, connector=OURS)
        connector: Any = KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, cache_of()
        )
        from vllm.v1.outputs import KVConnectorOutput

        from hostprep.engines.vllm.simple import RankMetadata

        request: Any = type("Request", (), {"request_id": "a"})()
        for reports in ([], [0], [0]):
            for rank in reports:
                meta = RankMetadata(completed_store_events={}, ranks={rank: ("Ready", "")})
                connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
            assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
            empty = connector.build_connector_meta(None)
            assert (empty.store_event, empty.load_event, empty.is_decided) == (-1, -1, False)
            assert connector.scheduler_manager._reqs_to_store == {}
        meta = RankMetadata(completed_store_events={}, ranks={1: ("Ready", "")})
        connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
        assert connector._gate.is_open
        connector.shutdown()


@scene
def register_kv_caches_returns_while_nothing_can_be_registered() -> None:
    """The seed: it returns in milliseconds; ready flips after the thread."""
    with leased() as memory, worker(**ALWAYS) as one:
        with busy_driver():
            before = len(calls("capture_mode"))
            one.register()
            assert len(calls("capture_mode")) == before, "registration began before warm-up"
            assert one.connector.build_connector_worker_meta() is None
            assert set(one.worker.cpu_kv_caches) == set(LAYERS)
            assert one.connector.get_handshake_metadata() is None
            wait_for(lambda: len(calls("capture_mode")) > before)
            one.connector.get_finished(set())
            assert one.worker._backend is None
            assert one.connector.build_connector_worker_meta() is None
            assert memory.size_bytes == 16 * MIB

        def reports() -> Any:
            one.connector.get_finished(set())
            return one.connector.build_connector_worker_meta()

        wait_for(reports)
        assert reports().ranks == {0: ("Ready", "")}
        assert reports().ranks == {0: ("Ready", "")}, "a lost message is lost for good"
        assert one.worker._backend is not None


@scene
def requests_are_served_in_between_and_hit_afterwards() -> None:
    with leased(), engine(world=2, **ALWAYS) as small:
        with busy_driver():
            small.start()
            first = small.serve(PROMPT)
            small.forget_gpu()
            again = small.serve(PROMPT)
            assert list(first.output_token_ids) == list(again.output_token_ids)
            assert (small.stores, small.loads, is_open(small)) == (0, 0, False)
        small.run_until(lambda: is_open(small))
        before = small.serve(OTHER)
        assert small.stores >= 8
        small.forget_gpu()
        after = small.serve(OTHER)
        assert list(before.output_token_ids) == list(after.output_token_ids)
        assert small.loads == 8, small.loads
        assert calls("batch")[-1].endswith("=0")
        assert all(text.endswith("=0") for text in calls("batch"))
        assert small.metadata[-1].is_decided
        assert small.ranks[0].connector.build_connector_worker_meta() is None


@scene
def gate_opens_without_a_step_by_the_board() -> None:
    """An engine without requests does no steps, and the ranks have nothing to say it with."""
    with leased(), engine(world=2, **ALWAYS) as small:
        small.start()
        wait_for(lambda: is_open(small))
        assert small.metadata == []
        small.serve(PROMPT)
        assert small.stores >= 8


@scene
def ranks_of_another_node_are_heard_by_the_engines_own_channel() -> None:
    with leased():
        config = configuration(MODEL, world=2, connector=OURS, **ALWAYS)
        small = SmallEngine(config, world=0)
        with leased():  # the other node's region, and its board
            small.ranks = [Rank(config, rank, cache_of()) for rank in range(2)]
            small.start()
            assert not is_open(small)
            small.serve(PROMPT, 40)
            small.run_until(lambda: is_open(small))
            small.serve(OTHER)
            assert small.stores >= 8
            small.close()


@scene
def an_early_request_stays_without_the_tier() -> None:
    """Its later blocks must not be taken for its first ones, nor stored without those before."""
    with leased(), engine(**ALWAYS) as small:
        with busy_driver():
            small.start()
            early = small.ask(PROMPT, 3 * BLOCK_TOKENS)
            small.run_until(lambda: early.num_output_tokens > 2)
        small.run_until(lambda: is_open(small))
        assert not early.is_finished()
        small.run_until(early.is_finished)
        assert small.stores == 0
        assert small.scheduler.connector._gate._early == set()
        small.forget_gpu()
        small.serve(PROMPT)
        assert small.stores >= 8


@scene
def a_rank_that_fails_leaves_it_serving_and_is_said_once() -> None:
    os.environ["STANDIN_FAIL"] = f"register:{len(calls('register')) + 2}:2"
    with leased(), engine(world=2, **ALWAYS) as small:
        small.start()
        small.serve(PROMPT, 20)
        gate = small.scheduler.connector._gate
        small.run_until(lambda: gate.is_decided)
        small.serve(PROMPT)
        small.forget_gpu()
        small.serve(PROMPT)
        assert (small.stores, small.loads, gate.is_open) == (0, 0, False)
        assert "CUDA_ERROR_OUT_OF_MEMORY" in gate.why
        wait_for(SAID.warnings)
        told = [text for text in SAID.warnings() if "GPU memory alone" in text]
        assert len(told) == 1, told
        small.step()
        assert small.metadata[-1].is_decided
        assert all(rank.connector.build_connector_worker_meta() is None for rank in small.ranks)


@scene
def sync_does_as_vllm_does() -> None:
    """The seed's regression: the same steps, told alike, and everything ready from the start."""
    told: list[list[dict[str, Any]]] = []
    outputs = []
    for connector, extra in ((VLLMS, {}), (OURS, {"hostprep.mode": "sync", **ALWAYS})):
        with leased(), engine(connector=connector, **extra) as small:
            before = len(calls("register"))
            for rank in small.ranks:
                rank.register()
                assert rank.worker._backend is not None
            assert len(calls("register")) - before == (connector is OURS)
            served = [small.serve(PROMPT), small.serve(OTHER)]
            small.forget_gpu()
            served += [small.serve(PROMPT), small.serve(OTHER)]
            assert small.loads == 16
            outputs.append([list(request.output_token_ids) for request in served])
            told.append([_plain(meta) for meta in small.metadata if _says_something(meta)])
    assert outputs[0] == outputs[1]
    assert told[0] == told[1]


def _plain(meta: Any) -> dict[str, Any]:
    return {key: item for key, item in vars(meta).items() if key != "is_decided"}


def _says_something(meta: Any) -> bool:
    return bool(meta.store_gpu_blocks or meta.load_gpu_blocks)


@scene
def vllms_own_messages_keep_the_ranks_words() -> None:
    from hostprep.engines.vllm.simple import RankMetadata

    mine = RankMetadata(completed_store_events={3: 1}, ranks={1: ("Ready", "")})
    both = mine.aggregate(SimpleCPUOffloadWorkerMetadata(completed_store_events={3: 1, 4: 1}))
    more = both.aggregate(RankMetadata(completed_store_events={}, ranks={0: ("Failed", "why")}))
    assert more.completed_store_events == {3: 2, 4: 1}
    assert more.ranks == {0: ("Failed", "why"), 1: ("Ready", "")}
