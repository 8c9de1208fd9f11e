"""Scenes of the memory: where it lies, how it is registered, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch
from vllm.v1.simple_kv_offload import cuda_mem_ops

import hostprep
from tests.engines.simple_engine import (
    BLOCKS,
    LAYERS,
    MIB,
    OURS,
    ROW_BYTES,
    Rank,
    cache_of,
    configuration,
)
from tests.engines.simple_scene import (
    ALWAYS,
    MODEL,
    OTHER,
    PROMPT,
    ROOT,
    busy_driver,
    calls,
    engine,
    is_open,
    leased,
    refused,
    scene,
    wait_for,
    worker,
)


@scene
def host_tensors_are_those_of_vllm_in_the_region() -> None:
    with leased() as memory, worker(rank=1, world=2) as one:
        one.register()
        mine = one.worker.cpu_kv_caches
        blocks = one.worker.num_cpu_blocks
        assert blocks == 4 * MIB // (ROW_BYTES * len(LAYERS))
        for name, tensor in mine.items():
            assert tensor.shape == (blocks, ROW_BYTES), name
            assert tensor.dtype == torch.int8
            assert tensor.is_contiguous()
            assert not tensor.any(), "the region is not clean"
        tensors = list(mine.values())
        tensors[0][3] = 5
        at = memory.size_bytes // 2 + 3 * ROW_BYTES
        assert bytes(memory.buffer[at : at + ROW_BYTES]) == b"\5" * ROW_BYTES
        starts = [t.data_ptr() - tensors[0].data_ptr() for t in tensors]
        assert starts == [n * blocks * ROW_BYTES for n in range(len(LAYERS))]


@scene
def sync_raises_what_fails() -> None:
    os.environ["STANDIN_FAIL"] = "register:any:2"
    with leased(), worker(**(ALWAYS | {"hostprep.mode": "sync"})) as one:
        refused(one.register, "CUDA_ERROR_OUT_OF_MEMORY")
        assert one.worker._backend is None


ODD = (ROW_BYTES, 1536, ROW_BYTES, 1536)


@scene
def rows_of_several_sizes_are_registered_apart_and_are_ready_together() -> None:
    with leased(), worker(cache=cache_of(ODD), **ALWAYS) as one:
        before = len(calls("register"))
        one.register()
        one.connector.get_handshake_metadata()
        wait_for(lambda: one.connector.get_finished(set()) and one.connector._tier.report)
        assert one.connector._tier.report == ("Ready", "")
        made = [text[len("register(") :].split(",") for text in calls("register")[before:]]
        ranges = [(int(start, 16), int(size)) for start, size, *_ in made]
        (small_at, small_size), (large_at, large_size) = ranges
        address = one.connector._tier._attachment.address
        assert (small_at, large_at) == (address, address + small_size)
        blocks = one.worker.num_cpu_blocks
        assert large_size >= 2 * blocks * ROW_BYTES > large_size - 4096
        worker_ = one.worker
        worker_._backend.launch_copy(
            list(range(BLOCKS)),
            list(range(blocks - BLOCKS, blocks)),
            True,
            0,
            worker_._store_events,
        )
        wait_for(lambda: worker_._poll_stream_events(is_store=True) == 0)
        half = BLOCKS // 2 * len(LAYERS)
        assert [text.endswith(f"({half},{half})=0") for text in calls("batch")[-2:]] == [True] * 2
        for at, tensor in enumerate(worker_.cpu_kv_caches.values()):
            assert torch.equal(tensor[blocks - BLOCKS :], one.rows(at))


@scene
def vllms_own_copies_are_one_a_block() -> None:
    """Notice a vLLM that makes one copy of neighbours; ours are never given it in one call."""
    with leased(), worker(**(ALWAYS | {"hostprep.mode": "sync"})) as one:
        one.register()
        params = one.worker._backend._store_params
        for blocks in (list(range(8)), list(range(7, -1, -1))):
            cuda_mem_ops.copy_blocks(blocks, blocks, params)
            assert calls("batch")[-1].startswith(f"batch({8 * len(LAYERS)},")


@scene
def a_run_that_fails_takes_the_others_back() -> None:
    os.environ["STANDIN_FAIL"] = f"register:{len(calls('register')) + 2}:2"
    with leased(), worker(cache=cache_of(ODD), **ALWAYS) as one:
        before = len(calls("unregister"))
        one.register()
        one.connector.get_handshake_metadata()
        wait_for(lambda: one.connector.get_finished(set()) and one.connector._tier.report)
        state, why = one.connector._tier.report
        assert state == "Failed"
        assert "CUDA_ERROR_OUT_OF_MEMORY" in why
        assert one.worker._backend is None
        assert len(calls("unregister")) == before + 1


@scene
def shutdown_takes_everything_back() -> None:
    held = len(calls("register")) - len(calls("unregister"))
    with leased() as memory:
        name = memory.region.name
        with engine(world=2, **ALWAYS) as small:
            small.start()
            wait_for(lambda: is_open(small))
            small.serve(PROMPT)
            threads = [rank.worker._backend._thread for rank in small.ranks]
        assert not any(thread.is_alive() for thread in threads)
    done = [text for text in calls("register") if text.endswith("=0")]
    assert len(done) - len(calls("unregister")) <= held
    with hostprep.attach("kv", region=name, root=ROOT):
        pass


@scene
def shutdown_while_it_registers_waits_for_one_chunk() -> None:
    with leased(), contextlib.ExitStack() as stack:
        one = stack.enter_context(worker(**ALWAYS))
        with busy_driver():
            one.register()
            one.connector.get_handshake_metadata()
            wait_for(lambda: one.connector._tier._registrations.first.state == "Registering")
        one.connector.shutdown()
        assert one.connector._tier._registrations.first.state == "Closed"


@scene
def what_cannot_be_is_refused_before_anything_is_done() -> None:
    with leased():
        with worker(cpu_bytes_to_use=17 * MIB) as one:
            refused(one.register, str(17 * MIB), str(16 * MIB))
        for extra, words in (
            ({"kv_offload_backend": "disk", "disk_path": "/nowhere"}, ("disk",)),
            ({"hostprep.sync": True}, ("hostprep.sync", "hostprep.mode")),
            ({"hostprep.mode": "later"}, ("hostprep.mode", "background")),
        ):
            config = configuration(MODEL, connector=OURS, **extra)
            refused(functools.partial(Rank, config, 0, cache_of()), *words)
        with worker() as one, worker() as two:
            one.register()
            refused(two.register, "rank 0")
    for name in [name for name in os.environ if name.startswith("HOSTPREP_")]:
        del os.environ[name]
    with worker() as one:
        refused(one.register, "hostprep exec")


@scene
def a_pool_named_in_the_configuration_is_claimed() -> None:
    for name in [name for name in os.environ if name.startswith("HOSTPREP_")]:
        del os.environ[name]
    named: dict[str, Any] = {"hostprep.pool": "kv", "hostprep.root": ROOT}
    with engine(**named, **ALWAYS) as small:
        small.start()
        small.serve(PROMPT, 40)
        small.run_until(lambda: is_open(small))
        small.serve(OTHER)
        assert small.stores >= 8
    with worker(world=2, **named) as one:
        refused(one.register, "2 processes", "hostprep exec")


@scene
def a_vllm_that_allocates_elsewhere_is_refused() -> None:
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

    method = SimpleCPUOffloadWorker._init_cpu_mode
    del SimpleCPUOffloadWorker._init_cpu_mode
    try:
        config = configuration(MODEL, connector=OURS)
        refused(lambda: Rank(config, 0, cache_of()), "_init_cpu_mode", "vllm-offloading")
    finally:
        SimpleCPUOffloadWorker._init_cpu_mode = method
