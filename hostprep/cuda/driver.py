"""The one place that speaks to CUDA: the driver API, through the engine's own cuda-python."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from hostprep.errors import FailedError, HostprepError, NotReadyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_GONE = frozenset({4, 201, 709, 713})
"""Driver shut down, no context, context destroyed, nothing registered there."""

_PASSING = frozenset({2, 304, 999})
"""Out of memory, a call of the operating system failed, unknown."""

_OF_RANGE = frozenset({1, 712})
"""The range is not to be registered, or is already: another one may be."""

_SEE_LOG = "see the kernel's log for lines of NVRM"
_CONTEXT = (
    "ContextGone",
    "the CUDA context was destroyed, or belongs to a parent process",
    "register in the process and during the life of the context that uses the memory",
)
_BROKEN = (
    "ContextBroken",
    "an earlier failure of the engine's own work broke the CUDA context",
    "restart the engine's process; look for the first error that it reported",
)

_MEANINGS = {
    1: (
        "InvalidRange",
        "the driver does not take this range",
        "register memory that is mapped in this process, with rights that fit",
    ),
    2: (
        "OutOfMemory",
        "the driver has no memory for its tables",
        "free memory of the host and of the GPU: `hostprep doctor --gpu` shows what registering "
        "takes; " + _SEE_LOG,
    ),
    3: _CONTEXT,
    4: _CONTEXT,
    201: _CONTEXT,
    709: _CONTEXT,
    **dict.fromkeys((700, 702, 710, 714, 715, 716, 717, 718, 719), _BROKEN),
    712: (
        "AlreadyRegistered",
        "part of this range is registered already, by another part of this process",
        "register each byte once: let the engine or Hostprep do it, not both",
    ),
    801: (
        "NotSupported",
        "the driver does not register this kind of memory here",
        "`hostprep doctor --gpu` names known limits of this driver",
    ),
    900: (
        "Capturing",
        "another thread captures a CUDA graph",
        "capture in thread-local mode, or register before or after",
    ),
}

_INIT = {
    3: (
        FailedError,
        "ForkedChild",
        "CUDA was initialised before this process was forked",
        "start engine processes with multiprocessing's spawn, or fork before CUDA is used",
    ),
    34: (
        NotReadyError,
        "DriverMissing",
        "libcuda.so.1 is a stub for linking, not a driver",
        "take the toolkit's stubs folder out of LD_LIBRARY_PATH",
    ),
    35: (FailedError, "DriverTooOld", "the CUDA driver is too old", "update the NVIDIA driver"),
    100: (
        NotReadyError,
        "NoDevice",
        "the CUDA driver sees no device",
        "give the container a GPU, and look at CUDA_VISIBLE_DEVICES",
    ),
    802: (
        NotReadyError,
        "DeviceNotReady",
        "the node's GPUs are not ready yet",
        "on machines with NVSwitch the fabric manager must run",
    ),
    803: (
        FailedError,
        "DriverMismatch",
        "libcuda.so.1 and the kernel's NVIDIA driver are of different versions",
        "after an update of the driver restart the node and the container",
    ),
}

_RELEASES_GIL = (12, 9, 1)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", re.ASCII)

_UNKNOWN_CODE = re.compile(r"(\d{1,9})(?: is not a valid CUresult)?", re.ASCII)

_GPU_UUID = re.compile(r"^GPU UUID:\s*GPU-([0-9a-f-]{36})", re.ASCII | re.MULTILINE)

_MODULE = "cuda.bindings.driver"
_LEAST_VERSION = 12000
"""CUDA 12.0 (r525): the oldest driver that cuda-bindings 12 supports."""

# cuda.h: CU_MEMHOSTREGISTER_*.
_PORTABLE = 1
_DEVICE_MAP = 2
_READ_ONLY = 8

_DEVICE_ATTRIBUTES = {
    "host_register_supported": "HOST_REGISTER_SUPPORTED",
    "read_only_supported": "READ_ONLY_HOST_REGISTER_SUPPORTED",
    "uses_host_page_tables": "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    "can_use_host_pointer": "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "can_map_host_memory": "CAN_MAP_HOST_MEMORY",
    "unified_addressing": "UNIFIED_ADDRESSING",
}


class DriverError(FailedError):
    """A call that the driver refused. `code` and `name` are its own."""

    def __init__(self, code: int, name: str, call: str) -> None:
        reason, words, remedy = _MEANINGS.get(code, ("DriverFailed", "", _SEE_LOG))
        message = f"{call} failed with {name} ({code})"
        super().__init__(f"{message}: {words}" if words else message, reason=reason, remedy=remedy)
        self.code = code
        self.name = name

    @property
    def is_passing(self) -> bool:
        """Whether the same call may work later: memory was short, or nobody knows why it failed."""
        return self.code in _PASSING

    @property
    def is_of_range(self) -> bool:
        """Whether it is this range that the driver refuses, for good."""
        return self.code in _OF_RANGE

    @property
    def is_gone(self) -> bool:
        """Whether what was registered is gone: there is nothing to undo."""
        return self.code in _GONE


def init_error(code: int) -> HostprepError:
    """Return the error for a driver that could not be initialised."""
    if code not in _INIT:
        return FailedError(
            f"cuInit failed with CUDA error {code}", reason="DriverFailed", remedy=_SEE_LOG
        )
    kind, reason, words, remedy = _INIT[code]
    return kind(words, reason=reason, remedy=remedy)


class _ByCtypes:
    """cuMemHostRegister and cuMemHostUnregister of the library that is loaded already."""

    def __init__(self) -> None:
        import ctypes

        library = ctypes.CDLL("libcuda.so.1")
        self._register = library.cuMemHostRegister_v2
        self._register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = library.cuMemHostUnregister
        self._unregister.argtypes = (ctypes.c_void_p,)

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> tuple[int]:  # noqa: N802
        return (self._register(address, size_bytes, flags),)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:  # noqa: N802
        return (self._unregister(address),)


def long_calls(api: Any) -> Any:
    """Return what to make these calls by: the driver module, if it lets go of the GIL.

    Raises OSError or AttributeError where the library is not what it says it is.
    """
    package = sys.modules.get(api.__name__.rpartition(".")[0])
    found = _VERSION.match(str(getattr(package, "__version__", "")))
    version = tuple(int(part) for part in found.groups()) if found else (0,)
    return api if version >= _RELEASES_GIL else _ByCtypes()


@dataclass(frozen=True)
class DeviceTraits:
    """What a device says about registered host memory (cuda.h: CUdevice_attribute)."""

    ordinal: int
    uuid: str
    """As nvidia-smi -L writes it: GPU- and 36 characters; of an instance of MIG: MIG- and 36."""
    name: str
    total_bytes: int
    host_register_supported: bool
    read_only_supported: bool
    """Memory that this process may only read can be registered."""
    uses_host_page_tables: bool
    """ATS: the device reaches pageable memory by the host's tables; registering gains nothing."""
    can_use_host_pointer: bool
    """Kernels may use the host's address; elsewhere (WSL2) cuMemHostGetDevicePointer gives theirs,
    and a kernel that takes the host's one faults (SGLang issue 40232)."""
    can_map_host_memory: bool
    unified_addressing: bool

    def registration_flags(self, *, read_only: bool) -> int:
        """Return the flags for cuMemHostRegister. Raises FailedError where there are none.

        With unified addressing all registered memory is mapped and portable by itself (CUDA
        Driver API, Unified Addressing): nothing is asked for then, as engines do.
        """
        if not self.host_register_supported:
            raise FailedError(
                f"{self.name} cannot register host memory",
                reason="RegisterUnsupported",
                remedy="run without the host tier on this device",
            )
        if not self.can_use_host_pointer:
            raise FailedError(
                f"{self.name} reaches registered memory by other addresses than the host's (WSL2)",
                reason="OtherAddresses",
                remedy="run without the host tier here: engines copy from the host's addresses",
            )
        if read_only and not self.read_only_supported:
            raise FailedError(
                f"{self.name} registers writable memory only, and this attachment is read-only",
                reason="ReadOnlyUnsupported",
                remedy="attach without read_only",
            )
        flags = _READ_ONLY if read_only else 0
        if not self.unified_addressing:
            flags |= _PORTABLE | (_DEVICE_MAP if self.can_map_host_memory else 0)
        return flags


