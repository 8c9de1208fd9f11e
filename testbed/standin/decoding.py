"""An engine that decodes on the stand-in driver: a thread that takes the locks of each step.

What it shows is which of two ways to register leaves more of the pace. No figure of it is a result:
how long a real driver holds its locks, and for what an engine waits, is not known here.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

_LAUNCHES = 20
_STEP_S = 0.01


class Decoding:
    """Steps of 10 ms of computing, 20 launches and a page fault; every tenth maps memory as well.

    `on_step` is called as each begins. Use it as a context manager.
    """

    def __init__(self, on_step: Callable[[], object]) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._on_step = on_step
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._decode, name="decoding")
        self.steps = 0
        self.longest_s = 0.0

    def __enter__(self) -> Decoding:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def pace(self, until: Callable[[], object]) -> float:
        """Return the steps a second from now until `until()` is true."""
        began_s, before = time.monotonic(), self.steps
        while not until():
            time.sleep(0.005)
        return (self.steps - before) / (time.monotonic() - began_s)

    def _decode(self) -> None:
        while not self._ends.is_set():
            began_s = time.monotonic()
            self._on_step()
            for _ in range(_LAUNCHES):
                self._driver.standin_launch()
                time.sleep(_STEP_S / _LAUNCHES)
            self._driver.standin_fault()
            if self.steps % 10 == 0:
                self._driver.standin_map()
            self.steps += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
