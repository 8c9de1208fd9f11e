"""Copies between vLLM's KV cache and the region where both are host memory: the CPU platform.

It stands in for vllm/v1/kv_offload/cpu/gpu_worker.py's SingleDirectionOffloadingHandler, which
copies by CUDA streams, and takes the same jobs: see there for what a job's numbers mean.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.base import TransferResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = ["MemcpyHandler"]


class MemcpyHandler:
    """One direction. Copies are done by one thread, in order, while the model computes."""

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
        # Its copies run without Python's lock (numpy lets go of it for plain bytes).
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
        """Finish all copies, and let go of the memory."""
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
            chunks = -(-(skipped + count) // self._blocks_per_chunk)
            blocks = gpu.block_ids[block_at : block_at + count]
            places = [
                (
                    cpu.block_ids[chunk_at + at // self._blocks_per_chunk],
                    at % self._blocks_per_chunk,
                )
                for at in range(skipped, skipped + count)
            ]
            size_bytes += self._copy_group(refs, blocks, places)
            block_at, chunk_at = block_at + count, chunk_at + chunks
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
