"""The plugin for vLLM's OffloadingConnector: its CPU tier in prepared memory.

vLLM loads it by name: `"spec_name": "HostprepOffloadingSpec", "spec_module_path":
"hostprep.engines.vllm"` in kv_connector_extra_config (vllm/v1/kv_offload/factory.py). It imports
vLLM, and is imported by nothing else of ours.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from hostprep.cuda.board import BoardReader
from hostprep.cuda.gate import Gate
from hostprep.engines.memory import engine_memory, engine_place
from hostprep.engines.vllm.offloading_compat import (
    LOG,
    config_info_of,
    nodes_of_world,
    shares_process,
    warn_if_unread,
)
from hostprep.engines.vllm.offloading_layout import Layout, layout_of
from hostprep.engines.vllm.offloading_manager import GatedManager
from hostprep.engines.vllm.offloading_ranks import Rank, RankRegistration
from hostprep.engines.vllm.offloading_settings import Settings
from hostprep.engines.vllm.offloading_slots import SlotsManager
from hostprep.engines.vllm.offloading_worker import HostprepWorker
from hostprep.errors import BadInputError

if TYPE_CHECKING:
    from typing import Any

    from hostprep.engines.memory import Place

__all__ = ["HostprepOffloadingSpec"]


class HostprepOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM makes one in the scheduler and one in each rank; both find the same layout.

    Raises BadInputError for a configuration that cannot be, and HostprepError where the memory
    cannot be had: the engine does not start then.
    """

    def __init__(self, config: Any) -> None:
        warn_if_unread()
        _check(config)
        self._settings = Settings.read(config.extra_config, can_have_slots=True)
        self._is_cuda = bool(current_platform.is_cuda())
        self._place = self._find(config)
        self._layout = self._lay_out(config)
        copies = self._copies(config)
        super().__init__(_sized(config, self._layout, copies, self.BLOCK_SIZE_ALIGNMENT))
        self._gated: Any = None
        self._copier: HostprepWorker | None = None

    def get_manager(self) -> Any:
        """Return vLLM's own manager, or ours of slots, behind the gate."""
        if self._gated is None:
            inner = self._slots() if self._settings.slots else super().get_manager()
            self._gated = GatedManager(inner, self._gate())
        return self._gated

    def get_worker(self, kv_caches: Any) -> Any:
        """Return this rank's worker; its memory is mapped, and not registered yet."""
        if self._copier is None:
            self._copier = self._new_worker(kv_caches)
        return self._copier

    def _slots(self) -> SlotsManager:
        return SlotsManager(
            self.num_chunks,
            chunk_bytes=self._layout.row_bytes,
            has_events=self.kv_events_config.enable_kv_cache_events,
            config_info=config_info_of(self),
        )

    def _find(self, config: Any) -> Place:
        parallel = config.parallel
        processes = parallel.world_size if shares_process() else max(2, parallel.world_size)
        return engine_place(
            config.extra_config,
            size_bytes=self._settings.size_bytes or 1,
            index=parallel.data_parallel_index,
            processes=processes,
        )

    def _lay_out(self, config: Any) -> Layout:
        region = self._place.region
        return layout_of(
            self._settings.size_bytes or region.size_bytes,
            page_bytes=region.page_bytes,
            chunk_bytes=config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
            slices=self._copies(config),
            region=f"region {region.name}",
        )

    def _copies(self, config: Any) -> int:
        """Return how many ranks have bytes of their own; as the base class decides on one (MLA)."""
        is_replicated = config.replicated_layout and self._uses_shared_region()
        return 1 if is_replicated else int(config.parallel.world_size)

    def _gate(self) -> Gate:
        return Gate(
            self.config.parallel.world_size,
            BoardReader(self._place.board, generation=self._place.lease_id),
            deadline_s=self._settings.deadline_s,
            on_open=lambda: LOG.info(
                "all ranks are ready: the host tier, %d chunks in region %s, is in use%s",
                self.num_chunks,
                self._place.region.name,
                ", by hostprep.slots" if self._settings.slots else "",
            ),
            on_degraded=lambda why: LOG.warning(
                "serving from GPU memory alone, without the host tier, until the engine is "
                "restarted: %s",
                why,
            ),
        )

    def _new_worker(self, kv_caches: Any) -> HostprepWorker:
        parallel = self.config.parallel
        memory = engine_memory(self.config.extra_config, index=parallel.data_parallel_index)
        try:
            number = 0 if self.replicated_layout else parallel.rank
            rank = self._rank(number)
            return HostprepWorker(
                kv_caches,
                memory,
                RankRegistration(memory, rank),
                layout=self._layout,
                slice_number=number,
                blocks_per_chunk=self.blocks_per_chunk,
                is_cuda=self._is_cuda,
                is_pinned=rank.registers,
            )
        except BaseException:
            memory.close()
            raise

    def _rank(self, slice_number: int) -> Rank:
        nodes = nodes_of_world()
        return Rank(
            number=self.config.parallel.rank,
            world=self.config.parallel.world_size,
            offset_bytes=self._layout.offset_of(slice_number),
            size_bytes=self._layout.slice_bytes,
            row_bytes=self._layout.row_bytes,
            registers=self._settings.does_register(is_cuda=self._is_cuda),
            mode=self._settings.mode,
            deadline_s=self._settings.deadline_s,
            obstacle=f"its ranks are on {nodes} nodes, and vLLM's OffloadingConnector has no "
            "channel by which another node's ranks could say that they are ready"
            if nodes > 1
            else "",
        )


def _check(config: Any) -> None:
    """Refuse what cannot work, before any memory is looked for. Raises BadInputError."""
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise BadInputError(
            f"the plugin is for CUDA, and this is {current_platform.device_name}",
            reason="OtherPlatform",
            remedy="use `hostprep exec --engine vllm`, which needs no plugin",
        )
    if config.canonical_layout:
        raise BadInputError(
            "canonical_layout is of vLLM's TieringOffloadingSpec",
            reason="CanonicalLayout",
            remedy="leave it out, or use `hostprep exec --engine vllm`",
        )
    if config.worker_kv_bytes_per_block < 1:
        raise BadInputError("this model has no KV cache to offload", reason="NoCache")


def _sized(config: Any, layout: Layout, copies: int, alignment: int) -> Any:
    """Return the configuration by which the base class arrives at the layout's number of chunks.

    It divides cpu_bytes_to_use by the size of a chunk of all ranks, rounded up to `alignment`.
    """
    chunk = config.worker_kv_bytes_per_block * copies * config.cache.blocks_per_chunk
    size_bytes = layout.rows * (-(-chunk // alignment) * alignment)
    extra = {**config.extra_config, "cpu_bytes_to_use": size_bytes}
    return dataclasses.replace(config, extra_config=extra)
