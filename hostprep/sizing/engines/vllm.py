"""What vLLM does with a model's caches: layers to groups, groups to one shared pool of blocks.

Read from vLLM 0.32.0: v1/core/kv_cache_utils.py (grouping, blocks, the line that is logged),
v1/kv_cache_interface.py (pages, and what a request reserves), platforms/interface.py (block sizes,
alignment of states), config/vllm.py (tokens in flight), engine/arg_utils.py (limits), and where a
model brings pages of its own its file. Tests of tier engines ask vLLM's own functions.

A block of the pool is as large as the largest group's layers together; whichever group takes a
block takes all of it. So groups have no memory of their own, and a group with fewer layers than
another wastes the rest of its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from hostprep.api.slot_layout import round_up
from hostprep.errors import BadInputError
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import AUTO, DeclaredTypes, TypeChoice
from hostprep.sizing.engines.rules import (
    Default,
    Device,
    EngineDefaults,
    EngineGroup,
    EngineSizing,
    EngineTier,
)
from hostprep.sizing.engines.vllm_host import host_tiers
from hostprep.sizing.families import declared_types
from hostprep.sizing.groups import Limits
from hostprep.sizing.model import Kind, Model, Store
from hostprep.sizing.size import Memory
from hostprep.units import format_bytes

NAME = "vllm"
VERSION = "0.32.0"

_GIB = 1 << 30
_BLACKWELL = 10
_KERNEL_TOKENS = 16
"""Blocks of FlashAttention, FlashInfer and Triton are multiples of it (v1/attention/backends)."""
_HYBRID_LATENT_TOKENS = 128
"""Blocks of latents beside states are multiples of it (platforms/interface.py)."""
_MANY_MORE_LAYERS = 1.5
"""Groups have as many layers as the largest kind, unless that has at least so many times the
layers of the smallest kind: then as many as the smallest (_get_kv_cache_groups_uniform_page_size).
"""
_CHECKPOINTED = frozenset({"mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"})
"""Families whose states are Mamba 2's: a prompt's last one is kept too (mamba_mixer2.py)."""
_STATES_ALONE = frozenset({"mamba", "mamba2", "falcon_mamba"})
_MODELOPT = frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4"})
"""ModelOpt's ways to quantize that vLLM knows from hf_quant_config.json."""
_KEEPS_ALL = frozenset({Kind.FULL, Kind.LATENT, Kind.INDEX, Kind.COMPRESSED})
_LATENTS = frozenset({Kind.LATENT, Kind.INDEX, Kind.COMPRESSED, Kind.COMPRESSOR})

