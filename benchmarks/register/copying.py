"""Copies between host and GPU: rates of each kind of host memory, and copies that never end."""

from __future__ import annotations

import mmap
import statistics
import threading
from collections.abc import Callable
from typing import Any

from benchmarks.register.cuda import NO_FLAGS, Cuda, elapsed
from benchmarks.register.mappings import Mapping
from hostprep.backing import GIB
from hostprep.linux.memory import address_of

_QUEUED = 32


def copy_rates(
    cuda: Cuda, name: str, address: int | None, size_bytes: int, rounds: int
) -> dict[str, object]:
    """Return GiB/s to the GPU and back: medians, after one round that does not count.

    Without an address memory is made for it: `driver` (by cudaHostAlloc), or `plain` (not
    registered).
    """
    on_gpu = cuda.call("cuMemAlloc", size_bytes)
    try:
        if address is not None:
            return _rates(cuda, on_gpu, address, size_bytes, rounds)
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


def keep_copying(cuda: Cuda, mapping: Mapping, part_bytes: int) -> None:
    """Write all of a mapping from the GPU for good, 32 copies queued at a time; returns at once.

    The bytes of one copy differ from those of the next to the same place.
    """
    buffers = []
    for value in (1, 2):
        source = mmap.mmap(-1, part_bytes)
        source.write(bytes([value]) * part_bytes)
        buffers.append(cuda.call("cuMemAlloc", part_bytes))
        stream = cuda.stream()
        cuda.call("cuMemcpyHtoDAsync", buffers[-1], address_of(source), part_bytes, stream)
        cuda.call("cuStreamSynchronize", stream)

    def copy() -> None:
        cuda.call("cuCtxSetCurrent", cuda.context)
        turn = 0
        while True:
            for _ in range(_QUEUED):
                for offset in range(0, mapping.size_bytes - part_bytes + 1, part_bytes):
                    to = mapping.address + offset
                    cuda.call("cuMemcpyDtoHAsync", to, buffers[turn % 2], part_bytes, stream)
                turn += 1
            cuda.call("cuStreamSynchronize", stream)

    threading.Thread(target=copy, daemon=True).start()
