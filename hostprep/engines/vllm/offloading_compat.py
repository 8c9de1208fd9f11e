"""What differs between the releases of vLLM that the OffloadingConnector's plugin works with.

Read for it: 0.31.0, 0.32.0 and 0.33.0. All load a spec by `spec_module_path`, make it with one
OffloadingConfig, ask it for a manager in the scheduler and for a worker in each rank. 0.33.0 adds
`lock`, `config_info` and `on_reset_flushed` to the manager, and `expedited` to `submit_load`;
0.32.0 added the origin of a hit (`get_load_source`). 0.33.0 calls `on_schedule_end` last in a step,
after its stores; the two before it call it first (v1/offloading/scheduler.py,
`build_connector_meta`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingManager

from hostprep.engines.catalogue import integration_of
from hostprep.engines.vllm.offloading_region import FreeMemory

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32.0
    CacheHitSource = None

try:
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata
except ImportError:  # a release in which a spec defines no metrics
    OffloadingCounterMetadata = None

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any

# Below vLLM's own logger, whose handler and level are the ones that people have set.
LOG = init_logger("vllm.hostprep")

LOAD_SOURCE: Any = CacheHitSource.HOST if CacheHitSource else None
"""The origin of hits in vLLM's metrics: its CPU tier's own."""

RECOVERED_LOAD_BYTES = "hostprep:kv_offload_recovered_load_bytes"
"""Of vllm:kv_offload_load_bytes, those that an earlier process of the engine had stored."""

_warned: list[str] = []


def is_tested() -> bool:
    """Tell whether the interfaces of this release were read."""
    version = str(vllm.__version__).partition("+")[0]
    return version in integration_of("vllm-offloading").versions


def warn_if_untested() -> None:
    """Warn once of a release whose interfaces were not read. It goes on: they change seldom."""
    if not is_tested() and not _warned:
        version = str(vllm.__version__)
        _warned.append(version)
        LOG.warning(
            "hostprep was tried with vLLM %s, and this is %s: blocks are copied without GPU "
            "kernels; if it does not start, use `hostprep exec --engine vllm`, which needs no "
            "plugin",
            ", ".join(integration_of("vllm-offloading").versions),
            version,
        )


def metric_definitions() -> dict[str, Any]:
    """Return vLLM's definitions of our own metrics; none where it takes none."""
    if OffloadingCounterMetadata is None:
        return {}
    text = "Bytes loaded to GPU that an earlier process of this engine had stored."
    return {RECOVERED_LOAD_BYTES: OffloadingCounterMetadata(documentation=text)}


def nodes_of_world() -> int:
    """Return on how many nodes the ranks of this engine are, as far as this rank knows."""
    config = get_current_vllm_config_or_none()
    return int(getattr(config.parallel_config, "nnodes_within_dp", 1)) if config else 1


def captures_graphs() -> bool:
    """Tell whether warm-up is to capture CUDA graphs, as far as this rank knows."""
    config = get_current_vllm_config_or_none()
    return config is None or not config.model_config.enforce_eager


def free_memory() -> FreeMemory | None:
    """Return how much memory of this rank's GPU is free; None where there is none to ask."""
    if not torch.cuda.is_available():
        return None
    return FreeMemory(*torch.cuda.mem_get_info())


def shares_process() -> bool:
    """Tell whether this rank lives in the scheduler's process, as far as it knows.

    vllm/config/parallel.py: `uni` is what a world of one rank gets unless it asks for another one.
    """
    config = get_current_vllm_config_or_none()
    return config is None or config.parallel_config.distributed_executor_backend in (None, "uni")


def config_info_of(spec: Any) -> Sequence[Any]:
    """Return what vLLM's own manager shows of its CPU tier's size, one mapping a series (0.33)."""
    info = getattr(spec, "cpu_info", None)
    return [info.as_config_info() if info is not None else {}]


def keys_from(key: bytes, req_context: Any) -> list[bytes]:
    """Return a key and those of the same group of layers that follow in its request.

    vLLM notes a request's keys in its context before it looks them up, each group's in order, and
    gives a manager the position of a key but no list: that is read from where it is kept. Without
    it there is only the key itself, and all that follow are looked up one by one.
    """
    noted = list(getattr(req_context, "_offload_key_positions", ()))
    group = group_of(key)
    following = noted[noted.index(key) :] if key in noted else [key]
    return [one for one in following if one.endswith(group)]


def in_order(keys: Collection[bytes], req_context: Any) -> list[bytes]:
    """Return a request's keys from its beginning to its end, all groups of layers together.

    As they are given where vLLM has not noted the position of each.
    """
    positions = getattr(req_context, "_offload_key_positions", {})
    if all(key in positions for key in keys):
        return sorted(keys, key=positions.__getitem__)
    return list(keys)


def group_of(key: bytes) -> bytes:
    """Return the number of a key's group of layers, with which it ends (v1/kv_offload/base.py)."""
    return key[-4:]


def _set_inner(self: Any, inner: Any) -> None:
    self.inner = inner


# A property serves for methods as well: it returns the one of `inner`.
Forwarding: Any = type(OffloadingManager)(
    "Forwarding",
    (OffloadingManager,),
    {
        "__init__": _set_inner,
        **{
            name: property(attrgetter(f"inner.{name}"))
            for name in vars(OffloadingManager)
            if not name.startswith("_")
        },
    },
)
"""A manager that forwards this release's whole interface to `inner`."""
