"""vLLM's OffloadingConnector, which also finds out whose blocks a region keeps.

A spec sees names and sizes; what blocks depend on is known to the connector: vLLM's configuration,
each request, and through its handshake what the ranks say of their tensors. Loaded by vLLM by name:
"kv_connector": "HostprepOffloadingConnector", "kv_connector_module_path": "hostprep.engines.vllm".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from hostprep.engines.vllm.identity import Identity, rank_facts, ranks_identity
from hostprep.engines.vllm.offloading import GatedManager
from hostprep.linux.processes import end_with_parent

if TYPE_CHECKING:
    from typing import Any

    from hostprep.engines.vllm.keeping import Keeper


@dataclass
class RankFacts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one rank says of its tensors: an Identity's two mappings."""

    fields: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


class HostprepOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """Does what its base class does, ends with its server, and tells the keeper what is kept."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._cache_config = kv_cache_config
        self._facts: RankFacts | None = None
        self._keeper: Keeper | None = None
        if role == KVConnectorRole.SCHEDULER:
            # vLLM's workers end with this process, but nothing ends this one: where the server was
            # killed it would stay, idle, and keep the region from the next server for good.
            end_with_parent()
            manager = self.connector_scheduler.manager
            self._keeper = manager.keeper if isinstance(manager, GatedManager) else None
            if self._keeper is not None:
                self._keeper.attach(vllm_config, kv_cache_config, manager.inner.recover)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Note what these are, for the scheduler."""
        super().register_kv_caches(kv_caches)
        found = rank_facts(self._config, self._cache_config, kv_caches)
        self._facts = RankFacts(dict(found.fields), dict(found.unknown))

    def get_handshake_metadata(self) -> Any:
        """Return what vLLM brings to the scheduler, from each rank."""
        return self._facts

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Take what the ranks said, by their places in pipeline and tensor parallel groups."""
        if self._keeper is None:
            return
        width = self._config.parallel_config.tensor_parallel_size
        facts = {
            stage * width + rank: Identity(said.fields, said.unknown)
            for (stage, rank), said in metadata.items()
            if isinstance(said, RankFacts)
        }
        self._keeper.add_ranks(ranks_identity(facts, self._config.parallel_config.world_size))

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Take the same from releases that know of no pipelines."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): said for rank, said in metadata.items()}
        )

    def on_new_request(self, request: Any) -> None:
        """Note what a request's blocks depend on besides their tokens."""
        if self._keeper is not None:
            self._keeper.add_request(request)
        super().on_new_request(request)
