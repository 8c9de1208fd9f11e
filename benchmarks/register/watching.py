"""A neighbour: repeats one small thing that other processes do, and times every call."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable

from benchmarks.register.cuda import Cuda, CudaError

ACTIONS = {
    "driver": "cuMemGetInfo, as torch.cuda.mem_get_info",
    "launch": "an empty kernel launched and waited for",
    "context": "a fresh context made and given back",
    "nvml": "NVML's memory of the GPU, as nvidia-smi asks",
}
_PAUSE_S = 0.001
_LONGEST_S = 120.0


class Watcher(threading.Thread):
    """Repeats an action until the process ends."""

    def __init__(self, action: str, device: int) -> None:
        super().__init__(daemon=True)
        self._action = action
        self._device = device
        self._calls: list[tuple[float, float]] = []
        self._error = ""

    def run(self) -> None:
        """Time the action for good; what goes wrong is told by `between`."""
        try:
            act = _PREPARE[self._action](self._device)
            while True:
                begin_s = time.monotonic()
                act()
                self._calls.append((begin_s, time.monotonic()))
                time.sleep(_PAUSE_S)
        # AttributeError: a library that lacks the call.
        except (CudaError, OSError, AttributeError) as error:
            self._error = str(error)

    def between(self, from_s: float, to_s: float) -> dict[str, object]:
        """Return the durations of all calls that met the time; waits for the one under way.

        Raises CudaError where the action failed, or hangs.
        """
        limit_s = time.monotonic() + _LONGEST_S
        while not self._calls or self._calls[-1][1] < to_s:
            if self._error or time.monotonic() > limit_s:
                raise CudaError(self._error or f"one call has not returned for {_LONGEST_S:.0f} s")
            time.sleep(0.005)
        met = [end - begin for begin, end in self._calls if begin < to_s and end > from_s]
        if not met:
            raise CudaError("no call met that time")
        return {"worst_s": max(met), "median_s": statistics.median(met), "calls": len(met)}


def _driver(device: int) -> Callable[[], object]:
    cuda = Cuda(device)
    cuda.open()
    return lambda: cuda.call("cuMemGetInfo")


def _launch(device: int) -> Callable[[], object]:
    cuda = Cuda(device)
    cuda.open()
    kernel, stream = cuda.kernel(), cuda.stream()

    def launch() -> None:
        cuda.launch(kernel, stream)
        cuda.call("cuStreamSynchronize", stream)

    return launch


def _context(device: int) -> Callable[[], object]:
    return Cuda(device).fresh_context


def _nvml(device: int) -> Callable[[], object]:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    handle = ctypes.c_void_p()
    _accept(library.nvmlInit_v2(), "nvmlInit")
    asked = library.nvmlDeviceGetHandleByIndex_v2(device, ctypes.byref(handle))
    _accept(asked, "nvmlDeviceGetHandleByIndex")

    def ask() -> None:
        _accept(library.nvmlDeviceGetMemoryInfo(handle, memory), "nvmlDeviceGetMemoryInfo")

    return ask


def _accept(code: int, name: str) -> None:
    if code != 0:
        raise CudaError(f"{name}: error {code}")


_PREPARE = {"driver": _driver, "launch": _launch, "context": _context, "nvml": _nvml}
