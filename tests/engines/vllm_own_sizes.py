"""What vLLM itself makes of models' configurations, on GPUs that are not there.

In the engines' interpreter, without any of our code. vLLM's model classes are built on torch's
meta device, with its CUDA platform told that it has H200s; each layer is asked for its cache, and
vLLM's own functions group layers, count blocks and say what would be logged. No weights, no
kernels, no tokens.

Standard input: a line of JSON a case: `name`, `folder` with a config.json, `tp`, `pp`, `max_len`,
`max_tokens`, `gpu_bytes` a rank, `speculative`. Standard output: a line of JSON for each case.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import json
import logging
import os
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import torch.overrides
import vllm.platforms

_GPU_BYTES = 141 << 30


class Anything:
    """A name out of vLLM's CUDA build: it can be led on from and called, and says no."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> bool:
        return False

    def __or__(self, _: object) -> Any:
        return object

    __ror__ = __or__


class Absent(types.ModuleType):
    """A module that is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


def have_operators() -> None:
    """Let every operator of vLLM's be named. First vLLM registers what it has."""
    namespace: Any = type(torch.ops._C)
    found = namespace.__getattr__
    are_all = False

    def operator(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            is_ours = are_all and self.name.startswith("_") and not name.startswith("__")
            if is_ours or "support" in name:
                return Anything()
            raise

    namespace.__getattr__ = operator
    importlib.import_module("vllm._custom_ops")
    are_all = True


class AbsentModules:
    """Finds them, and whatever is below them."""

    NAMES: tuple[str, ...] = (
        "vllm._C_stable_libtorch",
        "vllm._moe_C_stable_libtorch",
        "vllm._qutlass_C",
        "vllm._flashmla_C",
        "vllm._flashmla_extension_C",
        "vllm.third_party.flashmla",
        "vllm.vllm_flash_attn",
        "vllm.model_executor.layers.minimax_rms_norm.lamport_workspace",
    )

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if not any(name == one or name.startswith(f"{one}.") for one in self.NAMES):
            return None
        finder: Any = self
        return importlib.machinery.ModuleSpec(name, finder, is_package=True)

    def create_module(self, spec: Any) -> Absent:
        return Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__.startswith("vllm.vllm_flash_attn"):
            # What vLLM's wheel has for an H200: FlashAttention 2 and 3.
            module.is_fa_version_supported = lambda version, *_: version in (2, 3)


def have_gpus() -> None:
    """Make vLLM's platform that of H200s."""
    sys.meta_path.insert(0, AbsentModules())
    imports: Any = importlib.import_module("vllm.utils.import_utils")
    imports.has_deep_gemm = lambda: True  # part of vLLM's CUDA build
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return _GPU_BYTES

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return "GPU-0"

        @classmethod
        def device_count(cls) -> int:
            return 64

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def log_warnings(cls) -> None:
            pass

    vllm.platforms.current_platform = Hopper()
    torch.cuda.Stream = torch.cuda.Event = types.SimpleNamespace
    torch.cuda.current_device = lambda: 0
    have_operators()
    from vllm.model_executor.models import registry
    from vllm.triton_utils import triton

    # After transformers has looked for it: image processors name what is in it.
    AbsentModules.NAMES += ("torchvision",)

    def tuning(kwargs: Any = None, **options: Any) -> Any:
        return types.SimpleNamespace(**{"kwargs": kwargs or {}, "num_stages": 1, **options})

    triton.Config = tuning

    def inspect(self: Any) -> Any:
        """Look at the class here, and not in another process, where there are no GPUs."""
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect


class Group:
    """Ranks that are not there: this one is the first of them, of a pipeline any."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.world_size = size
        self.rank_in_group = self.local_rank = rank
        self.ranks = list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.first_rank, self.last_rank = 0, size - 1
        self.device_group = self.cpu_group = self
        self.device = torch.device("meta")
        self.unique_name = "group"
        self.use_device_communicator = False
        self.device_communicator = None

    def size(self) -> int:
        return self.world_size

    def rank(self) -> int:
        return self.rank_in_group


def have_ranks(tp: int, pp: int, stage: int) -> None:
    from vllm.distributed import parallel_state as state

    for name in ("_WORLD", "_INNER_DP_WORLD", "_DP", "_EP", "_PCP", "_DCP", "_EPLB", "_NODE_COUNT"):
        if hasattr(state, name):
            setattr(state, name, Group(1))
    state._NODE_COUNT = 1
    state._TP = Group(tp)
    state._PP = Group(pp, stage)
    state._EP = Group(tp)


class NoDevice(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Tensors that are asked for on a GPU are made on the meta device."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")) or type(kwargs.get("device")) is int:
            kwargs["device"] = "meta"
        return function(*("meta" if _is_gpu(one) else one for one in args), **kwargs)


def _is_gpu(value: object) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


@contextlib.contextmanager
def on_meta(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), NoDevice():
            yield
    finally:
        torch.set_default_dtype(before)


def specs_of(config: Any, stage: int, case: dict[str, Any]) -> dict[str, Any]:
    """Build one rank of one stage and return what its layers say."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    have_ranks(case["tp"], case["pp"], stage)
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), on_meta(config.model_config.dtype):
        initialize_model(config)
        spec = config.speculative_config
        if spec is not None:
            initialize_model(config, model_config=spec.draft_model_config, prefix="draft")
    vllm.platforms.current_platform.update_block_size_for_backend(config)
    specs: dict[str, Any] = get_kv_cache_spec(config)
    return specs


