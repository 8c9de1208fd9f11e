"""Copies of a rank's half of the plugin, without an engine around it; in vLLM's interpreter.

KV caches of random bytes, jobs as the connector makes them. With `is_cuda` vLLM's own copies are
used, its pointers and their arithmetic included; what a CPU has not are streams and the copy
itself, which are stood in for.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
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
from hostprep.errors import HostprepError

BLOCKS, PAGES, WORLD, PER_CHUNK = 24, (4096, 1536), 2, 3


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Event:
    """What was recorded has happened: copies are done when they return."""

    made = 0

    def __init__(self, **_: object) -> None:
        Event.made += 1
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


COPIES: list[tuple[int, int, int]] = []
"""What was copied: addresses from and to, and bytes."""


def copy_batch(src: Any, dst: Any, sizes: Any, **_: object) -> None:
    for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
        COPIES.append((source, target, size))


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


class TorchCalls(TorchFunctionMode):  # type: ignore[misc]
    """What is done with torch while this is active; looking at a tensor's shape is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ != "__get__":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def check_vllms_handler() -> None:
    """Notice a vLLM that makes one copy of blocks side by side, or copies as a handler is made.

    We are safe from the first, since rows never touch. From the second as well, as long as it is
    asked for or in a release that is not listed as tested: one that is must not do it.
    """
    pages = [torch.zeros((BLOCKS, page), dtype=torch.int8).as_subclass(OnGpu) for page in PAGES]
    chunks = [
        torch.zeros((BLOCKS // PER_CHUNK, page * PER_CHUNK), dtype=torch.int8) for page in PAGES
    ]
    refs = [CanonicalKVCacheRef(at, page) for at, page in enumerate(PAGES)]
    vllm: Any = gpu_worker
    vllm.HAS_TRITON, vllm.swap_blocks_batch = True, copy_batch
    vllm.triton = SimpleNamespace(next_power_of_2=lambda size: 1 << (size - 1).bit_length())
    for is_store in (True, False):
        COPIES.clear()
        Event.made = 0
        with TorchCalls() as called:
            handler: Any = gpu_worker.SingleDirectionOffloadingHandler(
                gpu_tensors=list(pages),
                cpu_tensors=list(chunks),
                blocks_per_chunk=PER_CHUNK,
                layer_refs_per_group=[refs],
                gpu_to_cpu=is_store,
                host_memory_is_pinned=True,
            )
        assert (called.names, COPIES, Event.made) == ([], [], 0), "it does something as it is made"
        for job_id, blocks in enumerate((range(BLOCKS), range(BLOCKS - 1, -1, -1))):
            COPIES.clear()
            gpu, cpu = job(list(blocks), 0, list(range(BLOCKS // PER_CHUNK)))
            assert handler.transfer_async(job_id, *((gpu, cpu) if is_store else (cpu, gpu)))
            sizes = [size for _, _, size in COPIES]
            assert sorted(sizes) == sorted(PAGES * BLOCKS), "it makes one copy of several blocks"
        handler.shutdown()
    vllm.HAS_TRITON = False


def largest_copies() -> list[tuple[int, int, int]]:
    """Return what a vLLM would copy that makes one copy of all that is side by side."""
    merged: list[tuple[int, int, int]] = []
    for source, target, size in sorted(COPIES):
        first, second, before = merged[-1] if merged else (0, 0, 0)
        if (first + before, second + before) == (source, target):
            merged[-1] = (first, second, before + size)
        else:
            merged.append((source, target, size))
    return merged


def check_rows_apart(*, row_bytes: int | None = None) -> None:
    """Copy all there is, in order; find no copy of two rows however a vLLM merges them.

    `row_bytes`: of a layout that is wrong.
    """
    memory = engine_memory({})
    chunk_bytes = PAGES[0] * PER_CHUNK
    layout = layout_of(
        memory.size_bytes, page_bytes=memory.page_bytes, chunk_bytes=chunk_bytes, slices=WORLD
    )
    layout = dataclasses.replace(layout, row_bytes=row_bytes or layout.row_bytes)
    tensor = torch.zeros((BLOCKS, PAGES[0]), dtype=torch.int8).as_subclass(OnGpu)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, PAGES[0])], [[CanonicalKVCacheRef(0, PAGES[0])]]
    )
    worker = worker_of(caches, memory, registration_of(memory, layout, 0), layout, is_cuda=True)
    COPIES.clear()
    blocks, chunks = list(range(BLOCKS)), list(range(BLOCKS // PER_CHUNK))
    with shutting_down(worker):
        assert worker.submit_store(1, *job(blocks, 0, chunks))
        finish(worker, 1)
    copies = largest_copies()
    for _, target, size in copies:
        rows = {(at - memory.address) // layout.row_bytes for at in (target, target + size - 1)}
        assert len(rows) == 1, f"one copy of rows {rows}"


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


def worker_of(
    caches: Any,
    memory: Any,
    registration: Any,
    layout: Layout,
    *,
    is_cuda: bool = False,
    number: int = 0,
) -> HostprepWorker:
    return HostprepWorker(
        caches,
        memory,
        registration,
        layout=layout,
        slice_number=number,
        blocks_per_chunk=PER_CHUNK,
        is_cuda=is_cuda,
    )


@contextlib.contextmanager
def shutting_down(worker: HostprepWorker) -> Iterator[None]:
    try:
        yield
    finally:
        worker.shutdown()


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
        worker_of(
            caches,
            memory,
            registration_of(memory, layout, number),
            layout,
            is_cuda=is_cuda,
            number=number,
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


class Marked:
    """A registration that has come up to row `rows`, and has left `holes`."""

    def __init__(self, rows: int, holes: tuple[range, ...] = ()) -> None:
        self.rows = rows
        self.holes = holes

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


def copy_beyond_the_mark() -> None:
    """Ask for every chunk there is, both ways; only those that are registered may be touched."""
    memory = engine_memory({})
    layout = layout_of(
        memory.size_bytes,
        page_bytes=memory.page_bytes,
        chunk_bytes=sum(PAGES) * PER_CHUNK,
        slices=WORLD,
    )
    good = set(range(7)) - {2, 3}
    marked = Marked(7, (range(2, 4),))
    worker = worker_of(caches_of(1, kind=torch.Tensor), memory, marked, layout)
    with shutting_down(worker):
        blocks = list(range(PER_CHUNK))
        for chunk in range(12):
            gpu, cpu = job(blocks, 0, [chunk])
            with contextlib.suppress(HostprepError):
                assert worker.submit_store(chunk, gpu, cpu)
                finish(worker, chunk)
        row = layout.row_bytes
        used = {at for at in range(layout.rows) if any(memory.buffer[at * row : (at + 1) * row])}
        assert used == good, f"rows {sorted(used)} were written"
        for chunk in set(range(12)) - good:
            gpu, cpu = job(blocks, 0, [chunk])
            try:
                worker.submit_load(99, cpu, gpu)
            except HostprepError:
                continue
            raise AssertionError(f"chunk {chunk} was read")
