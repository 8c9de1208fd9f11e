"""Copies of a rank's half of the plugin, without an engine around it; in vLLM's interpreter.

KV caches of random bytes, jobs as the connector makes them. With `is_cuda` vLLM's own copies are
used, its pointers and their arithmetic included; what a CPU has not are streams and the copy
itself, which are stood in for.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from hostprep.engines.memory import engine_memory
from hostprep.engines.vllm.offloading_layout import Layout, layout_of
from hostprep.engines.vllm.offloading_region import RankRegistration
from hostprep.engines.vllm.offloading_worker import HostprepWorker
from hostprep.engines.vllm.settings import Settings

BLOCKS, PAGES, WORLD, PER_CHUNK = 24, (4096, 1536), 2, 3


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Event:
    """What was recorded has happened: copies are done when they return."""

    def __init__(self, **_: object) -> None:
        self.is_recorded = False

    def record(self, _: object) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return self.is_recorded

    def synchronize(self) -> None:
        assert self.is_recorded

    def elapsed_time(self, _: object) -> float:
        return 1.0


class Stream:
    def wait_stream(self, _: object) -> None:
        pass

    def wait_event(self, _: object) -> None:
        pass


def copy_batch(src: Any, dst: Any, sizes: Any, **_: object) -> None:
    for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


class Platform:
    Stream: Any = Stream

    @staticmethod
    def current_stream() -> Any:
        return Stream()

    @staticmethod
    def stream(_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def is_xpu() -> bool:
        return False

    is_rocm = is_xpu


def stand_in_for_cuda() -> None:
    vllm: Any = gpu_worker
    vllm.current_platform = Platform
    vllm.torch.Event = Event
    vllm.ops.swap_blocks_batch = copy_batch
    vllm.HAS_TRITON = False
    vllm.PIN_MEMORY = False  # of the lists of copies, not of the caches


def caches_of(seed: int, *, kind: type[torch.Tensor]) -> CanonicalKVCaches:
    """Return a cache of two tensors, the second one's pages padded."""
    torch.manual_seed(seed)
    tensors = [
        torch.randint(-128, 128, (BLOCKS, page), dtype=torch.int8).as_subclass(kind)
        for page in PAGES
    ]
    refs = [CanonicalKVCacheRef(0, PAGES[0]), CanonicalKVCacheRef(1, PAGES[1] - 512)]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors], [refs]
    )


def registration_of(memory: Any, layout: Layout, number: int) -> RankRegistration:
    """Return one that registers nothing with CUDA."""
    return RankRegistration(
        memory,
        layout,
        Settings.read({}),
        rank=number,
        world=WORLD,
        slice_number=number,
        registers=False,
    )


def job(blocks: list[int], first: int, chunks: list[int]) -> tuple[Any, Any]:
    """Return a job's two ends: blocks of one request from its block number `first` on."""
    return (
        GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first]),
        CPULoadStoreSpec(chunks),
    )


def finish(worker: HostprepWorker, job_id: int) -> Any:
    worker.wait({job_id})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (job_id, True)
    return result


def copy_both_ways(*, is_cuda: bool) -> None:
    """Play two ranks over the lease that is there; compare every byte, in the region as well."""
    memory = engine_memory({})
    layout = layout_of(
        memory.size_bytes,
        page_bytes=memory.page_bytes,
        chunk_bytes=sum(PAGES) * PER_CHUNK,
        slices=WORLD,
    )
    tensor = OnGpu if is_cuda else torch.Tensor
    ranks = [caches_of(number, kind=tensor) for number in range(WORLD)]
    workers = [
        HostprepWorker(
            caches,
            memory,
            registration_of(memory, layout, number),
            layout=layout,
            slice_number=number,
            blocks_per_chunk=PER_CHUNK,
            is_cuda=is_cuda,
        )
        for number, caches in enumerate(ranks)
    ]
    copied = check_copies(memory, layout, ranks, workers)
    assert copied == WORLD * 8 * (sum(PAGES) - 512), copied
    for chunk in (layout.rows, -1):
        refused = refusal_of(workers[0], chunk)
        assert f"this rank's slice holds {layout.rows}" in refused, refused
    for worker in workers:
        worker.shutdown()


def check_copies(memory: Any, layout: Layout, ranks: list[Any], workers: list[Any]) -> int:
    """Store and load the same blocks on both ranks, at random; compare bytes, also in between."""
    chosen = random.Random(1)
    total = 0
    for number, (caches, worker) in enumerate(zip(ranks, workers, strict=True)):
        before = [cache.tensor.clone() for cache in caches.tensors]
        blocks = chosen.sample(range(BLOCKS), 8)
        first = chosen.randrange(PER_CHUNK)
        count = -(-(first + len(blocks)) // PER_CHUNK)
        chunks = chosen.sample(range(layout.rows), count)
        gpu, cpu = job(blocks, first, chunks)
        assert worker.submit_store(1, gpu, cpu)
        total += finish(worker, 1).transfer_size
        check_bytes(memory, layout, number, before, (blocks, first, chunks))
        for cache in caches.tensors:
            cache.tensor.fill_(0)
        for job_id, options in ((2, {}), (3, {"expedited": True})):
            assert worker.submit_load(job_id, cpu, gpu, **options)
            finish(worker, job_id)
        for ref in caches.group_data_refs[0]:
            inside = caches.tensors[ref.tensor_idx].tensor[blocks, : ref.page_size_bytes]
            expected = before[ref.tensor_idx][blocks, : ref.page_size_bytes]
            assert torch.equal(inside, expected)
    return total


def check_bytes(
    memory: Any, layout: Layout, number: int, before: list[Any], where: tuple[Any, int, Any]
) -> None:
    """Find each block's bytes where the layout says, in this rank's slice."""
    blocks, first, chunks = where
    for index, block in enumerate(blocks):
        chunk, at = divmod(first + index, PER_CHUNK)
        row = layout.offset_of(number) + chunks[chunk] * layout.row_bytes
        for tensor, (page, used) in enumerate(zip(PAGES, (PAGES[0], PAGES[1] - 512), strict=True)):
            begin = row + sum(PAGES[:tensor]) * PER_CHUNK + at * page
            found = bytes(memory.buffer[begin : begin + used])
            assert found == before[tensor][block, :used].numpy().tobytes(), (index, tensor)


def refusal_of(worker: HostprepWorker, chunk: int) -> str:
    gpu, cpu = job([0], 0, [chunk])
    try:
        worker.submit_store(9, gpu, cpu)
    except Exception as error:
        return str(error)
    return "accepted"
