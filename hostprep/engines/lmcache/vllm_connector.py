"""LMCache inside of vLLM, its host memory prepared: what vLLM loads by this module's name.

vLLM's own LMCacheConnectorV1 does all the work; here only its host buffers move into this rank's
part of a region. Functions of LMCache are replaced in this process (names: 0.5.6): those that
allocate and free a host buffer (lmcache/v1/memory_management.py), the one that makes the allocator
over it, so that objects stay within registrations, and the one that says how much memory the
machine has left, which does not count prepared memory.
Imports vLLM and LMCache, and is imported by no other module of ours.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.logger import init_logger
from vllm.platforms import current_platform

from hostprep.backing import GIB
from hostprep.engines.host_memory import HostMemory
from hostprep.engines.lmcache.pieces import keep_within_pieces, piece_bytes_of
from hostprep.engines.lmcache.settings import (
    REQUESTER,
    SIZE_KEY,
    read_settings,
    requested_size,
)
from hostprep.engines.memory import engine_memory
from hostprep.errors import BadInputError, FailedError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Below vLLM's own logger, whose handler and level are the ones that people have set.
_log = init_logger("vllm.hostprep")
_ALLOCATE, _FREE = "_allocate_cpu_memory", "_free_cpu_memory"
_MAKE, _ALIGNMENT = "initialize_allocator", "_resolve_local_cpu_allocator_alignment"


class HostprepLMCacheConnector(LMCacheConnectorV1):  # type: ignore[misc]
    """vLLM's connector; LMCache's host memory is this rank's part of a region.

    Raises BadInputError for a configuration that cannot be and for a part that is too small,
    NotReadyError where there is no memory: LMCache itself would go on without a cache.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        config = vllm_config.kv_transfer_config
        extra = config.kv_connector_extra_config or {}
        settings = read_settings(extra)
        if current_platform.is_rocm():
            raise BadInputError(
                "memory is registered with CUDA, and this is ROCm",
                reason="WrongPlatform",
                remedy="use LMCacheConnectorV1 itself",
            )
        self._prepared: HostMemory | None = None
        if role == KVConnectorRole.WORKER:
            memory = self._prepared = _memory_of(vllm_config, extra)
            size_bytes = _size_bytes(memory, extra)
            config.kv_connector_extra_config = {**extra, SIZE_KEY: size_bytes / GIB}
            _replace_allocator(
                memory, registers=settings.registers(is_cuda=current_platform.is_cuda())
            )
        super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Let LMCache take its memory: it does so once it knows the engine's."""
        super().register_kv_caches(kv_caches)
        if self._prepared is not None and not self._prepared.used_bytes:
            _log.warning("LMCache took none of this rank's prepared memory: its log says why")

    def shutdown(self) -> None:
        """Close the memory, once no copy is in flight any more.

        LMCache is left running until the process ends, as by vLLM's own connector: its end closes
        a ZeroMQ socket that its thread still polls, which may abort the process (0.5.6).
        """
        try:
            super().shutdown()
        finally:
            if self._prepared is not None:
                _synchronize()
                self._prepared.close()


def _memory_of(vllm_config: Any, extra: Mapping[str, Any]) -> HostMemory:
    parallel = vllm_config.parallel_config
    local_world_size = parallel.local_world_size
    attachment = engine_memory(
        extra, index=parallel.data_parallel_index, processes=parallel.world_size
    )
    rank = parallel.rank % local_world_size
    return HostMemory(attachment, rank=rank, ranks=local_world_size, requester=REQUESTER, log=_log)


def _size_bytes(memory: HostMemory, extra: Mapping[str, Any]) -> int:
    """Return how much LMCache is to take: what is requested, or all. Raises BadInputError."""
    try:
        requested = requested_size(extra, os.environ)
        size_bytes = requested[0] if requested is not None else memory.free_bytes
        memory.check(size_bytes)
    except BaseException:
        memory.close()
        raise
    return size_bytes


def _replace_allocator(memory: HostMemory, *, registers: bool) -> None:
    """Let LMCache take its host buffers from `memory` from now on, in this process.

    `registers`: with CUDA, before LMCache has them, chunk by chunk in the node's turns; by one call
    where it is a buffer of which LMCache does not say what copies it makes. A buffer that no longer
    fits is LMCache's own, registered outside of the turns, with a warning. Raises FailedError for
    an LMCache that has other names for what is replaced.
    """
    import torch
    from lmcache.utils import get_size_bytes
    from lmcache.v1 import memory_management, system_detection
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    detector: Any = getattr(system_detection, "SystemMemoryDetector", None)
    own_allocate = _function(memory_management, _ALLOCATE)
    own_free = _function(memory_management, _FREE)
    own_make = _function(LocalCPUBackend, _MAKE)
    alignment = _function(LocalCPUBackend, _ALIGNMENT)
    _function(detector, "get_available_memory_gb")
    piece_bytes: int | None = None

    def make(backend: Any, config: Any, metadata: Any = None, **how: Any) -> Any:
        nonlocal piece_bytes
        if metadata is not None:
            chunk_bytes = get_size_bytes(metadata.get_shapes(), metadata.get_dtypes())
            align_bytes = alignment(backend, config) or memory_management.AddressManager.ALIGN_BYTES
            piece_bytes = piece_bytes_of(chunk_bytes, align_bytes)
        try:
            allocator = own_make(backend, config, metadata, **how)
            if piece_bytes is not None:
                keep_within_pieces(allocator, piece_bytes)
        finally:
            piece_bytes = None
        return allocator

    def allocate(size: int, *more: Any, **how: Any) -> Any:
        if size > memory.free_bytes:
            _log.warning(
                "%d bytes of LMCache's do not fit into prepared memory any more: it allocates and "
                "registers them itself, without taking turns with the node's other processes",
                size,
            )
            return own_allocate(size, *more, **how)
        row_bytes = (piece_bytes or size) if registers else None
        return memory.tensor((size,), torch.uint8, row_bytes=row_bytes)

    def free(buffer: Any, *more: Any, **how: Any) -> None:
        if not memory.owns(buffer.data_ptr()):
            own_free(buffer, *more, **how)
            return
        _synchronize()
        memory.unregister(buffer.data_ptr())

    for name, ours in ((_ALLOCATE, allocate), (_FREE, free)):
        setattr(memory_management, name, ours)
    setattr(LocalCPUBackend, _MAKE, make)
    detector.get_available_memory_gb = staticmethod(lambda: memory.free_bytes / GIB)


def _synchronize() -> None:
    """Wait for copies in flight, as LMCache does before it frees memory."""
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