def layout_of(config: Any, specs: dict[str, Any]) -> None:
    from vllm.config.vllm import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )

    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    backends = {layer.get_attn_backend() for layer in layers.values()}
    names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    resolve_kv_cache_layout(config, [names], specs.values())


def configuration(case: dict[str, Any]) -> Any:
    import vllm.config.vllm as settings
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    settings.HAS_TRITON = True  # which CUDA builds have: by it the model runner is chosen
    options: dict[str, Any] = dict(case.get("options") or {})
    if case.get("speculative"):
        options["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": case["speculative"],
        }
    return EngineArgs(
        model=case["folder"],
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        trust_remote_code=False,
        max_model_len=case["max_len"],
        max_num_batched_tokens=case["max_tokens"],
        tensor_parallel_size=case["tp"],
        pipeline_parallel_size=case["pp"],
        distributed_executor_backend="mp" if case["tp"] * case["pp"] > 1 else "uni",
        **options,
    ).create_engine_config(UsageContext.OPENAI_API_SERVER)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.core import kv_cache_utils as utils
    from vllm.v1.kv_cache_interface import iter_layer_specs

    config = configuration(case)
    stages = [specs_of(config, stage, case) for stage in range(case["pp"])]
    merged = {name: spec for stage in stages for name, spec in stage.items()}
    layout_of(config, merged)
    memory = [case["gpu_bytes"]] * case["pp"]
    configs = utils.get_kv_cache_configs(config, [dict(stage) for stage in stages], memory)
    scheduler = utils.generate_scheduler_kv_cache_config(configs)
    tokens, concurrency = utils.get_kv_cache_capacity(config, scheduler)
    groups = utils.get_kv_cache_groups(config, dict(merged))
    length = config.model_config.max_model_len
    return {
        "layout": config.cache_config.kv_cache_layout,
        "dtype": config.cache_config.cache_dtype,
        "state_mode": config.cache_config.mamba_cache_mode,
        "in_flight": config.max_in_flight_tokens,
        "block": config.cache_config.block_size,
        "blocks": scheduler.num_blocks,
        "block_bytes": max(c.kv_cache_tensors[0].size // c.num_blocks for c in configs),
        "tokens": tokens,
        "concurrency": concurrency,
        "line": f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {length:,} "
        f"tokens per request: {concurrency:.2f}x",
        "groups": [
            {
                "kind": type(next(iter(iter_layer_specs(group.kv_cache_spec)))).__name__,
                "layers": len(group.layer_names),
                "tokens": group.kv_cache_spec.block_size,
                "page": max(s.page_size_bytes for s in iter_layer_specs(group.kv_cache_spec)),
                "blocks": -(
                    -group.kv_cache_spec.max_memory_usage_bytes(config)
                    // group.kv_cache_spec.page_size_bytes
                ),
                "stored": stored(config, groups, group, length),
            }
            for group in groups
        ],
    }


def stored(config: Any, groups: Any, group: Any, tokens: int) -> int:
    """Return the blocks of a group that a prompt of so many tokens leaves in host memory.

    By the mask with which vLLM's OffloadingConnector chooses them (offloading/scheduler.py,
    SchedulerOffloadConfig.from_spec and _reachable_store_block_mask). Of a group of states it
    stores the one at the prompt's last boundary, which the scheduler hands to it.
    """
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    def spec_of(one: Any) -> Any:
        return next(iter(iter_layer_specs(one.kv_cache_spec)))

    spec = spec_of(group)
    if isinstance(spec, MambaSpec):
        return 1
    all_sizes = {spec_of(one).block_size for one in groups}
    windowed = (SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
    whole = {spec_of(one).block_size for one in groups if not isinstance(spec_of(one), windowed)}
    aligned = whole.pop() if len(whole) == 1 else None if whole else max(all_sizes)
    blocks = tokens // spec.block_size
    mask = KVCacheSpecRegistry.get_manager_class(spec).reachable_block_mask(
        start_block=0,
        end_block=blocks,
        alignment_tokens=aligned,
        kv_cache_spec=spec,
        use_eagle=False,
        retention_interval=config.cache_config.prefix_cache_retention_interval,
        reachable_boundaries=(tokens - 1,),
    )
    return blocks if mask is None else sum(mask)


def main() -> None:
    have_gpus()
    for line in sys.stdin:
        case = json.loads(line)
        try:
            found = {"name": case["name"], **answer(case)}
        except Exception as error:  # whatever vLLM raises: said, case by case
            traceback.print_exception(error)
            found = {"name": case["name"], "error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
