"""The calls of CUDA's driver API that are measured, each refusal an error with its name."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from typing import Any

from hostprep.cuda.driver import long_calls

NO_FLAGS = 0
"""Under unified addressing all registered memory is mapped and portable by itself."""
_USES_HOST_PAGE_TABLES = "CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"
_HOST_NUMA_ID = "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID"
_NOTHING = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry nothing() { ret; }
\0"""


class CudaError(Exception):
    """The driver refused a call, or is not there; in words."""


class Cuda:
    """One process's access to one device, with its primary context current in this thread."""

    def __init__(self, device: int = 0) -> None:
        """Raise CudaError where cuda-python, the driver or the device is missing."""
        self.api: Any = _load()
        self.call("cuInit", 0)
        self._long: Any = long_calls(self.api)
        if device >= self.call("cuDeviceGetCount"):
            raise CudaError(f"there is no CUDA device {device}")
        self.device: Any = self.call("cuDeviceGet", device)
        self.context: Any = None

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver. Returns what it returns; raises CudaError where it refuses."""
        try:
            code, *results = getattr(self.api, name)(*arguments)
        # RuntimeError, AttributeError: the driver lacks that function. KeyError, ValueError: a
        # result code that this cuda-python does not know.
        except (RuntimeError, AttributeError, KeyError, ValueError) as error:
            raise CudaError(f"{name}: {type(error).__name__}: {error}") from error
        if int(code) != 0:
            raise CudaError(f"{name}: {code.name}")
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def open(self) -> None:
        """Make the device's primary context, current in this thread."""
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self.call("cuCtxSetCurrent", self.context)

    def fresh_context(self) -> None:
        """Make the primary context and give it back: what a process that starts pays."""
        self.call("cuDevicePrimaryCtxRetain", self.device)
        self.call("cuDevicePrimaryCtxRelease", self.device)

    def attribute(self, name: str) -> int:
        """Return a device attribute; -1 where this driver does not know it."""
        kind = getattr(self.api.CUdevice_attribute, name, None)
        try:
            return -1 if kind is None else int(self.call("cuDeviceGetAttribute", kind, self.device))
        except CudaError:
            return -1

    def traits(self) -> dict[str, object]:
        """Return what names this device and driver in a report."""
        name = self.call("cuDeviceGetName", 256, self.device)
        return {
            "gpu": bytes(name).split(b"\0")[0].decode(errors="replace"),
            "gpu_bytes": int(self.call("cuDeviceTotalMem", self.device)),
            "gpus": int(self.call("cuDeviceGetCount")),
            "cuda_version": int(self.call("cuDriverGetVersion")),
            "uses_host_page_tables": self.attribute(_USES_HOST_PAGE_TABLES) == 1,
            "host_numa_id": self.attribute(_HOST_NUMA_ID),
            "calls_release_gil": self.releases_gil,
        }

    @property
    def releases_gil(self) -> bool:
        """Whether calls by this cuda-python let other threads of the interpreter run."""
        return self._long is self.api

    def register(self, address: int, size_bytes: int) -> None:
        """One call of cuMemHostRegister, other threads of the interpreter running in any case."""
        self._accept("cuMemHostRegister", address, size_bytes, NO_FLAGS)

    def unregister(self, address: int) -> None:
        """One call of cuMemHostUnregister."""
        self._accept("cuMemHostUnregister", address)

    def _accept(self, name: str, *arguments: int) -> None:
        if self.releases_gil:
            self.call(name, *arguments)
        elif code := int(getattr(self._long, name)(*arguments)[0]):
            raise CudaError(f"{name}: error {code}")

    def kernel(self) -> Any:
        """Return a kernel that does nothing; the driver compiles it."""
        module = self.call("cuModuleLoadData", _NOTHING)
        return self.call("cuModuleGetFunction", module, b"nothing")

    def launch(self, kernel: Any, stream: Any) -> None:
        """Launch one thread of a kernel without parameters."""
        self.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0)

    def stream(self) -> Any:
        """Return a new stream that does not wait for the default one."""
        return self.call("cuStreamCreate", self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread make calls that a capture elsewhere would be invalidated by."""
        modes = self.api.CUstreamCaptureMode
        mode = modes.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self.call("cuThreadExchangeStreamCaptureMode", mode)
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", before)


@contextlib.contextmanager
def elapsed(seconds: list[float]) -> Iterator[None]:
    """Append the seconds that the block took."""
    begin_s = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begin_s)


def _load() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaError(
            "cuda-python is not installed in this Python: pip install cuda-bindings"
        ) from error
