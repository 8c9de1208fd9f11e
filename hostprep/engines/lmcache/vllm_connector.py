"""LMCache inside of vLLM, its host memory prepared: what vLLM loads by this module's name.

vLLM's own LMCacheConnectorV1 does all the work; here it is only led to the memory first. Imports
vLLM, and is imported by nothing else of ours.
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
from hostprep.engines.lmcache.host_buffers import lead, synchronize
from hostprep.engines.lmcache.inside_settings import ASKER, SIZE_KEY, read_settings, size_asked
from hostprep.engines.memory import engine_memory
from hostprep.engines.vllm.simple_layout import share_of
from hostprep.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HostprepLMCacheConnector"]

# Below vLLM's own logger, whose handler and level are the ones that people have set.
_log = init_logger("vllm.hostprep")


class HostprepLMCacheConnector(LMCacheConnectorV1):  # type: ignore[misc]
    """vLLM's connector; LMCache's host memory is this rank's part of a region.

    Raises BadInputError for a configuration that cannot be and for a part that is too small,
    NotReadyError where there is no memory: LMCache itself would go on without a cache.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        config = vllm_config.kv_transfer_config
        extra = config.kv_connector_extra_config or {}
        settings = read_settings(extra)
        _check_platform()
        self._prepared: HostMemory | None = None
        if role == KVConnectorRole.WORKER:
            memory = self._prepared = _memory_of(vllm_config, extra)
            size_bytes = _size_bytes(memory, extra)
            config.kv_connector_extra_config = {**extra, SIZE_KEY: size_bytes / GIB}
            lead(memory, registers=settings.does_register(is_cuda=current_platform.is_cuda()))
        super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Have LMCache take its memory: it does so once it knows the engine's."""
        super().register_kv_caches(kv_caches)
        if self._prepared is not None and not self._prepared.used_bytes:
            _log.warning("LMCache took none of this rank's prepared memory: its log says why")

    def shutdown(self) -> None:
        """Let go of the memory, when no copy is on its way any more.

        LMCache is left running until the process ends, as by vLLM's own connector: its end closes
        a ZeroMQ socket that its thread still polls, which may abort the process (0.5.6).
        """
        try:
            super().shutdown()
        finally:
            if self._prepared is not None:
                synchronize()
                self._prepared.close()


def _check_platform() -> None:
    if current_platform.is_rocm():
        raise BadInputError(
            "memory is registered with CUDA, and this is ROCm",
            reason="WrongPlatform",
            remedy="use LMCacheConnectorV1 without us",
        )


def _memory_of(vllm_config: Any, extra: Mapping[str, Any]) -> HostMemory:
    parallel = vllm_config.parallel_config
    here = parallel.local_world_size
    rank = parallel.rank % here
    attachment = engine_memory(
        extra, index=parallel.data_parallel_index, processes=parallel.world_size
    )
    try:
        share = share_of(attachment.size_bytes, attachment.page_bytes, ranks=here, index=rank)
        return HostMemory(attachment, share, rank=rank, asker=ASKER)
    except BaseException:
        attachment.close()
        raise


def _size_bytes(memory: HostMemory, extra: Mapping[str, Any]) -> int:
    """Return what LMCache is to take: what it is told, or all. Raises BadInputError."""
    try:
        asked = size_asked(extra, os.environ)
        size_bytes = asked.size_bytes if asked is not None else memory.free_bytes
        memory.check(size_bytes)
    except BaseException:
        memory.close()
        raise
    return size_bytes
