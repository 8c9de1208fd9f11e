"""What SGLang loads by its entry-point group `sglang.srt.plugins`: its host pools in our region.

Three functions of SGLang are wrapped, by its own HookRegistry (names: 0.5.23): the one that
allocates and registers a host buffer, the one that takes a registration back, and the one that
says how much host memory a pool may have, which does not know of memory prepared before.

Without `HOSTPREP_SGLANG=1` in the environment, which `hostprep exec --engine sglang` sets,
nothing is wrapped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hostprep.engines.allocator import Requester
from hostprep.errors import BadInputError

if TYPE_CHECKING:
    from hostprep.engines.host_memory import HostMemory

ENABLED = "HOSTPREP_SGLANG"
"""The variable that enables the plugin: a lease alone may be meant for something else."""

RANGES = "_sglang_cuda_host_registered_ranges"
"""The attribute by which SGLang remembers what it has to unregister (pool_host/common.py)."""

_REQUESTER = Requester("SGLang", "--hicache-size (GB a rank) or --hicache-ratio")
_POOLS = "sglang.srt.mem_cache.pool_host"
_memory: HostMemory | None = None


def load() -> None:
    """Wrap SGLang's functions where it is enabled; SGLang calls this in each of its processes.

    SGLang logs what a plugin raises, and goes on with memory of its own.
    """
    if os.environ.get(ENABLED, "0") in ("", "0"):
        return
    from pkgutil import resolve_name

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = {
        f"{_POOLS}.common.alloc_with_host_register": _allocate,
        f"{_POOLS}.common._cuda_host_unregister": _unregister,
        f"{_POOLS}.base.host_memory_budget_bytes": _budget_bytes,
    }
    for target in hooks:  # all or none: a pool in our memory that SGLang unregisters is worse
        resolve_name(target)
    _forget_allocators(resolve_name(f"{_POOLS}.common"))
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _forget_allocators(common: Any) -> None:
    """Have SGLang look its function up again: its table keeps it for devices it has seen."""
    table = getattr(common, "ALLOC_MEMORY_FUNCS", {})
    for device in [each for each in table if table[each] is common.alloc_with_host_register]:
        del table[device]


def host_memory() -> HostMemory:
    """Return this process's part of the lease, joined at first. Raises HostprepError."""
    global _memory  # noqa: PLW0603 - SGLang's hooks are functions
    if _memory is None:
        _memory = _join()
    return _memory


def _join() -> HostMemory:
    from sglang.srt.runtime_context import get_parallel

    from hostprep.client.environment import LeaseEnvironment
    from hostprep.engines.host_memory import HostMemory
    from hostprep.engines.memory import engine_memory

    rank = local_rank_of(get_parallel())
    if "HOSTPREP_LEASE" not in os.environ:
        raise BadInputError(
            f"{ENABLED} is set, and this engine was given no prepared memory",
            reason="NoMemory",
            remedy="start it by `hostprep exec POOL -- CMD`, or unset it",
        )
    region, sharing = split_ranks(len(LeaseEnvironment.read().regions), rank)
    return HostMemory(
        engine_memory({}, index=region),
        rank=sharing.index,
        ranks=sharing.count,
        requester=_REQUESTER,
    )


def _allocate(  # noqa: PLR0917 - SGLang's signature
    original: Callable[..., Any],
    dims: tuple[int, ...],
    dtype: Any,
    device: Any,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
    **more: Any,
) -> Any:
    """Allocate a host buffer in our memory; an empty one needs none."""
    from sglang.srt.mem_cache.pool_host import common

    if math.prod(dims) == 0:
        return original(
            dims, dtype, device, pin_memory, allocator, registration_granularity_bytes, **more
        )
    if pin_memory and getattr(common, "_is_hip", False):
        raise BadInputError(
            "memory is registered with CUDA, and this is ROCm",
            reason="WrongPlatform",
            remedy="start SGLang without --engine sglang",
        )
    row_bytes = None
    if pin_memory:
        item_bytes = dtype.itemsize
        row_bytes = registration_granularity_bytes or _row_bytes(dims, item_bytes, _io_backend())
    tensor = host_memory().tensor(tuple(dims), dtype, row_bytes=row_bytes)
    # SGLang must not unregister it by the runtime's API: it goes by these ranges.
    setattr(tensor, RANGES, [])
    return tensor


