"""SimpleCPUOffloadConnector over prepared memory, registered while the engine serves already.

vLLM loads it by name: `"kv_connector": "HostprepSimpleConnector", "kv_connector_module_path":
"hostprep.engines.vllm"`. It imports vLLM, and is imported by no other module of ours.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)

from hostprep.cuda.board_view import BoardReader
from hostprep.engines.memory import engine_memory, engine_region
from hostprep.engines.vllm.settings import Settings
from hostprep.engines.vllm.simple_tier import PreparedTier, TierGate
from hostprep.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class GatedMetadata(SimpleCPUOffloadMetadata):  # type: ignore[misc]
    """What the scheduler sends the workers at each step."""

    is_decided: bool = False
    """The gate is open, or will never be: ranks need not report any more."""


@dataclass
class RankMetadata(SimpleCPUOffloadWorkerMetadata):  # type: ignore[misc]
    """What the workers send the scheduler at each step, on whichever node they are."""

    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Each rank's state, and why."""

    def aggregate(self, other: Any) -> RankMetadata:
        """Return what both say."""
        merged = super().aggregate(other)
        return RankMetadata(**vars(merged) | {"ranks": self.ranks | getattr(other, "ranks", {})})


class HostprepSimpleConnector(upstream.SimpleCPUOffloadConnector):  # type: ignore[misc]
    """vLLM's connector; its host tensors lie in a prepared region.

    Raises BadInputError for a configuration that cannot be, and for a region that is too small;
    NotReadyError where there is no memory to be had. Options: docs/engines/vllm-simple.md.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        parallel = vllm_config.parallel_config
        settings = Settings.read(extra)
        _check(extra)
        super().__init__(vllm_config, role, kv_cache_config)
        self._tier: PreparedTier | None = None
        self._gate: TierGate | None = None
        if role == KVConnectorRole.WORKER and self.worker_handler is not None:
            self._tier = _tier_of(self.worker_handler, parallel, extra, settings)
        if self.scheduler_manager is not None and settings.mode == "background":
            self._gate = TierGate(parallel.world_size, _board_of(parallel, extra))

    # In the worker.

    def get_handshake_metadata(self) -> None:
        """Begin: vLLM asks once after warm-up, before any request (v1/engine/core.py)."""
        if self._tier is not None:
            self._tier.poll()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the step's work, and whether the scheduler still waits for us."""
        super().bind_connector_metadata(connector_metadata)
        if self._tier is not None and getattr(connector_metadata, "is_decided", False):
            self._tier.acknowledge()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        """Poll, once a step."""
        if self._tier is not None:
            self._tier.poll()
        return super().get_finished(finished_req_ids)

    def build_connector_worker_meta(self) -> Any:
        """Add this rank's state until the scheduler has decided: a lost message is no harm."""
        meta = super().build_connector_worker_meta()
        report = self._tier.report if self._tier is not None else None
        if report is None:
            # Never vLLM's own class: what it is aggregated with may carry ranks.
            return None if meta is None else RankMetadata(**vars(meta))
        said = vars(meta) if meta is not None else {"completed_store_events": {}}
        rank = self._vllm_config.parallel_config.rank
        return RankMetadata(**said, ranks={rank: report})

    def shutdown(self) -> None:
        """Close the memory, or stop watching the gate."""
        try:
            super().shutdown()
        finally:
            if self._tier is not None:
                self._tier.close()
            if self._gate is not None:
                self._gate.close()

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Find nothing while the gate is closed: a miss, never "ask again"."""
        if self._gate is not None and not self._gate.admits(request.request_id):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Follow only requests that may use the tier."""
        if self._gate is None or self._gate.admits(request.request_id):
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> GatedMetadata:
        """Give the workers nothing to do while the gate is closed."""
        if self._gate is not None and not self._gate.is_open:
            return GatedMetadata(is_decided=self._gate.is_decided)
        meta = super().build_connector_meta(scheduler_output)
        return GatedMetadata(**vars(meta), is_decided=True)

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass the ranks' states to the gate."""
        meta = connector_output.kv_connector_worker_meta
        if self._gate is not None and isinstance(meta, RankMetadata):
            self._gate.report_all(meta.ranks)
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        self._forget(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        self._forget(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def _forget(self, request_id: str) -> None:
        if self._gate is not None:
            self._gate.forget(request_id)


def _check(extra: Mapping[str, Any]) -> None:
    if extra.get("kv_offload_backend", "cpu") != "cpu":
        raise BadInputError(
            f"kv_offload_backend is {extra['kv_offload_backend']!r}: that tier is not in host "
            "memory, and nothing can be prepared for it",
            reason="WrongBackend",
            remedy="leave kv_offload_backend out, or use vLLM's own SimpleCPUOffloadConnector",
        )
    if current_platform.is_rocm():
        raise BadInputError(
            "memory is registered with CUDA, and this is ROCm",
            reason="WrongPlatform",
            remedy="use vLLM's own SimpleCPUOffloadConnector",
        )


def _tier_of(
    handler: Any, parallel: Any, extra: Mapping[str, Any], settings: Settings
) -> PreparedTier:
    attach = functools.partial(
        engine_memory,
        extra,
        size_bytes=handler.cpu_capacity_bytes * parallel.local_world_size,
        index=parallel.data_parallel_index,
        processes=parallel.world_size,
    )
    registers = settings.registers(is_cuda=current_platform.is_cuda())
    return PreparedTier(handler, parallel, settings, attach=attach, registers=registers)


def _board_of(parallel: Any, extra: Mapping[str, Any]) -> BoardReader | None:
    """Return the board of this engine's region, where this process can know which one that is.

    A region that a worker process claimed by the configuration is known to that process only:
    the ranks' own messages are enough then.
    """
    if "HOSTPREP_LEASE" not in os.environ and parallel.distributed_executor_backend != "uni":
        return None
    region = engine_region(extra, index=parallel.data_parallel_index, processes=parallel.world_size)
    return BoardReader(region.board, generation=region.lease_id)
