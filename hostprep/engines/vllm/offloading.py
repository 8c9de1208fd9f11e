"""The plugin for vLLM's OffloadingConnector: its CPU tier in prepared memory.

vLLM loads it by name: `"spec_name": "HostprepOffloadingSpec", "spec_module_path":
"hostprep.engines.vllm"` in kv_connector_extra_config (vllm/v1/kv_offload/factory.py). It imports
vLLM, and is imported by no other module of ours.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, PrepareStoreOutput
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from hostprep.cuda.board_view import BoardReader
from hostprep.cuda.cost import registration_cost
from hostprep.cuda.gate import ALL, Gate
from hostprep.engines.memory import engine_memory, engine_region, engine_region_end
from hostprep.engines.vllm.identity import engine_identity, packages_identity
from hostprep.engines.vllm.keeping import KEY_BYTES, Keeper
from hostprep.engines.vllm.offloading_compat import (
    LOG,
    Forwarding,
    captures_graphs,
    config_info_of,
    free_memory,
    is_tested,
    metric_definitions,
    nodes_of_world,
    shares_process,
    warn_if_untested,
)
from hostprep.engines.vllm.offloading_layout import LAYOUT_VERSION, Layout, layout_of
from hostprep.engines.vllm.offloading_region import RankRegistration, why_later
from hostprep.engines.vllm.offloading_slots import SlotsManager, slots_layout
from hostprep.engines.vllm.offloading_worker import HostprepWorker
from hostprep.engines.vllm.settings import Settings
from hostprep.errors import BadInputError
from hostprep.slots.directory import Directory
from hostprep.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

    from hostprep.client.attach import Attachment
    from hostprep.cuda.board_layout import Holes


class HostprepOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM makes one in the scheduler and one in each rank; both find the same layout.

    Raises BadInputError for a configuration that cannot be, and HostprepError where the memory
    cannot be had: the engine does not start then.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return what vLLM's front end is to export: its CPU tier's metrics, and ours."""
        return {**super().build_metric_definitions(extra_config), **metric_definitions()}

    def __init__(self, config: Any) -> None:
        warn_if_untested()
        _check(config)
        self._settings = settings = Settings.read(config.extra_config, can_have_slots=True)
        parallel = config.parallel
        processes = parallel.world_size if shares_process() else max(2, parallel.world_size)
        self._region = engine_region(
            config.extra_config,
            size_bytes=settings.size_bytes or 1,
            index=parallel.data_parallel_index,
            processes=processes,
        )
        region = self._region.region
        # Ranks that have bytes of their own: one where the base class says so (MLA).
        is_replicated = config.replicated_layout and self._uses_shared_region()
        copies = 1 if is_replicated else int(parallel.world_size)
        self._chunk_bytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
        divide = functools.partial(
            layout_of,
            page_bytes=region.page_bytes,
            chunk_bytes=self._chunk_bytes,
            slices=copies,
            region=f"region {region.name}",
        )
        usable_bytes = settings.size_bytes or region.size_bytes
        self._layout = divide(usable_bytes)
        if settings.warm is not None:  # the directory of what is kept: the region's last bytes
            end = Directory.size_bytes_for(self._layout.rows, KEY_BYTES)
            room_bytes = max(0, region.size_bytes - end)
            self._layout = divide(
                min(usable_bytes, room_bytes),
                region=f"region {region.name}, beside the directory of what is kept,",
            )
        self._copies = copies
        super().__init__(_sized(config, self._layout, copies, self.BLOCK_SIZE_ALIGNMENT))
        self._gated: GatedManager | None = None
        self._copier: HostprepWorker | None = None
        self._has_grown = False

    def get_manager(self) -> Any:
        """Return vLLM's own manager, or ours over slots, behind the gate."""
        if self._gated is None:
            keeper = self._keeper()
            inner = self._slots(keeper) if self._settings.slots else super().get_manager()
            self._gated = GatedManager(
                inner, self._gate(), keeper, extend=self._extend if self._grows else None
            )
        return self._gated

    @property
    def _grows(self) -> bool:
        """Whether chunks are used as they are registered.

        Not with vLLM's own manager, which cannot wait for some of its chunks; nor where blocks were
        kept: any of them may be asked for at once.
        """
        settings = self._settings
        can_grow = settings.slots and settings.warm is None and settings.mode == "background"
        return settings.grows and can_grow

    def _extend(self, manager: SlotsManager, usable_bytes: int, holes: Holes) -> None:
        chunks = min(self.num_chunks, usable_bytes // self._layout.row_bytes)
        manager.extend(chunks, self._layout.rows_in(holes))
        if usable_bytes < ALL and not self._has_grown:
            self._has_grown = True
            LOG.info(
                "the first chunks are registered: the host tier in region %s is in use, and grows",
                self._region.region.name,
            )

    def get_worker(self, kv_caches: Any) -> Any:
        """Return this rank's worker; its memory is mapped, and not registered yet."""
        if self._copier is None:
            index = self.config.parallel.data_parallel_index
            memory = engine_memory(self.config.extra_config, index=index)
            try:
                self._copier = self._worker_over(memory, kv_caches)
            except BaseException:
                memory.close()
                raise
        return self._copier

    def _keeper(self) -> Keeper | None:
        """Return who decides on what is kept, over the region's directory; None: nothing is."""
        if self._settings.warm is None:
            return None
        layout, region = self._layout, self._region.region
        end = engine_region_end(
            self.config.extra_config,
            Directory.size_bytes_for(self.num_chunks, KEY_BYTES),
            index=self.config.parallel.data_parallel_index,
        )
        geometry = {
            "rows": layout.rows,
            "row_bytes": layout.row_bytes,
            "slice_bytes": layout.slice_bytes,
            "slices": self._copies,
            "region_bytes": region.size_bytes,
            "format": LAYOUT_VERSION,
        }
        return Keeper(
            self._settings.warm,
            Directory(end, slots_layout(self.num_chunks, layout.row_bytes), key_bytes=KEY_BYTES),
            engine=engine_identity(vllm.__version__, current_platform.device_name, geometry).joined(
                packages_identity()
            ),
            paths=self._region.paths,
            region=region.name,
            chunk_bytes=self._chunk_bytes * self._copies,
            deadline_s=self._settings.deadline_s,
        )

    def _slots(self, keeper: Keeper | None) -> SlotsManager:
        return SlotsManager(
            self.num_chunks,
            keeper=keeper,
            chunk_bytes=self._layout.row_bytes,
            grows=self._grows,
            has_events=self.kv_events_config.enable_kv_cache_events,
            config_info=config_info_of(self),
            store_threshold=int(self.extra_config.get("store_threshold") or 0),
            max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000) or 0),
        )

    def _gate(self) -> Gate:
        return Gate(
            self.config.parallel.world_size,
            BoardReader(self._region.board, generation=self._region.lease_id),
            # Ranks that may go on without registering find out first that nothing moves.
            deadline_s=self._settings.deadline_s * (2 if self._settings.is_unpinned_allowed else 1),
            grows=self._grows,
            on_grown=self._log_ready,
            on_degraded=lambda why: LOG.warning(
                "serving from GPU memory alone, without the host tier, until the engine is "
                "restarted: %s",
                why,
            ),
        )

    def _log_ready(self) -> None:
        LOG.info(
            "all ranks are ready: the host tier, %d chunks in region %s, is in use%s",
            self.num_chunks,
            self._region.region.name,
            ", by hostprep.slots" if self._settings.slots else "",
        )

    def _worker_over(self, memory: Attachment, kv_caches: Any) -> HostprepWorker:
        parallel, is_cuda = self.config.parallel, bool(current_platform.is_cuda())
        number = 0 if self.replicated_layout else parallel.rank
        settings = self._settings
        registers = settings.registers(is_cuda=is_cuda)
        nodes = nodes_of_world()
        registration = RankRegistration(
            memory,
            self._layout,
            settings,
            rank=parallel.rank,
            world=parallel.world_size,
            slice_number=number,
            registers=registers,
            grows=self._grows,
            obstacle=f"its ranks are on {nodes} nodes, and vLLM's OffloadingConnector has no "
            "channel by which another node's ranks could say that they are ready"
            if nodes > 1
            else "",
        )
        worker = HostprepWorker(
            kv_caches,
            memory,
            registration,
            layout=self._layout,
            slice_number=number,
            blocks_per_chunk=self.blocks_per_chunk,
            is_cuda=is_cuda,
            # Kernels may be tried out as a handler is made (vLLM pull request 57569), when nothing
            # is registered yet: not by the releases that were read. Whether there will be memory
            # that is not registered is known too late to make handlers by it.
            may_use_kernels=registers and is_tested() and not settings.is_unpinned_allowed,
        )
        if registers and settings.mode == "background":
            self._begin_early(registration)
        return worker

    def _begin_early(self, registration: RankRegistration) -> None:
        """Begin before warm-up where that is safe: at full speed, since nobody is served yet."""
        size_bytes, page_bytes = self._layout.slice_bytes, self._region.region.page_bytes
        tables_bytes = registration_cost(size_bytes, page_bytes=page_bytes).vram_bytes_per_gpu
        why = why_later(free_memory(), captures_graphs=captures_graphs(), tables_bytes=tables_bytes)
        if why:
            LOG.info("registering begins with the first step, after warm-up: %s", why)
            return
        LOG.info(
            "registering begins before warm-up: no CUDA graphs are captured, and there is room for "
            "page tables of %s in GPU memory",
            format_bytes(tables_bytes),
        )
        registration.begin()