_V4_TOKENS = 256
"""A block of DeepSeek-V4's compressed entries and index keys (mla/indexer.py)."""
_V4_WINDOW_TOKENS = 64
_V4_STATE_TOKENS = {4: 4, 128: 8}
"""By the tokens that become one entry: of a block of the compressor's sums (compressor.py)."""
_V4_ALIGN_BYTES = 576
"""Of each page, as FlashMLA reads them (models/deepseek_v4/attention.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """What vLLM notes of one layer's cache: layers with equal ones can share a group."""

    kind: Kind
    shape: Hashable
    """Heads, elements and types on a rank: layers of another shape are another kind to vLLM."""
    page_bytes: int
    """Of one layer and block, padding included."""
    tokens: int
    """Of a block; 0 for a state."""
    window: int | None = None
    """Tokens that are kept; with chunks, those of one."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's cache. `stage`: of the pipeline."""

    stage: int
    spec: _Spec


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers whose blocks are taken together."""

    layers: tuple[_Layer, ...]

    @property
    def first(self) -> _Spec:
        """What one of its layers has: blocks and requests are the same for all of them."""
        return self.layers[0].spec

    def stage_bytes(self, stage: int) -> int:
        """Return the bytes of a block of it in one pipeline stage."""
        return sum(layer.spec.page_bytes for layer in self.layers if layer.stage == stage)


class VllmRules:
    """The rules of vLLM; they have no state."""

    name = NAME
    version = VERSION

    def types(self, config: ModelConfig, choice: TypeChoice, device: Device) -> TypeChoice:
        """Return the choice with what vLLM makes of `auto` where that is its own way.

        Latents of sparse attention stay in the model's type unless the checkpoint or the choice
        says FP8 (0.32.0 chooses the kernel by it; older releases took fp8_ds_mla), GLM-5's on
        Blackwell aside.
        Recurrent states have the model's type, unless the config of a Nemotron-H or Qwen3.5 says
        another; Nemotron-H's are float32 where it does not, and those of Kimi's delta attention
        always (model_executor/models/config.py, MambaStateDtypeCalculator).
        Raises BadInputError where a checkpoint's quantization of its KV cache is not what vLLM
        makes of it.
        """
        declared = declared_types(config, reads_kv=choice.kv == AUTO)
        model = declared.model.name if declared.model.name != "float32" else "bfloat16"
        made = choice
        keeps_latents = declared.is_latent and declared.has_index and not declared.is_compressed
        if choice.kv == AUTO and declared.kv is not None:
            _check_declared(config, declared, model, device)
        elif choice.kv == AUTO and keeps_latents:
            is_fp8 = declared.family == "glm_moe_dsa" and device.capability // 10 == _BLACKWELL
            made = replace(made, kv="fp8" if is_fp8 else model)
        if choice.state == AUTO:
            state = model
            if declared.family.startswith("nemotron_h"):
                state = declared.state.name if declared.state else "float32"
            elif declared.family.startswith("kimi"):
                state = "float32"
            elif declared.family.startswith("qwen3_5") and declared.state:
                state = declared.state.name
            made = replace(made, state=state)
        return made

    def defaults(self, model: Model, limits: Limits | None, device: Device) -> EngineDefaults:
        """Return what `vllm serve` takes on such a GPU where it is told nothing."""
        is_large = device.memory_bytes >= 70 * _GIB and "a100" not in device.name.lower()
        is_largest = device.memory_bytes >= 160 * _GIB
        where = f"what vLLM takes on a GPU like {device.name}"
        block, why = _block_tokens(model, device)
        batch = 1024 if is_large else 256
        step = 16384 if is_largest else 8192 if is_large else 2048
        if limits is not None:
            step = min(step, batch * limits.max_seq_len)
        return EngineDefaults(
            max_batch_size=Default(min(batch, step), f"max_num_seqs, {where}"),
            max_num_tokens=Default(step, f"max_num_batched_tokens, {where}"),
            tokens_per_block=Default(block, f"block_size, {why}"),
            gpu_memory_utilization=0.92,
            utilization_why="gpu_memory_utilization, vLLM's own",
        )

    def size(self, model: Model, limits: Limits, memory: Memory, device: Device) -> EngineSizing:
        """Return the groups, the blocks of the pool, and the line that vLLM logs of them.

        Raises BadInputError, naming the option or the kind of layer, for what vLLM refuses or
        these rules do not cover.
        """
        _check(model, limits, device)
        layers, notes = _layers(model, limits)
        groups = _grouped(layers)
        stages = [
            max(group.stage_bytes(stage) for group in groups)
            for stage in range(limits.pipeline_parallel)
        ]
        requested = sum(_blocks_of_request(group.first, model, limits) for group in groups)
        block_bytes = max(stages)
        least_bytes = block_bytes * (requested + 1)  # one is never handed out: the null block
        gpu = None
        if memory.gpu_bytes is not None:
            if memory.gpu_bytes < least_bytes:
                raise _too_little(memory.gpu_bytes, least_bytes, limits)
            gpu = _tier(memory.gpu_bytes, block_bytes, requested, limits)
        described = tuple(_described(group, model, limits, block_bytes) for group in groups)
        return EngineSizing(
            engine=NAME,
            version=VERSION,
            model=model,
            limits=limits,
            groups=described,
            block_bytes=block_bytes,
            least_bytes=least_bytes,
            gpu=gpu,
            host=host_tiers(
                described,
                block_bytes=stages,
                is_replicated=_is_replicated(model, limits),
                limits=limits,
                memory=memory,
            ),
            notes=(*_of_types(model), *notes, *_waste(groups, layers, block_bytes, limits)),
        )


def _check_declared(
    config: ModelConfig, declared: DeclaredTypes, model: str, device: Device
) -> None:
    """Refuse a KV cache's quantization that vLLM does not follow. Raises BadInputError.

    It follows those of compressed-tensors, and of ModelOpt where the quantization names ModelOpt
    (utils/torch_utils.py, resolve_kv_cache_dtype_string; model_arch_config_convertor.py). Of what
    ModelOpt says Hopper's sparse attention has no kernel, though it has one for `fp8`.
    """
    kv = declared.kv.name if declared.kv else AUTO
    if not _is_followed(config):
        raise BadInputError(
            f"{config.source}: the checkpoint says that its KV cache is {kv}, in a way that vLLM "
            f"{VERSION} does not look at: it keeps {model}",
            remedy=f"give --kv-dtype {model}, or {kv} to both (vLLM's --kv-cache-dtype)",
        )
    if declared.has_index and declared.is_latent and device.capability // 10 != _BLACKWELL:
        raise BadInputError(
            f"{config.source}: the checkpoint says that its KV cache is {kv}, for which vLLM "
            f"{VERSION} has no kernel of sparse attention on {device.name} unless it is told so",
            remedy=f"give --kv-dtype {kv}, and vLLM --kv-cache-dtype {kv}, or {model} to both",
        )


def _is_followed(config: ModelConfig) -> bool:
    held = config.value("quantization_config")
    if held is None:
        held = config.value("hf_quant_config")
    if not isinstance(held, dict):
        return False
    producer, inner = held.get("producer"), held.get("quantization")
    name = producer.get("name") if isinstance(producer, dict) else None
    algorithm = inner.get("quant_algo") if isinstance(inner, dict) else None
    by_name = name == "modelopt" and str(algorithm).upper() in _MODELOPT
    return by_name or str(held.get("quant_method")).startswith(("modelopt", "compressed"))


def _block_tokens(model: Model, device: Device) -> tuple[int, str]:
    """Return the tokens of a block before states are aligned, and why.

    By the attention backend that the platform prefers (platforms/cuda.py): Hopper's FlashAttention
    takes multiples of 16, FlashMLA (8-bit latents) and all that is sparse 64; Blackwell's
    FlashInfer for latents 32.
    """
    kinds = {store.kind for store in model.stores}
    if Kind.COMPRESSED in kinds:
        return _V4_TOKENS, "which DeepSeek-V4's kernels take"
    if Kind.INDEX in kinds:
        return 64, "which the kernels of sparse attention take"
    if Kind.LATENT in kinds and device.capability // 10 == _BLACKWELL:
        return 32, "which FlashInfer's kernel for latents takes"
    if Kind.LATENT in kinds and model.types.kv.bits <= 8:
        return 64, "which FlashMLA's kernel for 8-bit latents takes"
    return _KERNEL_TOKENS, "vLLM's own"


def _check(model: Model, limits: Limits, device: Device) -> None:
    """Refuse what is not covered. Raises BadInputError."""
    if limits.beam_width > 1:
        raise BadInputError(
            f"--beam-width: is {limits.beam_width}, and vLLM runs each beam as a request",
            remedy="leave it out, and multiply --max-batch-size by it",
        )
    if limits.pipeline_parallel > len(model.layers):
        raise BadInputError(
            f"--pp: is {limits.pipeline_parallel} for {len(model.layers)} layers",
            remedy="give at most one stage a layer",
        )
    kinds = {store.kind for store in model.stores}
    if not kinds:
        raise BadInputError(f"{model.name}: no layer has a cache", remedy="give another model")
    if Kind.INDEX in kinds and not kinds & {Kind.LATENT, Kind.COMPRESSED}:
        raise _uncovered(model, "index keys beside keys and values")
    if Kind.COMPRESSED in kinds:
        if not model.types.ds_mla:
            raise _uncovered(model, f"compressed latents in {model.types.kv.name}")
        if limits.tokens_per_block != _V4_TOKENS:
            raise BadInputError(
                f"--tokens-per-block: is {limits.tokens_per_block}, and vLLM's kernels for "
                f"{model.family} take {_V4_TOKENS}",
                remedy="leave it out",
            )
    elif model.types.ds_mla and device.capability // 10 == _BLACKWELL:
        raise _uncovered(model, "8-bit latents of sparse attention on Blackwell")


def _uncovered(model: Model, what: str) -> BadInputError:
    return BadInputError(
        f"{model.name}: how vLLM lays out {what} is not known here",
        reason="UnknownEngineRule",
        remedy="leave --engine out: groups and floors hold for every engine",
    )


def _stage_of_layers(count: int, stages: int) -> list[int]:
    """Return each layer's stage: the last has none of what is left over (distributed/utils.py)."""
    sizes = [count // stages] * stages
    for number in range(count % stages):
        sizes[-2 - number] += 1
    return [stage for stage, size in enumerate(sizes) for _ in range(size)]


def _layers(model: Model, limits: Limits) -> tuple[list[_Layer], list[str]]:
    """Return every layer's cache with its block size, and what is to be said of it."""
    stages = _stage_of_layers(len(model.layers), limits.pipeline_parallel)
    stores = [
        (stage, store) for stage, layer in zip(stages, model.layers, strict=True) for store in layer
    ]
    last = limits.pipeline_parallel - 1
    stores += [(last, store) for layer in model.draft_layers for store in layer]
    if any(store.kind is Kind.COMPRESSED for _, store in stores):
        found = [(stage, spec) for stage, one in stores for spec in _v4_specs(one, limits)]
        return [_Layer(stage, spec) for stage, spec in found], []
    block, page_bytes = _aligned([store for _, store in stores], limits)
    notes = []
    if block != limits.tokens_per_block:
        notes.append(
            f"vLLM makes blocks of {block} tokens, and not of {limits.tokens_per_block}, so that "
            "one is as large as a state"
        )
    specs = [(stage, _spec(store, block, page_bytes, limits)) for stage, store in stores]
    if limits.speculative_tokens and any(spec.kind is Kind.CHUNK for _, spec in specs):
        notes.append("with drafts vLLM keeps chunked layers as if they were full")
        specs = [
            (stage, replace(spec, kind=Kind.FULL, window=None) if spec.kind is Kind.CHUNK else spec)
            for stage, spec in specs
        ]
    return [_Layer(stage, spec) for stage, spec in specs], notes


def _spec(store: Store, block: int, state_page_bytes: int, limits: Limits) -> _Spec:
    entry = store.rank_bytes(limits.tensor_parallel)
    return _Spec(
        kind=store.kind,
        shape=_shape(store, limits),
        page_bytes=max(entry, state_page_bytes) if store.per_sequence else entry * block,
        tokens=0 if store.per_sequence else block,
        window=store.window,
    )


def _shape(store: Store, limits: Limits) -> Hashable:
    ranks = limits.tensor_parallel
    return tuple((part.heads_on_rank(ranks), part.elements, part.dtype) for part in store.parts)


def _aligned(stores: Sequence[Store], limits: Limits) -> tuple[int, int]:
    """Return the tokens of a block, and what a state's page is padded to; 0 for no padding.

    Where states and attention share a pool, a block has as many tokens as make it no smaller than
    a state (platforms/interface.py, _align_hybrid_block_size).
    """
    ranks, given = limits.tensor_parallel, limits.tokens_per_block
    state = max((s.rank_bytes(ranks) for s in stores if s.per_sequence), default=0)
    token = max((s.rank_bytes(ranks) for s in stores if not s.per_sequence), default=0)
    if not state or not token:
        return given, 0
    step = max(_KERNEL_TOKENS, given)
    if any(store.kind is Kind.LATENT for store in stores):
        step = max(step, _HYBRID_LATENT_TOKENS)
    block = max(given, step * -(-state // (step * token)))
    return block, block * token


def _v4_specs(store: Store, limits: Limits) -> Iterable[_Spec]:
    """Return DeepSeek-V4's pages: each kind has blocks of its own tokens, padded for FlashMLA."""
    ranks = limits.tensor_parallel
    if store.kind is Kind.COMPRESSOR:
        for part in store.parts:
            ratio = next((r for r in _V4_STATE_TOKENS if part.heads in (r, 2 * r)), None)
            if ratio is None:
                raise BadInputError(
                    f"compressor states of {part.heads} tokens are not known here",
                    reason="UnknownEngineRule",
                    remedy="leave --engine out: groups and floors hold for every engine",
                )
            tokens = _V4_STATE_TOKENS[ratio]
            page = tokens * part.dtype.size_bytes(part.elements)
            yield _v4_spec(store.kind, part.elements, page, tokens, part.heads)
        return
    tokens = _V4_TOKENS if store.window is None else _V4_WINDOW_TOKENS
    page = tokens // store.ratio * store.rank_bytes(ranks)
    yield _v4_spec(store.kind, _shape(store, limits), page, tokens, store.window)


def _v4_spec(kind: Kind, shape: Hashable, page: int, tokens: int, window: int | None) -> _Spec:
    aligned = round_up(page, _V4_ALIGN_BYTES)
    return _Spec(kind=kind, shape=shape, page_bytes=aligned, tokens=tokens, window=window)


def _grouped(layers: Sequence[_Layer]) -> list[_Group]:
    """Return the groups that vLLM makes (get_kv_cache_groups). Raises BadInputError."""
    specs = [layer.spec for layer in layers]
    if len(set(specs)) == 1 or _is_one_type(specs):
        return [_Group(tuple(layers))]
    if any(spec.kind is Kind.COMPRESSED for spec in specs):
        return _packed(layers)
    buckets: dict[_Spec, list[_Layer]] = {}
    for layer in _of_one_page(layers):
        buckets.setdefault(layer.spec, []).append(layer)
    counts = [len(bucket) for bucket in buckets.values()]
    size = max(counts) if max(counts) < min(counts) * _MANY_MORE_LAYERS else min(counts)
    return [
        group for bucket in buckets.values() for group in _dealt(bucket, -(-len(bucket) // size))
    ]


def _dealt(layers: Sequence[_Layer], number: int) -> list[_Group]:
    """Deal layers out to so many groups, so that each pipeline stage has some of each."""
    return [_Group(tuple(layers[index::number])) for index in range(number)]


def _is_one_type(specs: Sequence[_Spec]) -> bool:
    """Whether all layers need blocks for the same tokens, of any size (is_uniform_type)."""
    first = specs[0]
    if len({spec.tokens for spec in specs}) > 1:
        return False
    if all(spec.kind in _KEEPS_ALL for spec in specs):
        return True
    if any(spec.kind is not first.kind for spec in specs):
        return False
    if first.kind is Kind.STATE:
        return len({spec.page_bytes for spec in specs}) == 1
    return len({spec.window for spec in specs}) == 1


def _of_one_page(layers: Sequence[_Layer]) -> list[_Layer]:
    """Make pages equally large (unify_kv_cache_spec_page_size).

    A smaller page gets more tokens where that comes out even, else padding; a state padding.
    Raises BadInputError for latents, whose pages vLLM does not pad.
    """
    page = max(layer.spec.page_bytes for layer in layers)
    made = []
    for layer in layers:
        spec = layer.spec
        if spec.page_bytes != page and spec.tokens and page % spec.page_bytes == 0:
            spec = replace(spec, tokens=spec.tokens * (page // spec.page_bytes))
        elif spec.page_bytes != page and spec.kind in _LATENTS:
            raise BadInputError(
                f"latents of {spec.page_bytes} bytes a block do not go into pages of {page}, and "
                "how vLLM lays them out then is not known here",
                reason="UnknownEngineRule",
                remedy="leave --engine out: groups and floors hold for every engine",
            )
        made.append(_Layer(layer.stage, replace(spec, page_bytes=page)))
    return made


def _packed(layers: Sequence[_Layer]) -> list[_Group]:
    """Group pages of several sizes side by side in a block (_get_packed_kv_cache_groups).

    Layers of one type (`_is_one_type`) are a bucket. A bucket with as many layers of each of its
    page sizes repeats a pattern; such buckets are divided into groups of about as many repeats as
    the largest of those with several page sizes has. Others stay whole.
    """
    buckets: list[list[_Layer]] = []
    for layer in layers:
        for bucket in buckets:
            if _is_one_type([*(known.spec for known in bucket), layer.spec]):
                bucket.append(layer)
                break
        else:
            buckets.append([layer])
    pages = [Counter(layer.spec.page_bytes for layer in bucket) for bucket in buckets]
    balanced = [len(set(count.values())) == 1 for count in pages]
    least = [
        max(c.values()) for c, even in zip(pages, balanced, strict=True) if even and len(c) > 1
    ]
    if not least:
        return [_Group(tuple(bucket)) for bucket in buckets]
    repeats = _least_padding(
        [max(c.values()) for c, even in zip(pages, balanced, strict=True) if even], max(least)
    )
    groups = []
    for bucket, count, even in zip(buckets, pages, balanced, strict=True):
        number = -(-max(count.values()) // repeats) if even else 1
        by_page = [[la for la in bucket if la.spec.page_bytes == page] for page in count]
        for index in range(number):
            chosen = tuple(layer for same in by_page for layer in same[index::number])
            groups.append(_Group(chosen if number > 1 else tuple(bucket)))
    return groups


def _least_padding(counts: Sequence[int], least: int) -> int:
    """Return the size, from `least` on, whose multiples pad the counts least; the largest such."""
    return min(
        range(least, max(*counts, least) + 1),
        key=lambda size: (sum(-count % size for count in counts), -size),
    )


def tokens_in_flight(limits: Limits) -> int:
    """Return the tokens that are scheduled and not yet settled, of all steps at once.

    Each pipeline stage has a step, and with asynchronous scheduling, which is the default, there
    is one more (config/vllm.py, max_in_flight_tokens). What leaves a window is freed after them.
    """
    return (limits.pipeline_parallel + 1) * limits.max_num_tokens


def _blocks_of_request(spec: _Spec, model: Model, limits: Limits) -> int:
    """Return the blocks that vLLM reserves for a request of `max_seq_len`."""
    if spec.kind is Kind.STATE:
        return _states_of_request(model, limits)
    if spec.window is None:
        return -(-limits.max_seq_len // spec.tokens)
    before = spec.window - (spec.kind is not Kind.CHUNK)
    tokens = min(before + tokens_in_flight(limits), limits.max_seq_len)
    # A window may begin anywhere in a block, a chunk does not.
    return -(-tokens // spec.tokens) + (spec.kind is not Kind.CHUNK)


def _states_of_request(model: Model, limits: Limits) -> int:
    """Return the states of one request: one, and one for each draft.

    Where there is attention too, prefixes are cached and states aligned to blocks: one more, and
    with Mamba 2 another one of the prompt (MambaSpec.max_memory_usage_bytes). Models that have
    states alone by their class have no cached prefixes by default.
    """
    states = 1 + limits.speculative_tokens
    if model.family in _STATES_ALONE:
        return states
    return states + 1 + (model.family in _CHECKPOINTED)


def _tier(size_bytes: int, block_bytes: int, requested: int, limits: Limits) -> EngineTier:
    """Return the pool, and vLLM's line of it (get_kv_cache_capacity, update_kv_cache_capacity)."""
    blocks = size_bytes // block_bytes
    concurrency = blocks / requested
    tokens = int(concurrency * limits.max_seq_len)
    line = (
        f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for "
        f"{limits.max_seq_len:,} tokens per request: {concurrency:.2f}x"
    )
    return EngineTier(
        blocks=blocks,
        block_bytes=block_bytes,
        tokens=tokens,
        concurrency=concurrency,
        size_bytes=size_bytes,
        log_lines=(line,),
    )


def _described(group: _Group, model: Model, limits: Limits, block_bytes: int) -> EngineGroup:
    spec = group.first
    page = max(layer.spec.page_bytes for layer in group.layers)
    names = {Kind.STATE: "state", Kind.COMPRESSOR: "compressor", Kind.CHUNK: f"chunk-{spec.window}"}
    name = names.get(spec.kind, "full" if spec.window is None else f"window-{spec.window}")
    return EngineGroup(
        name=name,
        layers=len(group.layers),
        padded_layers=max(len(group.layers), block_bytes // page),
        tokens_per_block=spec.tokens,
        page_bytes=page,
        blocks_per_request=_blocks_of_request(spec, model, limits),
        window=spec.window,
        is_chunked=spec.kind is Kind.CHUNK,
    )


def _of_types(model: Model) -> tuple[str, ...]:
    """Say where this release keeps another type than older ones did."""
    if model.types.ds_mla or all(store.kind is not Kind.INDEX for store in model.stores):
        return ()
    note = (
        f"vLLM {VERSION} keeps these latents in {model.types.kv.name} unless it is told fp8; "
        "releases before it took fp8_ds_mla: give --kv-dtype fp8 for one of those"
    )
    return (note,)


def _waste(
    groups: Sequence[_Group], layers: Sequence[_Layer], block_bytes: int, limits: Limits
) -> tuple[str, ...]:
    """Say what the padding of groups costs, where it costs anything, and what a window charges."""
    notes = []
    if len(groups) > 1:
        notes.append(
            f"one pool of blocks serves {len(groups)} groups: whichever takes one takes "
            f"{format_bytes(block_bytes)} of it"
        )
    windows = [la.spec.window for la in layers if la.spec.window is not None]
    held = min(max(windows, default=0) + tokens_in_flight(limits), limits.max_seq_len)
    if windows and held > 2 * max(windows):
        notes.append(
            f"vLLM reserves {held} tokens a request in layers that keep a window: those of "
            f"{limits.pipeline_parallel + 1} steps of {limits.max_num_tokens} are not settled; a "
            "smaller --max-num-tokens (max_num_batched_tokens) lets more requests in"
        )
    return tuple(notes)


def _is_replicated(model: Model, limits: Limits) -> bool:
    """Whether every rank keeps the same, so that vLLM has it once in host memory.

    Latents alone, and no ranks but tensor-parallel ones (offloading/config.py, replicated_layout).
    """
    is_whole = all(not part.split for store in model.stores for part in store.parts)
    return is_whole and limits.tensor_parallel > 1 and limits.pipeline_parallel == 1


def _too_little(size_bytes: int, least_bytes: int, limits: Limits) -> BadInputError:
    return BadInputError(
        f"--gpu-memory: {format_bytes(size_bytes)} a rank is less than the "
        f"{format_bytes(least_bytes)} without which vLLM does not start with requests of "
        f"{limits.max_seq_len} tokens",
        remedy=f"give --gpu-memory {-(-least_bytes >> 20)}Mi, or a smaller --max-seq-len",
    )
