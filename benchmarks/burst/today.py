"""What vLLM does today, on its CPU platform: imported by vLLM, as `spec_module_path`.

The region is vLLM's own: SharedOffloadRegion makes a fresh file in /dev/shm and populates it by
its own code, in the worker's constructor. vLLM's worker then registers it there
(vllm/v1/kv_offload/cpu/gpu_worker.py, pin_mmap_region: a synchronous call for each 64 GiB), and
refuses on this platform: one call to the driver over all of it stands for that, and plain copies
for CUDA's. Says when each step began and ended in the file that HOSTPREP_BURST_STEPS names.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from hostprep.engines.vllm.offloading_layout import Layout
from hostprep.engines.vllm.offloading_worker import HostprepWorker

_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE (CUDA Driver API, cuMemHostRegister)."""


class TodaySpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's default spec, its worker's copies apart; for one rank."""

    def get_worker(self, kv_caches: Any) -> Any:
        """Allocate, populate and register; nobody is served meanwhile."""
        with _step("populate"):
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
                barrier=lambda: None,  # one rank: it is there
            )
        with _step("register"):
            _register(region.base_tensor.data_ptr(), region.total_size_bytes)
        row_bytes, size_bytes = self.kv_bytes_per_chunk, region.total_size_bytes
        return HostprepWorker(
            kv_caches,
            _Memory(region),  # type: ignore[arg-type]
            _Registered(),  # type: ignore[arg-type]
            layout=Layout(self.num_chunks, row_bytes, size_bytes),
            slice_number=0,
            blocks_per_chunk=self.blocks_per_chunk,
            is_cuda=False,
        )


class _Memory:
    """vLLM's region as our worker wants memory."""

    def __init__(self, region: Any) -> None:
        self.buffer = memoryview(region.mmap_obj)
        self._region = region

    def close(self) -> None:
        """Nothing: it goes with the process, as after a signal."""


class _Registered:
    """Of a worker that begins nothing later on."""

    rows = 1 << 62
    holes: tuple[range, ...] = ()

    def poll(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _register(address: int, size_bytes: int) -> None:
    driver: Any = importlib.import_module("cuda.bindings.driver")
    _checked("cuInit", driver.cuInit(0))
    (context,) = _checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(0))
    _checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    done = driver.cuMemHostRegister(address, size_bytes, _PORTABLE)
    _checked("cuMemHostRegister", done)


def _checked(call: str, result: Any) -> Any:
    if int(result[0]) != 0:
        raise RuntimeError(f"{call}: {result[0]}")
    return result[1:]


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    begin_s = time.monotonic()
    yield
    step = {"name": name, "begin_s": begin_s, "end_s": time.monotonic()}
    with open(os.environ["HOSTPREP_BURST_STEPS"], "a", encoding="ascii") as file:
        file.write(json.dumps(step) + "\n")