@dataclasses.dataclass(frozen=True)
class _Side:
    """Whether a request may use host memory; kept in its context, and gone with it."""

    is_inside: bool


class GatedManager(Forwarding):  # type: ignore[misc]
    """Any manager of vLLM's, behind a gate; what is not about the gate goes to `inner`.

    While the gate is closed nothing is in host memory, and nothing is brought there: every lookup
    is a miss, and every store has nothing to do. Both are answers that vLLM gives itself, so that
    it neither asks again nor warns (vllm/.../offloading/scheduler.py, _build_store_jobs).

    A request stays on the side it was first seen on. vLLM offers a request's blocks in order, and
    does not offer those again whose store was answered as not needed: a request that changed sides
    would have later blocks in host memory without the ones before, which no lookup ever reaches.
    """

    def __init__(
        self,
        inner: Any,
        gate: Gate,
        keeper: Keeper | None = None,
        *,
        extend: Callable[[Any, int, Holes], None] | None = None,
    ) -> None:
        """`extend`: gives `inner` what can be used of each rank's slice, in bytes, as it grows.

        Up to where, and which holes not.
        """
        super().__init__(inner)
        self.gate = gate
        self.keeper = keeper
        self._extend = extend
        self._usable_bytes = 0
        self._has_stepped = False

    def on_new_request(self, req_context: Any) -> Any:
        """Decide on the request's side."""
        self._is_inside(req_context)
        return self.inner.on_new_request(req_context)

    def lookup(self, key: Any, req_context: Any) -> Any:
        """Return a miss for a request that stays outside; never "ask again"."""
        if not self._is_inside(req_context):
            return LookupResult.MISS
        return self.inner.lookup(key, req_context)

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> Any:
        """Store nothing of a request that stays outside: as if all of it were there already."""
        if not self._is_inside(req_context):
            return PrepareStoreOutput(
                keys_to_store=[], store_spec=CPULoadStoreSpec([]), evicted_keys=[]
            )
        return self.inner.prepare_store(keys, req_context)

    def on_schedule_end(self, context: Any) -> None:
        """Note that the ranks were polled."""
        self._has_stepped = True
        self._grow()
        self.inner.on_schedule_end(context)
        self._is_recovered()

    def take_events(self) -> Iterable[Any]:
        """Announce what is kept from before once it can be loaded: routers would send requests."""
        return self.inner.take_events() if self.gate.is_open else ()

    def has_pending_work(self) -> bool:
        """Make the engine take one step by itself once it is up, with or without a request.

        In it each rank is polled for the first time, and begins to register.
        """
        return not self._has_stepped or bool(self.inner.has_pending_work())

    def shutdown(self) -> None:
        """Stop watching the gate."""
        self.gate.close()
        if self.keeper is not None:
            self.keeper.close()
        self.inner.shutdown()

    def _is_recovered(self) -> bool:
        """Tell whether all that is to be recovered was; it is found while the gate is closed."""
        if self.keeper is None:
            return True
        self.keeper.poll(is_used=self.gate.is_open)
        return self.keeper.is_open

    def _grow(self) -> None:
        usable_bytes = self.gate.usable_bytes
        if self._extend is not None and usable_bytes != self._usable_bytes:
            self._extend(self.inner, usable_bytes, self.gate.holes)
            self._usable_bytes = usable_bytes

    def _is_inside(self, req_context: Any) -> bool:
        side: _Side | None = req_context.get_state(_Side)
        if side is None:
            self._grow()
            side = _Side(self.gate.is_open and self._is_recovered())
            req_context.set_state(side)
        return side.is_inside


def _check(config: Any) -> None:
    """Refuse what cannot work, before the memory is attached. Raises BadInputError."""
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
