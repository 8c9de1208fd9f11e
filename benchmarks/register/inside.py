"""What the registering process's own threads notice: one of them repeats an action meanwhile.

One action at a time: they would wait for each other, and not only for the registration.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from typing import Any

from benchmarks.register.cuda import Cuda, CudaError
from benchmarks.register.durations import Window, spread
from benchmarks.register.mappings import Mapping
from benchmarks.register.watching import Action, Watcher
from hostprep.backing import KIB, MIB
from hostprep.linux.memory import address_of

INSIDE = {
    "graph": "a CUDA graph of one empty kernel launched and waited for",
    "copy": "64 KiB copied to the GPU and waited for",
    "meminfo": "cuMemGetInfo",
    "mmap": "1 MiB mapped and unmapped",
    "fault": "a page touched for the first time",
}
"""What an engine's threads do."""
_COPY_BYTES = 64 * KIB
_FAULT_BYTES = 64 * MIB
_libc = ctypes.CDLL(None, use_errno=True)  # calls let go of the interpreter's lock
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def stalls_inside(
    cuda: Cuda, mapping: Mapping, action: str, *, chunk: int | str | None, gap: str, least_s: float
) -> dict[str, object]:
    """Register again and again for so long; return how long the action took meanwhile.

    With `chunk` None nothing is registered: what the action takes by itself.
    """
    watcher = Watcher(lambda: PREPARE[action](cuda))
    watcher.start()
    watcher.wait_for_first()
    windows: list[Window] = []
    longest_s = 0.0
    passed_s = 0.0
    try:
        while passed_s < least_s:
            begin_s = time.monotonic()
            if chunk is None:
                time.sleep(least_s)
            else:
                with cuda.relaxed():
                    calls = mapping.register(cuda, chunk, gap=gap)
                longest_s = max(longest_s, *calls)
            windows.append((begin_s, time.monotonic()))
            passed_s += windows[-1][1] - begin_s
            mapping.unregister(cuda)
        seen = watcher.during(windows)
    finally:
        watcher.stop()
    told: dict[str, object] = {**seen}
    if chunk is not None:
        told["register_s"] = statistics.median(end - begin for begin, end in windows)
        told["longest_call_s"] = longest_s
    return told


def latencies(cuda: Cuda, calls: int) -> dict[str, object]:
    """Return how long a launch and a small copy take: with what is registered at this time."""
    found: dict[str, object] = {}
    for action in ("graph", "copy"):
        act = PREPARE[action](cuda)
        took = []
        for _ in range(calls):
            begin_s = time.perf_counter()
            act()
            took.append(time.perf_counter() - begin_s)
        found[action] = spread(took)
    return found


def _graph(cuda: Cuda) -> Action:
    cuda.call("cuCtxSetCurrent", cuda.context)
    runnable, stream = empty_graph(cuda, 1)

    def launch() -> None:
        cuda.call("cuGraphLaunch", runnable, stream)
        cuda.call("cuStreamSynchronize", stream)

    return launch


def empty_graph(cuda: Cuda, launches: int) -> tuple[Any, Any]:
    """Return a graph of so many empty kernels, and the stream to launch it in."""
    kernel, stream = cuda.kernel(), cuda.stream()
    mode = cuda.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    cuda.call("cuStreamBeginCapture", stream, mode)
    for _ in range(launches):
        cuda.launch(kernel, stream)
    graph = cuda.call("cuStreamEndCapture", stream)
    return cuda.call("cuGraphInstantiate", graph, 0), stream


def _copy(cuda: Cuda) -> Action:
    """From memory of the driver's: the region itself is being registered."""
    cuda.call("cuCtxSetCurrent", cuda.context)
    stream = cuda.stream()
    on_gpu = cuda.call("cuMemAlloc", _COPY_BYTES)
    on_host = cuda.call("cuMemHostAlloc", _COPY_BYTES, 0)

    def copy() -> None:
        cuda.call("cuMemcpyHtoDAsync", on_gpu, int(on_host), _COPY_BYTES, stream)
        cuda.call("cuStreamSynchronize", stream)

    return copy


def _meminfo(cuda: Cuda) -> Action:
    cuda.call("cuCtxSetCurrent", cuda.context)
    return lambda: cuda.call("cuMemGetInfo")


def _mmap(_cuda: Cuda) -> Action:
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def map_and_unmap() -> None:
        address = _libc.mmap(None, MIB, protection, flags, -1, 0)
        if address == _FAILED or _libc.munmap(address, MIB) != 0:
            raise CudaError(f"mmap failed: errno {ctypes.get_errno()}")

    return map_and_unmap


def _fault(_cuda: Cuda) -> Action:
    memory = mmap.mmap(-1, _FAULT_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    address = address_of(memory)
    offset = 0

    def touch() -> None:
        nonlocal offset
        _libc.memset(address + offset, 1, 1)
        offset += mmap.PAGESIZE
        if offset == len(memory):
            memory.madvise(mmap.MADV_DONTNEED)
            offset = 0

    return touch


PREPARE = {"graph": _graph, "copy": _copy, "meminfo": _meminfo, "mmap": _mmap, "fault": _fault}