def load_driver(name: str | None = None) -> Driver:
    """Load cuda-python's driver module (`name` for another one) and initialise the driver.

    The import takes about 0.1 s, once in a process. Raises NotReadyError where cuda-python, the
    driver or a device is missing, FailedError where the driver is there and cannot be used:
    too old, or initialised by a parent that forked since. All with what to do.
    """
    if _initialised_in and os.getpid() not in _initialised_in:
        raise forked_child_error()
    try:
        api = import_module(name or _MODULE)
    except ImportError as error:
        raise NotReadyError(
            f"cuda-python cannot be imported: {error}",
            reason="CudaPythonMissing",
            remedy="in the engine's environment: pip install 'cuda-bindings>=12.8', of the CUDA "
            "version that nvidia-smi shows or an earlier one",
        ) from error
    try:
        code = _result(api.cuInit, 0)[0]
    except (RuntimeError, OSError) as error:  # cuda-python: libcuda.so.1 cannot be loaded
        raise NotReadyError(
            f"the CUDA driver cannot be loaded: {error}",
            reason="DriverMissing",
            remedy="install the NVIDIA driver on the node, and give the container a GPU: its "
            "runtime mounts libcuda.so.1",
        ) from error
    if code != 0:
        raise init_error(code)
    _initialised_in.add(os.getpid())
    driver = Driver(api)
    version = driver.version()
    if version < _LEAST_VERSION:
        raise FailedError(
            f"the CUDA driver supports CUDA {version // 1000}.{version % 1000 // 10} at most",
            reason="DriverTooOld",
            remedy="update the NVIDIA driver to r525 (CUDA 12.0) or later",
        )
    return driver


