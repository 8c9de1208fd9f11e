"""What the driver's error codes mean here, and what to do about them.

Codes: cuda.h, enum cudaError_enum (CUresult); stable since CUDA 4.
"""

from __future__ import annotations

from hostprep.errors import FailedError, HostprepError, NotReadyError

__all__ = ["DriverError", "init_error"]

_GONE = frozenset({4, 201, 709, 713})
"""Driver shut down, no context, context destroyed, nothing registered there."""


class DriverError(FailedError):
    """A call that the driver refused. `code` and `name` are its own."""

    def __init__(self, code: int, name: str, call: str) -> None:
        reason, words, remedy = _MEANINGS.get(code, ("DriverFailed", "", _SEE_LOG))
        message = f"{call} failed with {name} ({code})"
        super().__init__(f"{message}: {words}" if words else message, reason=reason, remedy=remedy)
        self.code = code
        self.name = name

    @property
    def is_gone(self) -> bool:
        """Whether whatever was registered is not any more: there is nothing to undo."""
        return self.code in _GONE


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
        "the driver has no memory for its tables, or a single call was too large",
        "`hostprep doctor --gpu` shows what a registration takes; " + _SEE_LOG,
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


def init_error(code: int) -> HostprepError:
    """Return the error for a driver that could not be initialised."""
    if code not in _INIT:
        return FailedError(
            f"cuInit failed with CUDA error {code}", reason="DriverFailed", remedy=_SEE_LOG
        )
    kind, reason, words, remedy = _INIT[code]
    return kind(words, reason=reason, remedy=remedy)
