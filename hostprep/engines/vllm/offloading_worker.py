"""A rank's half: copies between GPU and host, over this rank's slice of the region.

vLLM's own copies on CUDA; plain ones where both are host memory, which is its CPU platform.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from hostprep.engines.vllm.offloading_compat import LOG
from hostprep.errors import FailedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from hostprep.client.attach import Attachment
    from hostprep.engines.vllm.offloading_layout import Layout
    from hostprep.engines.vllm.offloading_region import RankRegistration


def host_views(memory: Attachment, layout: Layout, slice_number: int, widths: list[int]) -> Any:
    """Return one tensor for each of the KV cache's, of `widths` bytes a chunk, in our memory.

    Each has a row for each chunk, and rows as far apart as the layout says. Raises FailedError
    where a chunk is larger than vLLM said when the layout was made.
    """
    if sum(widths) > layout.row_bytes:
        raise _unequal_ranks(
            f"a chunk of this rank takes {sum(widths)} bytes, and rows were made for "
            f"{layout.row_bytes}"
        )
    whole = torch.frombuffer(memory.buffer, dtype=torch.int8)
    views, offset = [], layout.offset_of(slice_number)
    for width in widths:
        shape, strides = (layout.rows, width), (layout.row_bytes, 1)
        views.append(torch.as_strided(whole, shape, strides, storage_offset=offset))
        offset += width
    return views


class HostprepWorker(OffloadingWorker):  # type: ignore[misc]
    """Three directions of copies, as in vLLM's own worker; the memory and its pinning are ours."""

    def __init__(
        self,
        kv_caches: Any,
        memory: Attachment,
        registration: RankRegistration,
        *,
        layout: Layout,
        slice_number: int,
        blocks_per_chunk: int,
        is_cuda: bool,
        may_use_kernels: bool = True,
    ) -> None:
        """`may_use_kernels`: the memory is registered by the time that there are jobs.

        GPU kernels that read host memory themselves need that; else all copies are DMA.
        """
        self._memory = memory
        self._registration = registration
        self._rows = layout.rows
        widths = [cache.page_size_bytes * blocks_per_chunk for cache in kv_caches.tensors]
        views = host_views(memory, layout, slice_number, widths)
        caches = [
            cache.tensor.view(torch.int8).view((-1, cache.page_size_bytes))
            for cache in kv_caches.tensors
        ]
        make: Any = MemcpyHandler
        if is_cuda:
            from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

            # Decided here, before it is pinned; no job comes before the gate is open.
            make = functools.partial(
                SingleDirectionOffloadingHandler, host_memory_is_pinned=may_use_kernels
            )
        self._handlers = [
            make(
                # Lists of its own for each: vLLM's handlers empty theirs when they shut down.
                gpu_tensors=list(caches),
                cpu_tensors=list(views),
                blocks_per_chunk=blocks_per_chunk,
                layer_refs_per_group=kv_caches.group_data_refs,
                gpu_to_cpu=is_store,
            )
            for is_store in (True, False, False)
        ]
        # Expedited loads have a queue of their own: a step waits for these.
        self._stores, self._loads, self._expedited = self._handlers

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy from the GPU."""
        self._check(dst_spec)
        return bool(self._stores.transfer_async(job_id, src_spec, dst_spec))

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Begin to copy to the GPU; vLLM 0.33 waits for an expedited one within the step."""
        self._check(src_spec)
        handler = self._expedited if expedited else self._loads
        return bool(handler.transfer_async(job_id, src_spec, dst_spec))

    def get_finished(self) -> list[Any]:
        """Return what was copied since. The first call begins the registration.

        vLLM polls at each step, and the first step is after warm-up: a registration would break a
        CUDA graph that is being captured.
        """
        self._registration.poll()
        return [result for handler in self._handlers for result in handler.get_finished()]

    def wait(self, job_ids: set[int]) -> None:
        """Return once these are copied."""
        for handler in self._handlers:
            handler.wait(job_ids)

    def shutdown(self) -> None:
        """Finish the copies, take the registration back, close the memory."""
        for handler in self._handlers:
            try:
                handler.shutdown()
            except Exception:
                LOG.exception("copies of the host tier could not be finished")
        try:
            self._registration.close()
        except Exception:
            LOG.exception("the registration could not be taken back")
        self._memory.close()

    def _check(self, chunks: Any) -> None:
        """Refuse chunks that are not this rank's, or not registered.

        Those would be another rank's memory; a copy to these would break the CUDA context.
        """
        ids = chunks.block_ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._rows:
            raise _unequal_ranks(
                f"the scheduler names chunk {int(ids.max())}, and this rank's slice holds "
                f"{self._rows}"
            )
        registered, holes = self._registration.rows, self._registration.holes
        if len(ids) and (
            int(ids.max()) >= registered
            or any(((ids >= hole.start) & (ids < hole.stop)).any() for hole in holes)
        ):
            raise FailedError(
                f"the scheduler names chunks up to {int(ids.max())}, and {registered} are "
                f"registered{', but for some' if holes else ''}",
                reason="NotRegistered",
                remedy="report it as a defect of hostprep, and set hostprep.grows to false",
            )


