"""What SGLang makes of a model and memory: the pools of its ranks, and HiCache's host pools.

Read from the source of release 0.5.23, below `python/sglang/srt`; each function names its file.
What is left of GPU memory for caches is given: SGLang measures it after the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hostprep.errors import BadInputError
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import AUTO, DS_MLA, TypeChoice
from hostprep.sizing.engines.rules import (
    Default,
    Device,
    EngineDefaults,
    EngineGroup,
    EngineHost,
    EngineSizing,
    EngineTier,
    check_room,
    unknown_family,
)
from hostprep.sizing.groups import Limits, stages_of
from hostprep.sizing.model import Kind, Layers, Model, Store
from hostprep.sizing.quantization import declared_kv_dtype, declared_model_dtype, is_modelopt
from hostprep.sizing.size import Memory
from hostprep.units import format_bytes

_GIB = 1 << 30
_MIB = 1 << 20
_GB = 10**9
"""HiCache's gigabyte; those of the logs are of 2^30 bytes."""

_TWO_POOLS = (
    "gpt_oss", "llama4", "llama4_text", "mimo_v2_flash", "mimo_v2", "gemma4", "gemma4_text",
    "gemma4_unified_text",
)  # fmt: skip
"""Models whose windowed layers have a pool of their own (configs/model_config.py,
is_hybrid_swa_model). All others keep windows as if they were full: Gemma 2 and 3, Mistral,
EXAONE 4, OLMo, Cohere 2, Phi 3."""
_ONE_POOL = (
    "llama", "mistral", "ministral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe",
    "qwen3_vl_moe_text", "phi3", "starcoder2", "cohere", "cohere2", "glm4", "glm4_moe", "granite",
    "olmo2", "olmo3", "gemma", "gemma2", "gemma3", "gemma3_text", "exaone4", "minimax_m2",
)  # fmt: skip
_LATENT = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa",
    "glm4_moe_lite",
)  # fmt: skip
_STATES = (
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "falcon_h1",
    "granitemoehybrid", "nemotron_h", "kimi_linear",
)  # fmt: skip
_SERVED = (*_TWO_POOLS, *_ONE_POOL, *_LATENT, *_STATES)
_CHARGED_DRAFTS = ("deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa", "glm4_moe",
                   "glm4_moe_lite")  # fmt: skip
"""Models whose config has `num_nextn_predict_layers`, by which SGLang charges the draft's layers
(model_runner_components/spec_aux_hidden_state.py)."""

_MAY_SEE = (
    "gemma3", "gemma4", "gemma4_unified_text", "kimi_k25", "llama4", "llama4_text", "ministral3",
    "mistral", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text",
)  # fmt: skip
"""Families whose published models may have an encoder of images or sound beside the text's."""

