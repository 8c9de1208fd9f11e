"""A thread that repeats one small thing and times every call; and what neighbours repeat."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

from benchmarks.register.cuda import Cuda, CudaError
from benchmarks.register.durations import Window, spread, within

ACTIONS = {
    "driver": "cuMemGetInfo, as torch.cuda.mem_get_info",
    "launch": "an empty kernel launched and waited for",
    "context": "a fresh context made and given back",
    "nvml": "NVML's memory of the GPU, as nvidia-smi asks",
}
"""Of neighbours: each in a process of its own."""
_PAUSE_S = 0.001
_LONGEST_S = 60.0

Action = Callable[[], object]


class Watcher(threading.Thread):
    """Repeats an action until `stop`, or until the process ends."""

    def __init__(self, prepare: Callable[[], Action]) -> None:
        super().__init__(daemon=True)
        self._prepare = prepare
        self._calls: list[Window] = []
        self._error = ""
        self._stops = threading.Event()

    def run(self) -> None:
        """Time the action for good; what goes wrong is told by `during`."""
        try:
            act = self._prepare()
            while not self._stops.is_set():
                begin_s = time.monotonic()
                act()
                self._calls.append((begin_s, time.monotonic()))
                time.sleep(_PAUSE_S)
        # AttributeError: a library that lacks the call.
        except (CudaError, OSError, AttributeError) as error:
            self._error = str(error)

    def stop(self) -> None:
        """End after the call that is under way."""
        self._stops.set()
        self.join(_LONGEST_S)

    def wait_for_first(self) -> None:
        """Return once it is under way. Raises CudaError where the action failed, or hangs."""
        self._wait(lambda: bool(self._calls))

    def during(self, windows: Sequence[Window]) -> dict[str, float]:
        """Return the durations of all calls that met these times; waits for the one under way.

        `time_share` is the part of the time that was spent in them: calls that wait are few.
        Raises CudaError where the action failed, or hangs.
        """
        self._wait(lambda: bool(self._calls) and self._calls[-1][1] >= windows[-1][1])
        met = within(self._calls, windows)
        if not met:
            raise CudaError("no call met that time")
        length_s = sum(end_s - begin_s for begin_s, end_s in windows)
        return {**spread(met), "time_share": min(1.0, sum(met) / length_s)}

    def _wait(self, until: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + _LONGEST_S
        while not until():
            if self._error or time.monotonic() > limit_s:
                raise CudaError(self._error or f"one call has not returned for {_LONGEST_S:.0f} s")
            time.sleep(0.005)


def neighbour(action: str, device: int) -> Watcher:
    """Return a watcher of what a neighbour does, with a context of its own."""
    return Watcher(lambda: _PREPARE[action](device))


def _driver(device: int) -> Action:
    cuda = Cuda(device)
    cuda.open()
    return lambda: cuda.call("cuMemGetInfo")


def _launch(device: int) -> Action:
    cuda = Cuda(device)
    cuda.open()
    kernel, stream = cuda.kernel(), cuda.stream()

    def launch() -> None:
        cuda.launch(kernel, stream)
        cuda.call("cuStreamSynchronize", stream)

    return launch


def _context(device: int) -> Action:
    return Cuda(device).fresh_context


def _nvml(device: int) -> Action:
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