def _unequal_ranks(what: str) -> FailedError:
    return FailedError(
        f"{what}: its ranks hold unequal parts of the model",
        reason="UnequalRanks",
        remedy="use `hostprep exec --engine vllm`, or no pipeline parallelism",
    )


class MemcpyHandler:
    """One direction of copies where both sides are host memory.

    One thread copies in order, while the model computes. Stands in for
    vllm/v1/kv_offload/cpu/gpu_worker.py's SingleDirectionOffloadingHandler, which copies by CUDA
    streams, and takes the same jobs: see there for what a job's numbers mean.
    """

    def __init__(
        self,
        gpu_tensors: Sequence[Any],
        cpu_tensors: Sequence[Any],
        *,
        blocks_per_chunk: int,
        layer_refs_per_group: Sequence[Sequence[Any]],
        gpu_to_cpu: bool,
    ) -> None:
        self._blocks = [tensor.numpy() for tensor in gpu_tensors]
        self._chunks = [tensor.numpy() for tensor in cpu_tensors]
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = layer_refs_per_group
        self._is_store = gpu_to_cpu
        self._jobs: dict[int, Future[Any]] = {}
        # numpy copies plain bytes without holding Python's lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hostprep-copies")

    def transfer_async(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy a job's blocks."""
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, src_spec, dst_spec)
        return True

    def get_finished(self) -> list[Any]:
        """Return the results of the jobs that were done since; raises what broke a copy."""
        done = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        """Return once those of the jobs are done that are of this direction."""
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].result()

    def shutdown(self) -> None:
        """Finish all copies, and drop the tensors."""
        self._thread.shutdown(wait=True)
        self._jobs.clear()
        self._blocks.clear()
        self._chunks.clear()

    def _copy(self, job_id: int, src_spec: Any, dst_spec: Any) -> Any:
        began_s = time.monotonic()
        gpu, cpu = (src_spec, dst_spec) if self._is_store else (dst_spec, src_spec)
        size_bytes = block_at = chunk_at = 0
        for refs, count, first in zip(self._groups, gpu.group_sizes, gpu.block_indices):
            if not count:
                continue
            skipped = first % self._blocks_per_chunk
            blocks = gpu.block_ids[block_at : block_at + count]
            chunks = cpu.block_ids[chunk_at:]
            steps = [divmod(at, self._blocks_per_chunk) for at in range(skipped, skipped + count)]
            places = [(chunks[index], at) for index, at in steps]
            size_bytes += self._copy_group(refs, blocks, places)
            block_at, chunk_at = block_at + count, chunk_at + steps[-1][0] + 1
        return TransferResult(
            job_id=job_id,
            success=True,
            transfer_size=size_bytes,
            transfer_time=time.monotonic() - began_s,
        )

    def _copy_group(
        self, refs: Sequence[Any], blocks: Sequence[int], places: Sequence[tuple[int, int]]
    ) -> int:
        for ref in refs:
            page = ref.page_size_bytes
            step = self._chunks[ref.tensor_idx].shape[1] // self._blocks_per_chunk
            for block, (chunk, at) in zip(blocks, places):
                inside = self._blocks[ref.tensor_idx][block, :page]
                outside = self._chunks[ref.tensor_idx][chunk, at * step : at * step + page]
                if self._is_store:
                    np.copyto(outside, inside)
                else:
                    np.copyto(inside, outside)
        return len(blocks) * sum(int(ref.page_size_bytes) for ref in refs)