_SWA_RATIO = 0.8
"""`--swa-full-tokens-ratio` (arg_groups/fields/schedule.py)."""
_STATE_RATIO = 0.9
"""`--mamba-full-memory-ratio`, likewise: of states to keys and values."""
_SLOTS_PER_REQUEST = 5
"""State slots that a request needs: 3, and 2 to track prefixes with the radix cache's
`extra_buffer` strategy, which `auto` is for these models with overlapped scheduling
(mem_cache/kv_cache_configurator.py, _calculate_mamba_ratio; arg_groups/overrides.py)."""
_LEAST_RUNNING, _MOST_RUNNING = 2048, 4096
_BLACKWELL = 100
"""CUDA's compute capability of B200, B300 and their kin, ten times."""
_AFTER_BLACKWELL = 120
_KV_TYPES = ("bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "bf16", DS_MLA)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layered:
    """Layers of one rank that share a pool of tokens, and the bytes of a token in all of them."""

    layers: int = 0
    key_bytes: int = 0
    value_bytes: int = 0
    index_bytes: int = 0
    """Index keys: a buffer beside, as long as the pool."""

    @property
    def token_bytes(self) -> int:
        return self.key_bytes + self.value_bytes + self.index_bytes

    def with_store(self, store: Store, ranks: int, latent_bytes: int | None) -> _Layered:
        """Return them with what one more layer keeps."""
        if store.kind is Kind.INDEX:
            return replace(self, index_bytes=self.index_bytes + store.rank_bytes(ranks))
        more = replace(self, layers=self.layers + 1)
        if store.kind is Kind.LATENT:
            key = store.rank_bytes(ranks) if latent_bytes is None else latent_bytes
            return replace(more, key_bytes=self.key_bytes + key)
        key, value = (part.rank_bytes(ranks) for part in store.parts)
        return replace(more, key_bytes=self.key_bytes + key, value_bytes=self.value_bytes + value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """What one pipeline stage keeps on each of its ranks."""

    full: _Layered
    swa: _Layered
    drafts: _Layered
    window: int | None
    state_layers: int
    conv_bytes: int
    """Of one request's states in all layers: the convolutions' part."""
    temporal_bytes: int

    @property
    def state_bytes(self) -> int:
        return self.conv_bytes + self.temporal_bytes

    @property
    def cell_bytes(self) -> float:
        """GPU memory of one token of `max_total_num_tokens`, that of the windows' pool included.

        model_executor/pool_configurator.py: DefaultPoolConfigurator, and for models with windows
        HybridSWAPoolConfigurator.
        """
        draft = self.drafts.token_bytes
        if not self.swa.layers:
            return self.full.token_bytes + draft
        if not self.full.layers:
            return self.swa.token_bytes
        return self.full.token_bytes + _SWA_RATIO * self.swa.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pools:
    """Sizes of the pools of a rank."""

    tokens: int
    """`max_total_num_tokens`: of the pool of layers that keep everything."""
    swa_tokens: int = 0
    state_slots: int = 0
    """`max_mamba_cache_size`."""
    requests: int = 0
    """`max_running_requests`."""


class SGLangRules:
    """The rules of SGLang. See hostprep.sizing.engines.rules.EngineRules."""

    name = "sglang"
    version = "0.5.23"

    def types(self, config: ModelConfig, choice: TypeChoice, device: Device) -> TypeChoice:
        """Return the choice with `auto` as SGLang resolves it.

        With sparse attention (DeepSeek-V3.2, GLM-5) `auto` is bfloat16 up to Hopper, and FP8 from
        Blackwell on (arg_groups/overrides.py, _dsa_kv_cache_dtype_default). Otherwise it is what
        ModelOpt's quantization says, if that is FP8, and else the model's type: what
        compressed-tensors says of the cache is not looked at (mem_cache/kv_cache_dtype.py).
        """
        if choice.kv != AUTO and choice.kv not in _KV_TYPES:
            raise BadInputError(
                f"--kv-dtype: SGLang {self.version} keeps {choice.kv} in ways that are not "
                "reckoned here, or not at all",
                remedy="choose auto, bfloat16 or fp8",
            )
        if choice.index not in (AUTO, "fp8_block128"):
            raise BadInputError(
                "--index-dtype: SGLang keeps index keys in FP8 with a scale for 128 elements",
                remedy="leave it out",
            )
        if choice.kv != AUTO:
            return choice
        if config.has("index_head_dim") and config.has("kv_lora_rank"):
            return replace(choice, kv=DS_MLA if device.capability >= _BLACKWELL else "bfloat16")
        declared = declared_kv_dtype(config)
        if declared is not None and (declared.name != "fp8" or not is_modelopt(config)):
            plain = declared_model_dtype(config).name
            return replace(choice, kv="bfloat16" if plain == "float32" else plain)
        return choice

    def defaults(self, model: Model, limits: Limits | None, device: Device) -> EngineDefaults:
        """Return SGLang's own limits (arg_groups/memory_hook.py, handle_gpu_memory_settings)."""
        tensor_parallel = 1 if limits is None else limits.tensor_parallel
        pipeline_parallel = 1 if limits is None else limits.pipeline_parallel
        chunk, graph_batch = _capacity_defaults(device, tensor_parallel)
        page, page_why = _page(model, device)
        fraction = mem_fraction_static(
            device,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            is_latent=_is_latent(model),
            chunked_prefill_size=None if limits is None else limits.max_num_tokens,
            max_running_requests=None if limits is None else limits.max_batch_size,
        )
        return EngineDefaults(
            max_batch_size=Default(
                graph_batch,
                "the largest batch that SGLang captures decoding graphs for on this GPU; its own "
                f"limit (max_running_requests) is {_LEAST_RUNNING} or more, as memory allows",
            ),
            max_num_tokens=Default(chunk, "SGLang's chunked_prefill_size on this GPU"),
            tokens_per_block=Default(page, page_why),
            gpu_memory_utilization=fraction,
            utilization_why="SGLang's mem_fraction_static for text models: it sets aside "
            "activations and graphs by the chunk's and the batch's size, and nothing besides",
        )

    def size(self, model: Model, limits: Limits, memory: Memory, device: Device) -> EngineSizing:
        """Return SGLang's pools. Raises BadInputError for models whose rules are not here."""
        _check(model, limits)
        stages = tuple(_stages(model, limits, device))
        page = limits.tokens_per_block
        fullest = max(stages, key=lambda stage: stage.cell_bytes)
        least = _least_bytes(stages, limits)
        check_room("SGLang", limits, memory, least)
        pools = None
        if memory.gpu_bytes is not None:
            pools = _pools_of_bytes(stages, limits, memory.gpu_bytes)
        return EngineSizing(
            engine=self.name,
            version=self.version,
            model=model,
            limits=limits,
            groups=_groups(model, fullest, limits),
            block_bytes=0 if fullest.swa.layers or fullest.state_layers
            else page * (fullest.full.token_bytes + fullest.drafts.token_bytes),
            least_bytes=least,
            gpu=None if pools is None else _tier(fullest, pools, limits, memory),
            host=_host(stages, pools, limits, memory),
            notes=_notes(model, stages),
        )  # fmt: skip


def mem_fraction_static(
    device: Device,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    is_latent: bool,
    chunked_prefill_size: int | None = None,
    max_running_requests: int | None = None,
) -> float:
    """Return `--mem-fraction-static` where none is given, for a text model.

    arg_groups/memory_hook.py, handle_gpu_memory_settings and reserve_for_graph_mb: 0.5 GiB, 1.5
    MiB for each token of a chunk, 128 MiB for each rank, the graphs of decoding and prompts, and
    at least 10 GiB on GPUs with more than 60. Models that also see or hear have less.
    """
    chunk, graph_batch = _capacity_defaults(device, tensor_parallel)
    graph_batch = min(graph_batch, max_running_requests or graph_batch)
    tokens = max(chunked_prefill_size or chunk, 2048)
    total_mib = device.memory_bytes / _MIB
    reserved_mib = 512 + tokens * 1.5 + tensor_parallel * pipeline_parallel / 8 * 1024
    reserved_mib += graph_batch * 2
    if pipeline_parallel == 1:
        # Graphs of prompts are off by default with pipeline parallelism.
        reserved_mib += (
            1.5 * 1024 if is_latent else 8 * _prefill_graphs(chunked_prefill_size or chunk)
        )
    if total_mib > 60 * 1024:
        reserved_mib = max(reserved_mib, 10 * 1024)
    return round((total_mib - reserved_mib) / total_mib, 3)


def _prefill_graphs(most: int) -> int:
    """Return how many sizes of prompts have graphs (arg_groups/cuda_graph_hook.py)."""
    sizes = (
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
        *range(1280, 4097, 256), *range(4608, most + 1, 512),
    )  # fmt: skip
    return sum(size <= most for size in sizes)


def _capacity_defaults(device: Device, tensor_parallel: int) -> tuple[int, int]:
    """Return the tokens of a prompt's chunk, and the largest batch of a decoding graph."""
    gib = device.memory_bytes / _GIB
    wide = tensor_parallel >= 4
    if gib < 20:
        return 2048, 8
    if gib < 35:
        return 4096, 160 if wide else 48
    if gib < 60:
        return 4096, 160 if wide else 32
    if gib < 160:
        return 8192, 512 if wide else 256
    return 16384, 512


def _page(model: Model, device: Device) -> tuple[int, str]:
    """Return a page's tokens: 1, but for attention that needs more.

    arg_groups/overrides.py: _page_size_default, _mla_backend_page_constraints;
    model_overrides/deepseek_v2.py: 64 with sparse attention.
    """
    if any(store.kind is Kind.INDEX for store in model.stores):
        return 64, "SGLang's page with sparse attention"
    if _BLACKWELL <= device.capability < _AFTER_BLACKWELL and model.family not in _STATES:
        return 64, "SGLang's page with TensorRT-LLM's attention, its default on this GPU"
    return 1, "SGLang's page is one token"


def _is_latent(model: Model) -> bool:
    return any(store.kind is Kind.LATENT for store in model.stores)


def _check(model: Model, limits: Limits) -> None:
    """Raise BadInputError for what is not reckoned here."""
    if model.family not in _SERVED:
        raise unknown_family(f"SGLang {SGLangRules.version}", model)
    shared = any(not layer for layer in model.layers)
    if shared and model.family != "nemotron_h":
        raise BadInputError(
            f"{model.name}: some layers use others' keys and values (num_kv_shared_layers), for "
            "which SGLang has memory of its own nevertheless; how much is not known here",
            remedy="leave --engine out",
        )
    if limits.beam_width > 1:
        raise BadInputError(
            f"--beam-width: is {limits.beam_width}, and SGLang has no beams here",
            remedy="leave it out",
        )
    if limits.speculative_tokens and (
        model.family not in _CHARGED_DRAFTS
        or not model.draft_layers
        or limits.pipeline_parallel > 1
    ):
        raise BadInputError(
            f"--speculative-tokens: what SGLang {SGLangRules.version} sets aside for drafts of "
            f"{model.family} is not known here (or not with --pp)",
            remedy="leave it out, and give --gpu-memory without the draft's part",
        )
    kinds = {store.kind for store in model.stores}
    if Kind.STATE in kinds and model.types.model.bits != 16:
        raise BadInputError(
            f"{model.name}: SGLang keeps convolutions in bfloat16, and the model has "
            f"{model.types.model.name}",
            remedy="leave --engine out",
        )
    for store in model.stores:
        if store.kind in (Kind.COMPRESSED, Kind.COMPRESSOR):
            raise BadInputError(
                f"{model.name}: SGLang's pools of {store.kind.value}s are not known here",
                remedy="leave --engine out",
            )


def _stages(model: Model, limits: Limits, device: Device) -> Iterable[_Stage]:
    """Return what each pipeline stage keeps.

    The last stages have one layer more where it does not come out even (distributed/utils.py,
    get_pp_indices).
    """
    drafts = model.draft_layers if limits.speculative_tokens else ()
    for layers in stages_of(model, limits, last_have_more=True):
        yield _stage(model, layers, drafts, limits, device)


def _stage(
    model: Model, layers: Layers, draft_layers: Layers, limits: Limits, device: Device
) -> _Stage:
    ranks = limits.tensor_parallel
    full = swa = _Layered()
    states, conv_bytes, temporal_bytes = 0, 0, 0
    window = None
    for store in (store for layer in layers for store in layer):
        if store.kind is Kind.STATE:
            *conv, temporal = store.parts
            states += 1
            conv_bytes += sum(part.rank_bytes(ranks) for part in conv)
            temporal_bytes += temporal.rank_bytes(ranks)
        elif store.window is not None and model.family in _TWO_POOLS:
            window = store.window
            swa = swa.with_store(store, ranks, None)
        else:
            full = full.with_store(store, ranks, _latent_bytes(model, store, device))
    drafts = _Layered()
    for store in (store for layer in draft_layers for store in layer):
        drafts = drafts.with_store(store, ranks, _latent_bytes(model, store, device))
    return _Stage(
        full=full,
        swa=swa,
        drafts=drafts,
        window=window,
        state_layers=states,
        conv_bytes=conv_bytes,
        temporal_bytes=temporal_bytes,
    )


def _latent_bytes(model: Model, store: Store, device: Device) -> int | None:
    """Return a latent's bytes where SGLang has them otherwise than the model's types say.

    With sparse attention in FP8 the kernels of TensorRT-LLM, Blackwell's default, keep neither
    scales nor 16-bit positions (mem_cache/kv_cache_configurator.py, calculate_mla_kv_cache_dim).
    """
    if store.kind is Kind.LATENT and model.types.ds_mla and device.capability >= _BLACKWELL:
        return sum(part.heads * part.elements for part in store.parts)
    return None


def _pools_of_bytes(stages: tuple[_Stage, ...], limits: Limits, size_bytes: int) -> _Pools:
    """Return the pools that so much memory becomes.

    mem_cache/kv_cache_configurator.py: _handle_max_mamba_cache, config_from_budget,
    resolve_max_num_reqs. All stages get what the one with the least has.
    """
    page = limits.tokens_per_block
    rest_gib = size_bytes / _GIB
    slots = 0
    state_bytes = max(stage.state_bytes for stage in stages)
    if state_bytes:
        budget_bytes = rest_gib * _STATE_RATIO / (1 + _STATE_RATIO) * _GIB
        slots = int((budget_bytes - state_bytes) // state_bytes)
        rest_gib -= (slots + 1) * state_bytes / _GIB
    available = int(rest_gib * _GIB)
    tokens = min(
        int(available // stage.cell_bytes) for stage in stages if stage.cell_bytes
    ) // page * page  # fmt: skip
    if slots < 0 or tokens < 0:
        return _Pools(tokens=0)
    swa_tokens = 0
    if any(stage.swa.layers for stage in stages):
        all_windows = not any(stage.full.layers for stage in stages)
        swa_tokens = tokens if all_windows else int(tokens * _SWA_RATIO) // page * page
    most = int(tokens / limits.max_seq_len * 512)
    running = min(max(min(most, _MOST_RUNNING), _LEAST_RUNNING), tokens // 2)
    if slots:
        running = min(running, slots // _SLOTS_PER_REQUEST)
    return _Pools(tokens=tokens, swa_tokens=swa_tokens, state_slots=slots, requests=running)


def _least_bytes(stages: tuple[_Stage, ...], limits: Limits) -> int:
    """Return the memory with which one request of the longest kind fits."""
    page = limits.tokens_per_block
    window = next((stage.window for stage in stages if stage.window is not None), None)

    def fits(mib: int) -> bool:
        pools = _pools_of_bytes(stages, limits, mib * _MIB)
        if pools.tokens < limits.max_seq_len or pools.requests < 1:
            return False
        # pool_configurator.py, validate_swa_pool_size: else no request is ever admitted.
        return window is None or pools.swa_tokens > window + page

    return _smallest(fits, 1 << 32) * _MIB


def _smallest(holds: Callable[[int], bool], most: int) -> int:
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _groups(model: Model, stage: _Stage, limits: Limits) -> tuple[EngineGroup, ...]:
    """Return the pools as groups of layers: those of the fullest stage."""
    page = limits.tokens_per_block
    longest = -(-(limits.max_seq_len + limits.speculative_tokens) // page)
    found = []
    everything = _Layered(
        layers=stage.full.layers + stage.drafts.layers,
        key_bytes=stage.full.key_bytes + stage.drafts.key_bytes,
        value_bytes=stage.full.value_bytes + stage.drafts.value_bytes,
        index_bytes=stage.full.index_bytes + stage.drafts.index_bytes,
    )
    pools = (("full", everything, None), ("window", stage.swa, stage.window))
    for name, layered, window in pools:
        if not layered.layers:
            continue
        blocks = longest if window is None else min(longest, -(-(window + page) // page))
        found.append(
            EngineGroup(
                name=name,
                layers=_layers_in(model, window) if window or stage.swa.layers else layered.layers,
                padded_layers=layered.layers,
                tokens_per_block=page,
                page_bytes=-(-layered.token_bytes * page // layered.layers),
                blocks_per_request=blocks,
                window=window,
            )
        )
    if stage.state_layers:
        found.append(
            EngineGroup(
                name="state",
                layers=sum(s.kind is Kind.STATE for layer in model.layers for s in layer),
                padded_layers=stage.state_layers,
                tokens_per_block=0,
                page_bytes=-(-stage.state_bytes // stage.state_layers),
                blocks_per_request=_SLOTS_PER_REQUEST,
            )
        )
    return tuple(found)


def _layers_in(model: Model, window: int | None) -> int:
    stores = (s for layer in model.layers for s in layer if s.kind is not Kind.STATE)
    return sum((s.window is None) == (window is None) for s in stores if s.kind is not Kind.INDEX)


def _tier(stage: _Stage, pools: _Pools, limits: Limits, memory: Memory) -> EngineTier:
    """Return the pools with what SGLang logs of them.

    Buffers have a page more than the tokens that are logged (mem_cache/memory_pool.py).
    """
    page = limits.tokens_per_block
    lines = []
    for layered, tokens in ((stage.full, pools.tokens), (stage.swa, pools.swa_tokens)):
        if layered.layers:
            lines.append(_kv_line(layered, tokens, page))
    if stage.swa.layers and stage.full.layers:
        lines.insert(0, f"full_layer_tokens={pools.tokens}, swa_layer_tokens={pools.swa_tokens}")
    if stage.drafts.layers:
        lines.append(_kv_line(stage.drafts, pools.tokens, page))
    if stage.state_layers:
        conv, temporal = (
            (pools.state_slots + 1) * size / _GIB
            for size in (stage.conv_bytes, stage.temporal_bytes)
        )
        lines.insert(
            0,
            f"max_mamba_cache_size: {pools.state_slots}, conv_state size: {conv:.2f}GB, "
            f"ssm_state size: {temporal:.2f}GB",
        )
    lines.append(f"max_total_num_tokens={pools.tokens}")
    concurrency = pools.tokens / limits.max_seq_len
    if stage.state_layers:
        concurrency = min(concurrency, pools.state_slots / _SLOTS_PER_REQUEST)
    one_pool = not stage.swa.layers and not stage.state_layers
    cell_bytes = stage.full.token_bytes + stage.drafts.token_bytes
    return EngineTier(
        blocks=pools.tokens // page,
        block_bytes=page * cell_bytes if one_pool else 0,
        tokens=pools.tokens,
        concurrency=concurrency,
        size_bytes=memory.gpu_bytes or 0,
        log_lines=tuple(lines),
    )


def _kv_line(layered: _Layered, tokens: int, page: int) -> str:
    slots = tokens + page
    if not layered.value_bytes:
        size = slots * layered.token_bytes / _GIB
        return f"#tokens: {tokens}, KV size: {size:.2f} GB"
    key, value = (slots * size / _GIB for size in (layered.key_bytes, layered.value_bytes))
    return f"#tokens: {tokens}, K size: {key:.2f} GB, V size: {value:.2f} GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostPools:
    """HiCache's pools of one rank for a size in gigabytes."""

    pages: int
    swa_pages: int
    state_slots: int
    kv_bytes: int
    """Without index keys, as it is logged."""
    swa_bytes: int
    state_bytes: int
    index_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.kv_bytes + self.swa_bytes + self.state_bytes + self.index_bytes


def _host(
    stages: tuple[_Stage, ...], pools: _Pools | None, limits: Limits, memory: Memory
) -> tuple[EngineHost, ...]:
    """Return what HiCache keeps in so much host memory for each rank.

    `--hicache-size` is whole gigabytes of keys and values for each rank: index keys, and a page
    more in each pool, come on top of it. So it is the largest with which all of it fits.
    """
    if memory.host_bytes is None and memory.host_tokens is None:
        return ()
    several = any(stage.swa.layers or stage.state_layers for stage in stages)
    if several and pools is None:
        raise BadInputError(
            "--host-memory: SGLang divides it between its pools as the GPU's are divided",
            remedy="give --gpu or --gpu-memory as well",
        )
    page = limits.tokens_per_block
    ranks = limits.tensor_parallel * limits.pipeline_parallel

    def pools_of(gigabytes: int) -> tuple[_HostPools, ...]:
        return _host_pools(stages, pools, page, gigabytes)

    def largest(gigabytes: int) -> int:
        return max(found.size_bytes for found in pools_of(gigabytes))

    if memory.host_bytes is not None:
        most = memory.host_bytes // _GB
        given = memory.host_bytes
        gigabytes = _smallest(lambda size: largest(size) > given, most + 1) - 1
        if gigabytes < 1:
            raise BadInputError(
                f"--host-memory: {format_bytes(given)} a rank is less than HiCache's least, "
                f"{format_bytes(largest(1))}, as --hicache-size is whole gigabytes",
                remedy=f"give --host-memory {-(-largest(1) // _MIB)}Mi",
            )
    else:
        wanted = memory.host_tokens or 0
        gigabytes = _smallest(lambda size: pools_of(size)[0].pages * page >= wanted, 1 << 40)
        given = largest(gigabytes)
    found = pools_of(gigabytes)
    index = max(range(len(stages)), key=lambda stage: found[stage].size_bytes)
    kept, stage = found[index], stages[index]
    lines = [f"give --hicache-size {gigabytes}; SGLang logs for each rank: " + ", ".join(
        _host_lines(kept, stage, page))]  # fmt: skip
    if stage.swa.layers:
        lines.append("windowed layers have a host pool of their own, divided as on the GPU")
    kv_bytes = sum(
        (s.full.token_bytes + s.drafts.token_bytes) * page * limits.tensor_parallel for s in stages
    )
    return (
        EngineHost(
            way="sglang",
            blocks=kept.pages,
            block_bytes=kv_bytes,
            copies=ranks,
            size_bytes=given * ranks,
            blocks_per_request=-(-limits.typical // page),
            notes=tuple(lines),
        ),
    )


def _host_lines(kept: _HostPools, stage: _Stage, page: int) -> Iterable[str]:
    pools = ((stage.full, kept.pages, kept.kv_bytes), (stage.swa, kept.swa_pages, kept.swa_bytes))
    for layered, pages, size_bytes in pools:
        if layered.layers:
            yield (
                f"'hierarchical KV host pool: {pages * page} tokens, {size_bytes / _GB:.2f} GB "
                "host memory'"
            )
    if stage.state_layers:
        yield (
            f"'Allocating {kept.state_bytes / _GB:.2f} GB host memory for hierarchical Mamba cache "
            f"({kept.state_slots} state slots'"
        )


def _host_pools(
    stages: tuple[_Stage, ...], pools: _Pools | None, page: int, gigabytes: int
) -> tuple[_HostPools, ...]:
    """Return each stage's host pools.

    mem_cache/hybrid_cache/hybrid_pool_assembler.py, _split_hicache_size: by the sizes of the GPU's
    pools; mem_cache/pool_host/base.py: whole pages and one more; mamba.py: one slot more. All
    stages have the tokens of the one with the fewest.
    """
    shares = [_shares(stage, pools, page, gigabytes) for stage in stages]

    def fewest(part: int, sizes: Callable[[_Stage], int]) -> int:
        counts = [
            int(share[part] * 1e9 // sizes(stage))
            for stage, share in zip(stages, shares, strict=True)
            if sizes(stage)
        ]
        return min(counts, default=0)

    def kv(stage: _Stage) -> int:
        layered = (stage.full, stage.drafts)
        return sum(one.key_bytes + one.value_bytes for one in layered)

    pages = fewest(0, kv) // page + 1
    swa_pages = fewest(1, lambda stage: stage.swa.token_bytes) // page + 1
    slots = fewest(2, lambda stage: stage.state_bytes) + 1
    return tuple(
        _HostPools(
            pages=pages,
            swa_pages=swa_pages,
            state_slots=slots,
            kv_bytes=pages * page * kv(stage),
            swa_bytes=swa_pages * page * stage.swa.token_bytes,
            state_bytes=slots * stage.state_bytes,
            index_bytes=pages * page * (stage.full.index_bytes + stage.drafts.index_bytes),
        )
        for stage in stages
    )


def _shares(
    stage: _Stage, pools: _Pools | None, page: int, gigabytes: int
) -> tuple[float, float, float]:
    """Return the gigabytes of a stage's keys and values, its windows', and its states'."""
    if pools is None or not (stage.swa.layers or stage.state_layers):
        return (gigabytes, 0, 0)
    sizes = (
        (pools.tokens + page) * stage.full.token_bytes,
        (pools.swa_tokens + page) * stage.swa.token_bytes,
        (pools.state_slots + 1) * stage.state_bytes,
    )
    full, swa, state = (gigabytes * size / sum(sizes) for size in sizes)
    return full, swa, state


def _notes(model: Model, stages: tuple[_Stage, ...]) -> tuple[str, ...]:
    """Say what is peculiar to SGLang."""
    notes = []
    windows = {store.window for store in model.stores if store.window is not None}
    if windows and model.family not in _TWO_POOLS:
        notes.append("SGLang keeps all tokens of this model's windowed layers")
    elif windows:
        notes.append(
            "SGLang gives windowed layers a pool of their own, with "
            f"{_SWA_RATIO} x the tokens of the others' (--swa-full-tokens-ratio)"
        )
    if any(stage.state_layers for stage in stages):
        notes.append(
            f"SGLang divides memory between states and the rest by {_STATE_RATIO} to 1 "
            f"(--mamba-full-memory-ratio), and a request needs {_SLOTS_PER_REQUEST} state slots"
        )
    if model.family in _MAY_SEE:
        notes.append(
            "where this model also sees or hears, SGLang's own mem_fraction_static is lower than "
            "for text (by the encoder's size, 5 % and more): give --gpu-memory-utilization as it "
            "logs it"
        )
    return tuple(notes)
