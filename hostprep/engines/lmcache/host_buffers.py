"""LMCache's host buffers in a rank's part of a region; run inside of an engine that has LMCache.

Two functions of LMCache are replaced in this process, and one is answered (names: 0.5.6): those
that allocate and free a host buffer (lmcache/v1/memory_management.py), and the one that says how
much memory the machine has left, which does not know of memory prepared before.
"""

from __future__ import annotations

import logging

from hostprep.backing import GIB
from hostprep.errors import FailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.engines.host_memory import HostMemory

__all__ = ["lead", "synchronize"]

_ALLOCATE, _FREE = "_allocate_cpu_memory", "_free_cpu_memory"
_log = logging.getLogger("hostprep.engines")


def lead(memory: HostMemory, *, registers: bool) -> None:
    """Have LMCache take its host buffers from `memory` from now on, in this process.

    `registers`: with CUDA, before LMCache has them, by one call in the node's turn: its copies
    may begin and end anywhere. A buffer that does not fit any more is LMCache's own, registered
    outside of the turns, with a warning. Raises FailedError for an LMCache that has other names
    for what is replaced.
    """
    import torch
    from lmcache.v1 import memory_management, system_detection

    detector: Any = getattr(system_detection, "SystemMemoryDetector", None)
    own_allocate = _function(memory_management, _ALLOCATE)
    own_free = _function(memory_management, _FREE)
    _function(detector, "get_available_memory_gb")

    def allocate(size: int, *more: Any, **how: Any) -> Any:
        if size > memory.free_bytes:
            _log.warning(
                "%d bytes of LMCache's do not fit into prepared memory any more: it allocates and "
                "registers them itself, without taking turns with the node's other processes",
                size,
            )
            return own_allocate(size, *more, **how)
        return memory.tensor((size,), torch.uint8, row_bytes=size if registers else None)

    def free(buffer: Any, *more: Any, **how: Any) -> None:
        if not memory.owns(buffer.data_ptr()):
            own_free(buffer, *more, **how)
            return
        synchronize()
        memory.let_go(buffer.data_ptr())

    for name, ours in ((_ALLOCATE, allocate), (_FREE, free)):
        setattr(memory_management, name, ours)
    detector.get_available_memory_gb = staticmethod(lambda: memory.free_bytes / GIB)


def synchronize() -> None:
    """Wait for copies that are on their way, as LMCache does before it lets go of memory."""
    from lmcache import torch_dev

    if torch_dev.is_available():
        torch_dev.synchronize()


def _function(home: Any, name: str) -> Any:
    found = getattr(home, name, None)
    if not callable(found):
        raise FailedError(
            f"this LMCache has no {name}: it allocates its host memory elsewhere",
            reason="EngineUnknown",
            remedy="use a release that `hostprep engines` lists, or --engine lmcache",
        )
    return found