def _unregister(original: Callable[..., Any], buffer: Any) -> Any:
    """Take a buffer's registration back: ours where the buffer is ours."""
    if _memory is None or not _memory.owns(buffer.data_ptr()):
        return original(buffer)
    _memory.unregister(buffer.data_ptr())
    return None


def _budget_bytes(original: Callable[..., Any], requested_bytes: int = 0, **how: Any) -> int:
    """Say how much a host pool of this rank may have: what is left of our memory, here already.

    Raises BadInputError for more than that, with both numbers.
    """
    del original, how  # it counts free memory, and ours is not free any more
    memory = host_memory()
    memory.check(requested_bytes)
    return memory.free_bytes


def _io_backend() -> str:
    from sglang.srt.runtime_context import get_memory

    try:
        return str(get_memory().hicache_io_backend)
    except (AttributeError, RuntimeError, ValueError):  # not published in this process
        return ""


def _row_bytes(dims: tuple[int, ...], item_bytes: int, io_backend: str) -> int:
    """Return what no copy straddles, for a buffer that SGLang gives no granularity.

    Where pages come first, one call copies one, also what kernels have gathered (scales,
    mha_mxfp8.py). Where layers do, and in a flat buffer, kernels read address by address: chunks
    may end on any page of memory. Copies (`direct`) merge neighbours: within one layer's keys or
    values, and anywhere in a flat buffer, which is registered by one call then, as by SGLang.
    """
    if len(dims) > 1 and dims[0] > dims[1]:
        return math.prod(dims[1:]) * item_bytes
    if io_backend == "kernel":
        return 0
    if len(dims) == 5 and dims[0] == 2:  # keys and values, then layers (mha.py)
        return math.prod(dims[2:]) * item_bytes
    return math.prod(dims if len(dims) < 3 else dims[1:]) * item_bytes


@dataclass(frozen=True)
class LocalRank:
    """A rank among those of its node that share something, counted from 0."""

    index: int = 0
    count: int = 1


def local_rank_of(parallel: Any) -> LocalRank:
    """Return a scheduler's rank among those of its engine on this node.

    `parallel` is SGLang's `get_parallel()` (srt/runtime_context.py, 0.5.23): a process's rank in
    its replica's world, which lies on the nodes in contiguous pieces, and the replica's number.
    Where SGLang has published none of it, as in a process that builds a pool by itself, it is
    the only one.
    """
    try:
        world, nodes = int(parallel.launch_world_size), max(1, int(parallel.nnodes))
        rank, replicas = int(parallel.launch_world_rank), max(1, int(parallel.dp_size))
        # Also set for attention data parallelism, whose groups are ranks of one world.
        replica = int(parallel.dp_rank or 0) if replicas > 1 else 0
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return LocalRank()
    here = max(1, world // nodes)
    return LocalRank(replica * here + rank % here, replicas * here)


def split_ranks(regions: int, rank: LocalRank) -> tuple[int, LocalRank]:
    """Return which of the lease's regions is a rank's, and its number among those that share it.

    Raises BadInputError where the ranks cannot share the regions evenly.
    """
    if rank.count % regions or not 0 <= rank.index < rank.count:
        raise BadInputError(
            f"SGLang's rank {rank.index} of {rank.count} on this node finds {regions} region(s) "
            "in its lease",
            reason="WrongCount",
            remedy="claim one region for all ranks, or as many as there are ranks on this node "
            "(`hostprep exec --count`)",
        )
    shared = rank.count // regions
    return rank.index // shared, LocalRank(rank.index % shared, shared)
