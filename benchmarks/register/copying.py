"""Copies between host and GPU, both ways, from each kind of host memory."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.register.cuda import NO_FLAGS, Cuda, elapsed
from benchmarks.register.mappings import Mapping
from hostprep.backing import GIB
from hostprep.linux.memory import address_of


def copy_rates(
    cuda: Cuda, name: str, mapping: Mapping | None, size_bytes: int, rounds: int
) -> dict[str, object]:
    """Return GiB/s to the GPU and back: medians, after one round that does not count.

    `name` is a mapping's, or `driver` (memory by cudaHostAlloc), or `plain` (not registered).
    """
    on_gpu = cuda.call("cuMemAlloc", size_bytes)
    try:
        if mapping is not None:
            return _rates(
                cuda, on_gpu, mapping.address, min(size_bytes, mapping.size_bytes), rounds
            )
        if name == "driver":
            pointer = cuda.call("cuMemHostAlloc", size_bytes, NO_FLAGS)
            try:
                return _rates(cuda, on_gpu, int(pointer), size_bytes, rounds)
            finally:
                cuda.call("cuMemFreeHost", pointer)
        with mmap.mmap(-1, size_bytes) as plain:
            return _rates(cuda, on_gpu, address_of(plain), size_bytes, rounds)
    finally:
        cuda.call("cuMemFree", on_gpu)


def _rates(
    cuda: Cuda, on_gpu: Any, on_host: int, size_bytes: int, rounds: int
) -> dict[str, object]:
    stream = cuda.stream()
    to_gpu = _timed(
        cuda,
        stream,
        rounds,
        lambda: cuda.call("cuMemcpyHtoDAsync", on_gpu, on_host, size_bytes, stream),
    )
    back = _timed(
        cuda,
        stream,
        rounds,
        lambda: cuda.call("cuMemcpyDtoHAsync", on_host, on_gpu, size_bytes, stream),
    )
    cuda.call("cuStreamDestroy", stream)
    return {
        "to_gpu_gib_s": size_bytes / GIB / statistics.median(to_gpu),
        "back_gib_s": size_bytes / GIB / statistics.median(back),
    }


def _timed(cuda: Cuda, stream: Any, rounds: int, copy: Callable[[], object]) -> list[float]:
    took: list[float] = []
    for _ in range(rounds + 1):
        with elapsed(took):
            copy()
            cuda.call("cuStreamSynchronize", stream)
    return took[1:]