class CudaAccess:
    """The driver and the context that use the memory; by default those of the calling thread.

    An error is kept until `use`: what prevents registering must not keep an engine from being
    built.
    """

    def __init__(self, driver: Driver | None, context: int | None) -> None:
        self._driver = driver
        self._context = context
        self._error: HostprepError | None = None
        if context is None:
            try:
                self._driver = driver or load_driver()
                self._context = self._driver.current_context()
            except HostprepError as error:
                self._error = error

    @property
    def context(self) -> int:
        """The context's handle; 0 where there is none."""
        return self._context or 0

    @contextlib.contextmanager
    def use(self) -> Iterator[Driver]:
        """Have the context current in this thread, and captures of other threads left alone.

        Raises HostprepError: what prevented it when this was made, or does now.
        """
        if self._error is not None:
            raise self._error
        driver = self._driver = self._driver or load_driver()
        with driver.using(self.context), driver.relaxed_capture():
            yield driver


class Driver:
    """Calls to an initialised driver. Contexts and devices are its handles, as numbers.

    Every method raises DriverError where the driver refuses.
    """

    def __init__(self, api: Any) -> None:
        """Wrap the module `cuda.bindings.driver`; `load_driver` checks and initialises it."""
        self._api = api
        self._long = long_calls(api)

    def version(self) -> int:
        """Return the newest CUDA that the driver supports: 13000 is 13.0."""
        return int(self._call("cuDriverGetVersion")[0])

    def device_count(self) -> int:
        """Return the number of devices that this process sees."""
        return int(self._call("cuDeviceGetCount")[0])

    def current_context(self) -> int:
        """Return the context current in this thread. Raises NotReadyError where there is none."""
        context = self._current()
        if not context:
            raise NotReadyError(
                "no CUDA context is current in this thread",
                reason="NoContext",
                remedy="call this where the engine's device is in use (after "
                "torch.cuda.set_device and a first allocation), or hand the context over",
            )
        return context

    def set_current(self, context: int) -> None:
        """Make a context current in this thread."""
        self._call("cuCtxSetCurrent", self._api.CUcontext(context))

    @contextlib.contextmanager
    def using(self, context: int) -> Iterator[None]:
        """Have a context current while the block runs, and the one before afterwards."""
        before = self._current()
        self.set_current(context)
        try:
            yield
        finally:
            # The error of the block counts more than a context that was lost meanwhile.
            with contextlib.suppress(DriverError):
                self.set_current(before)

    def device_of(self, context: int) -> int:
        """Return the device of a context."""
        with self.using(context):
            return _number(self._call("cuCtxGetDevice")[0])

    def attributes(self, device: int) -> DeviceTraits:
        """Ask a device what it can do; what an old driver does not know, it cannot."""
        handle = self._call("cuDeviceGet", device)[0]
        answers = {
            field: self._attribute(name, handle) for field, name in _DEVICE_ATTRIBUTES.items()
        }
        name = self._call("cuDeviceGetName", 256, handle)[0]
        return DeviceTraits(
            ordinal=device,
            uuid=_uuid_text(bytes(self._call("cuDeviceGetUuid", handle)[0].bytes)),
            name=name.split(b"\0")[0].decode(errors="replace"),
            total_bytes=int(self._call("cuDeviceTotalMem", handle)[0]),
            **answers,
        )

    def register(self, address: int, size_bytes: int, flags: int) -> None:
        """Page-lock a range of this process and map it for the current context's device."""
        self._call("cuMemHostRegister", address, size_bytes, flags, api=self._long)

    def unregister(self, address: int) -> None:
        """Take back one registration, by the address it began at."""
        self._call("cuMemHostUnregister", address, api=self._long)

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread register while another one captures a CUDA graph.

        Otherwise a call that is not safe during a capture fails and breaks the capture, whichever
        thread it comes from (CUDA Driver API, cuThreadExchangeStreamCaptureMode). Per thread.
        """
        relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._call("cuThreadExchangeStreamCaptureMode", relaxed)[0]
        try:
            yield
        finally:
            with contextlib.suppress(DriverError):  # see `using`
                self._call("cuThreadExchangeStreamCaptureMode", before)

    def _current(self) -> int:
        return _number(self._call("cuCtxGetCurrent")[0])

    def _attribute(self, name: str, handle: Any) -> bool:
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:
            return False
        try:
            return bool(self._call("cuDeviceGetAttribute", attribute, handle)[0])
        except DriverError:
            return False

    def _call(self, name: str, *arguments: Any, api: Any = None) -> tuple[Any, ...]:
        """Call a function of the driver; return what it gives besides success."""
        try:
            code, *values = _result(getattr(api or self._api, name), *arguments)
        except (AttributeError, RuntimeError) as error:  # cuda-python: no such symbol in libcuda
            raise FailedError(
                f"the CUDA driver or cuda-python lacks {name}: {error}",
                reason="DriverTooOld",
                remedy="update the NVIDIA driver, or install a cuda-bindings that suits it",
            ) from error
        if code != 0:
            raise DriverError(code, self._error_name(code), name)
        return tuple(values)

    def _error_name(self, code: int) -> str:
        try:
            result = self._api.cuGetErrorName(self._api.CUresult(code))
        except (ValueError, RuntimeError):  # a code that this cuda-python does not know
            return f"CUDA error {code}"
        return result[1].decode() if int(result[0]) == 0 else f"CUDA error {code}"


def _result(call: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Call a function of the driver module; return what it gives, its code as a number first.

    cuda-bindings makes each code a member of an enumeration, and knows those of its own release
    only: a newer driver's are a KeyError (as of 13.0.3) or a ValueError (12.9.10, 13.5.0).
    """
    try:
        code, *values = call(*arguments)
    except (KeyError, ValueError) as error:
        found = _UNKNOWN_CODE.fullmatch(str(error))
        if found is None:
            raise
        return (int(found[1]),)
    return (int(code), *values)


_initialised_in: set[int] = set()


def forked_child_error() -> HostprepError:
    """Return the error for a process that uses CUDA of the parent it was forked from."""
    return init_error(3)


def _number(handle: Any) -> int:
    """Return a handle's value; cuda-bindings wants to give up int() (12.9.1's release notes)."""
    try:
        return int(handle)
    except TypeError:
        return int(import_module("cuda.bindings.utils").get_cuda_native_handle(handle))


def _uuid_text(uuid: bytes) -> str:
    digits = uuid.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    text = "-".join(parts)
    whole_gpus = _uuids_of_whole_gpus()
    return f"MIG-{text}" if whole_gpus and text not in whole_gpus else f"GPU-{text}"


def _uuids_of_whole_gpus(folder: str = "/proc/driver/nvidia/gpus") -> set[str]:
    """Return the UUIDs that the kernel module lists: none of MIG instances, all of GPUs.

    Empty where it lists none, as in containers that hide it and in gVisor.
    """
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with open(f"{folder}/{name}/information", encoding="ascii", errors="replace") as file:
                found.update(_GPU_UUID.findall(file.read(1 << 16)))
    return found
