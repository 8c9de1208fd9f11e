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

from collections.abc import Sequence
from dataclasses import replace

from hostprep.errors import BadInputError
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import AUTO, DS_MLA, DeclaredTypes, TypeChoice
from hostprep.sizing.engines.rules import (
    Default,
    Device,
    EngineDefaults,
    EngineGroup,
    EngineHost,
    EngineSizing,
    EngineTier,
)
from hostprep.sizing.engines.vllm_groups import (
    KERNEL_TOKENS,
    V4_TOKENS,
    Group,
    Layer,
    Spec,
    grouped,
    layers_of,
)
from hostprep.sizing.engines.vllm_host import host_tiers
from hostprep.sizing.families import declared_types
from hostprep.sizing.groups import Limits, check_stages
from hostprep.sizing.model import Kind, Model
from hostprep.sizing.size import Memory
from hostprep.units import format_bytes

NAME = "vllm"
VERSION = "0.32.0"
_GIB = 1 << 30
_BLACKWELL = 10
_CHECKPOINTED = frozenset({"mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"})
"""Families whose states are Mamba 2's: a prompt's last one is kept too (mamba_mixer2.py)."""
_STATES_ALONE = frozenset({"mamba", "mamba2", "falcon_mamba"})
_PLAIN_TYPES = frozenset({AUTO, "bfloat16", "bf16", "float16", "fp16", "half"})
_LATENT_TYPES = _PLAIN_TYPES | {"fp8", "fp8_e4m3", DS_MLA}
"""Those that backends of latents take, nvfp4_ds_mla aside, which is not reckoned here."""
_KV_TYPES = _PLAIN_TYPES | {
    "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4",
}  # fmt: skip
"""Of `--kv-cache-dtype` those that are reckoned here (config/cache.py, CacheDType)."""
_STATE_TYPES = frozenset({AUTO, "float32", "float16", "bfloat16"})
"""Of `--mamba-ssm-cache-dtype` (config/cache.py, MambaDType)."""
SPARSE_TOKENS = 64
_HOPPER = 9
_NATIVE_FP8 = 89
"""The least compute capability, ten times, whose kernels read FP8 (v1/attention/backends)."""
_MODELOPT = frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4"})
"""ModelOpt's ways to quantize that vLLM knows from hf_quant_config.json."""


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
        Raises BadInputError for a type that vLLM does not have, or not on such a GPU, and where a
        checkpoint's quantization of its KV cache is not what vLLM makes of it.
        """
        declared = declared_types(config, reads_kv=choice.kv == AUTO)
        _check_choice(declared, choice, device)
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
        taken = step
        if limits is not None:
            step = min(step, batch * limits.max_seq_len)
            taken = min(step, limits.max_num_tokens)
        return EngineDefaults(
            max_batch_size=Default(min(batch, taken), f"max_num_seqs, {where}"),
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
        layers, notes = layers_of(model, limits)
        groups = grouped(layers)
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
        host: tuple[EngineHost, ...] = ()
        described = tuple(_described(group, model, limits, block_bytes) for group in groups)
        if model.family not in _STATES_ALONE:  # those cache no prefixes: nothing is offloaded
            host = host_tiers(
                described,
                block_bytes=stages,
                is_replicated=_is_replicated(model, limits),
                limits=limits,
                memory=memory,
            )
        return EngineSizing(
            engine=NAME,
            version=VERSION,
            model=model,
            limits=limits,
            groups=described,
            block_bytes=block_bytes,
            least_bytes=least_bytes,
            gpu=gpu,
            host=host,
            notes=(
                *_of_types(model),
                *_of_device(device),
                *notes,
                *_of_no_host(model, stages),
                *_waste(groups, layers, block_bytes, limits),
            ),
        )


def _check_choice(declared: DeclaredTypes, choice: TypeChoice, device: Device) -> None:
    """Refuse types that vLLM does not have for such a model. Raises BadInputError."""
    keeps_latents = declared.is_latent or declared.is_compressed
    what = "latents in" if keeps_latents else "keys and values in"
    if choice.kv not in (_LATENT_TYPES if keeps_latents else _KV_TYPES):
        raise BadInputError(
            f"--kv-dtype: vLLM {VERSION} does not keep {what} {choice.kv}",
            remedy="choose auto, bfloat16 or fp8",
        )
    if choice.kv == "nvfp4" and device.capability // 10 != _BLACKWELL:
        raise BadInputError(
            f"--kv-dtype: vLLM {VERSION} has kernels for {choice.kv} on Blackwell (B200), not on "
            f"{device.name}",
            remedy="choose auto, bfloat16 or fp8, or give --gpu b200",
        )
    if choice.index not in (AUTO, "fp8_block128"):
        raise BadInputError(
            "--index-dtype: vLLM keeps index keys in FP8 with a scale for 128 elements",
            remedy="leave it out",
        )
    if choice.state not in _STATE_TYPES:
        raise BadInputError(
            f"--state-dtype: vLLM {VERSION} does not keep states in {choice.state}",
            remedy="choose auto, float32, float16 or bfloat16",
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
        return V4_TOKENS, "which DeepSeek-V4's kernels take"
    if Kind.INDEX in kinds:
        return SPARSE_TOKENS, "which the kernels of sparse attention take"
    if Kind.LATENT in kinds and device.capability // 10 == _BLACKWELL:
        return 32, "which FlashInfer's kernel for latents takes"
    if Kind.LATENT in kinds and model.types.kv.bits <= 8:
        return 64, "which FlashMLA's kernel for 8-bit latents takes"
    return KERNEL_TOKENS, "vLLM's own"


def _check(model: Model, limits: Limits, device: Device) -> None:
    """Refuse what is not covered. Raises BadInputError."""
    _check_limits(model, limits)
    kinds = {store.kind for store in model.stores}
    if not kinds:
        raise BadInputError(f"{model.name}: no layer has a cache", remedy="give another model")
    if Kind.INDEX in kinds and not kinds & {Kind.LATENT, Kind.COMPRESSED}:
        raise _uncovered(model, "index keys beside keys and values")
    _check_blocks(model, kinds, limits, device)
    if model.family.startswith(("qwen2", "qwen3")) and {Kind.WINDOW, Kind.FULL} <= kinds:
        raise BadInputError(
            f"{model.name}: use_sliding_window and max_window_layers give some layers a window and "
            f"others none, and vLLM {VERSION} does not start with that",
            remedy="leave --engine out, or use_sliding_window off",
        )
    _check_kernels(model, kinds, device)


def _check_limits(model: Model, limits: Limits) -> None:
    """Refuse limits with which vLLM does not start. Raises BadInputError."""
    if limits.beam_width > 1:
        raise BadInputError(
            f"--beam-width: is {limits.beam_width}, and vLLM runs each beam as a request",
            remedy="leave it out, and multiply --max-batch-size by it",
        )
    if limits.max_num_tokens < limits.max_batch_size:
        raise BadInputError(
            f"--max-num-tokens: is {limits.max_num_tokens} for {limits.max_batch_size} requests at "
            "once, each of which needs a token of a step: vLLM does not start with that",
            remedy=f"give a --max-batch-size of {limits.max_num_tokens} at most, or more tokens",
        )
    check_stages(model, limits)


def _check_blocks(model: Model, kinds: set[Kind], limits: Limits, device: Device) -> None:
    """Refuse blocks that there are no kernels for. Raises BadInputError."""
    if Kind.COMPRESSED in kinds:
        if not model.types.ds_mla:
            raise _uncovered(model, f"compressed latents in {model.types.kv.name}")
        if limits.tokens_per_block != V4_TOKENS:
            raise BadInputError(
                f"--tokens-per-block: is {limits.tokens_per_block}, and vLLM's kernels for "
                f"{model.family} take {V4_TOKENS}",
                remedy="leave it out",
            )
    elif model.types.ds_mla and device.capability // 10 == _BLACKWELL:
        raise _uncovered(model, "8-bit latents of sparse attention on Blackwell")
    elif Kind.INDEX in kinds and limits.tokens_per_block != SPARSE_TOKENS:
        raise BadInputError(
            f"--tokens-per-block: is {limits.tokens_per_block}, and vLLM's kernels of sparse "
            f"attention take {SPARSE_TOKENS}",
            remedy="leave it out",
        )
    elif kinds - {Kind.STATE} and limits.tokens_per_block % KERNEL_TOKENS:
        raise BadInputError(
            f"--tokens-per-block: is {limits.tokens_per_block}, and vLLM's kernels take multiples "
            f"of {KERNEL_TOKENS}",
            remedy="give such a number, or leave it out",
        )


def _check_kernels(model: Model, kinds: set[Kind], device: Device) -> None:
    """Refuse caches that such a GPU has no kernels for, where the GPU is known."""
    if not device.capability:
        return
    if Kind.INDEX in kinds and device.capability // 10 not in (_HOPPER, _BLACKWELL):
        raise BadInputError(
            f"--gpu: vLLM {VERSION} has no kernels of sparse attention on {device.name} that are "
            "covered here",
            remedy="give a Hopper or Blackwell GPU, such as h200",
        )
    kv = DS_MLA if model.types.ds_mla else model.types.kv.name
    keeps = kinds - {Kind.STATE}
    if keeps and kv.startswith("fp8") and device.capability < _NATIVE_FP8:
        raise BadInputError(
            f"--gpu: vLLM {VERSION} has no kernels for keys and values in {kv} on {device.name}",
            remedy="give --kv-dtype bfloat16 here and to vLLM (--kv-cache-dtype), or a newer GPU",
        )


def _uncovered(model: Model, what: str) -> BadInputError:
    return BadInputError(
        f"{model.name}: how vLLM lays out {what} is not known here",
        reason="UnknownEngineRule",
        remedy="leave --engine out: groups and floors hold for every engine",
    )


def tokens_in_flight(limits: Limits) -> int:
    """Return the tokens that are scheduled and not yet settled, of all steps at once.

    Each pipeline stage has a step, and with asynchronous scheduling, which is the default, there
    is one more (config/vllm.py, max_in_flight_tokens). What leaves a window is freed after them.
    """
    return (limits.pipeline_parallel + 1) * limits.max_num_tokens


def _blocks_of_request(spec: Spec, model: Model, limits: Limits) -> int:
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


def _described(group: Group, model: Model, limits: Limits, block_bytes: int) -> EngineGroup:
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


def _of_device(device: Device) -> tuple[str, ...]:
    """Say where the numbers were not compared with vLLM's own."""
    if device.capability // 10 == _HOPPER:
        return ()
    note = (
        f"these numbers were compared with vLLM's own for Hopper; what {device.name} does "
        "otherwise (its kernels choose the tokens of a block) is read from the source alone"
    )
    return (note,)


def _of_no_host(model: Model, stages: Sequence[int]) -> tuple[str, ...]:
    """Say why there is no host tier, where there is none."""
    if model.family in _STATES_ALONE:
        note = (
            "host memory is not for this model: vLLM caches no prefixes of models of states alone "
            "unless it is told to (--enable-prefix-caching), and then offloads nothing"
        )
        return (note,)
    if len(set(stages)) == 1:
        return ()
    note = (
        "host memory is not for these ranks: the pipeline's stages of different sizes do not agree "
        "on where a host block lies; a --pp that divides the layers evenly would do"
    )
    return (note,)


def _waste(
    groups: Sequence[Group], layers: Sequence[Layer], block_bytes: int, limits: Limits
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
            f"in layers that keep a window vLLM reserves {held} tokens for the longest request: "
            f"{tokens_in_flight(limits)} of {limits.pipeline_parallel + 1} steps can be unsettled; "
            "a smaller --max-num-tokens (max_num_batched_tokens) lets more requests in"
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
