"""What TensorRT-LLM makes of a model and memory: the pools of its two KV cache managers.

Read from `tensorrt_llm/_torch/pyexecutor` and `tensorrt_llm/runtime/kv_cache_manager_v2` at commit
0004396720054fd8e205cbf616f21f0b57c6b412 (August 2026, between 1.3.0rc24 and 1.4.0rc1); each
function names its file. V1 gives all layers blocks of one pool, windowed ones too. V2 groups layers
by their windows, and gives each group slots of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hostprep.errors import BadInputError
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import AUTO, TypeChoice
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

_V2 = (
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "kimi_k2", "kimi_k25", "gpt_oss",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "minimax_m2", "gemma3", "gemma3_text",
)  # fmt: skip
"""Models that V2 is the default for (`use_kv_cache_manager_v2: auto`): pull requests 16060, 16942,
17396 and 18228."""
_V1 = (
    "llama", "mistral", "mixtral", "phi3", "starcoder2", "granite", "cohere2", "exaone4",
    "deepseek_v2", "gemma", "gemma2",
)  # fmt: skip
_WINDOWED_V2 = ("gpt_oss", "gemma3", "gemma3_text")
_KV_TYPES = (AUTO, "fp8", "fp8_e4m3")

_GPU_GRAIN = 2 * _MIB
_HOST_GRAIN = 2 * _MIB
"""`HostMem.ALIGNMENT`."""
_TYPICAL_HISTORY = 2048
"""Tokens of the one request that V2 divides memory by, where `avg_seq_len` is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGroup:
    """Layers whose blocks lie in the same pools: of one window, or of several with equal slots."""

    windows: tuple[int | None, ...]
    layers: int
    slot_bytes: tuple[int, ...]
    """Of one block of the layers of one window, in each of the group's pools."""

    def blocks_of(self, capacity: int, history: int, tokens_per_block: int) -> int:
        """Return the blocks of a request with so many tokens of room, and so many computed.

        runtime/kv_cache_manager_v2/_life_cycle_registry.py, AttnLifeCycle.get_stale_range, and
        _storage_manager.py, _compute_slots_for_batch.
        """
        blocks = -(-capacity // tokens_per_block)
        left = 0
        for window in self.windows:
            stale = 0 if window is None else max(0, (history + 1 - window) // tokens_per_block)
            left += max(0, blocks - stale)
        return left


def granularity(quota_bytes: int) -> int:
    """Return what V2's GPU pools are whole multiples of: 2 MiB, from 2 GiB on up to 32.

    _storage_manager.py, CacheLevelManager.cache_tier_granularity.
    """
    doublings = int(math.log2(quota_bytes / (_GPU_GRAIN * 512)))
    return _GPU_GRAIN << min(4, max(0, doublings))


def shares_of(
    groups: Sequence[PoolGroup],
    tokens_per_block: int,
    grain: int,
    *,
    history: int = _TYPICAL_HISTORY,
) -> tuple[int, ...]:
    """Return what V2 divides memory by: bytes of a request with `history` tokens and one more.

    _storage_manager.py, ratio_from_batch and _slots_to_bytes.
    """
    return tuple(
        sum(-(-blocks * size // grain) * grain for size in group.slot_bytes)
        for group in groups
        for blocks in (group.blocks_of(history + 1, history, tokens_per_block),)
    )


def floors_of(groups: Sequence[PoolGroup], tokens_per_block: int) -> tuple[int, ...]:
    """Return the slots that V2 gives each group at least: one request's window at its worst place.

    No more: of 64 requests the others wait (docs/sizing.md). Pull request 15588, in the storage
    manager's computeMinSlotsByLifeCycleFromConstraints.
    """
    windows = {
        window: 1 if window is None else (window + tokens_per_block - 2) // tokens_per_block + 1
        for group in groups
        for window in group.windows
    }
    if None in windows:
        windows[None] = max(windows.values())
    return tuple(sum(windows[window] for window in group.windows) for group in groups)


def slots_of_quota(
    groups: Sequence[PoolGroup],
    quota_bytes: int,
    shares: Sequence[int],
    floors: Sequence[int],
    grain: int,
    *,
    option: str = "--gpu-memory",
) -> tuple[int, ...]:
    """Return the slots that V2 gives each group, `floors` at least.

    Raises BadInputError where these do not fit: V2 takes more memory than it is given then.
    _storage/_core.py, ratio_to_slot_count_list.
    """
    grains = -(-quota_bytes // grain)
    least_grains = sum(
        _grains(floor, group.slot_bytes, grain) for floor, group in zip(floors, groups, strict=True)
    )
    if grains < least_grains:
        raise BadInputError(
            f"{option}: {format_bytes(quota_bytes)} is less than what TensorRT-LLM takes at "
            f"least, {format_bytes(least_grains * grain)}",
            remedy="give more",
        )
    slots = [0] * len(groups)
    active = list(range(len(groups)))
    left = grains
    while active:
        budget, taken = left, {}
        order = sorted(active, key=lambda index: shares[index])
        for position, index in enumerate(order):
            part = shares[index] / sum(shares[other] for other in order[position:])
            taken[index] = _slots_in(round(budget * part), groups[index].slot_bytes, grain)
            budget -= _grains(taken[index], groups[index].slot_bytes, grain)
        least = [index for index in active if taken[index] <= floors[index]]
        if not least:
            for index in active:
                slots[index] = taken[index]
            break
        for index in least:
            sizes = groups[index].slot_bytes
            slots[index] = _slots_in(_grains(floors[index], sizes, grain), sizes, grain)
            left -= _grains(slots[index], sizes, grain)
        active = [index for index in active if index not in least]
    return tuple(slots)


def _grains(slots: int, slot_bytes: Sequence[int], grain: int) -> int:
    return sum(-(-slots * size // grain) for size in slot_bytes)


def _slots_in(grains: int, slot_bytes: Sequence[int], grain: int) -> int:
    """Return the most slots whose pools have so many grains in all."""
    low, high = 0, grains * grain // max(slot_bytes) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = _grains(middle, slot_bytes, grain) <= grains
        low, high = (middle, high) if fits else (low, middle)
    return low


class TrtLlmRules:
    """The rules of TensorRT-LLM. See hostprep.sizing.engines.rules.EngineRules."""

    name = "trtllm"
    version = "1.3.0rc (0004396)"

    def types(
        self,
        config: ModelConfig,
        choice: TypeChoice,
        device: Device,  # noqa: ARG002 - the same on all GPUs
    ) -> TypeChoice:
        """Return the choice with `auto` as TensorRT-LLM resolves it.

        `auto` is what ModelOpt's quantization says, else the model's type: for sparse attention's
        latents too. What other quantizations say of the cache is refused: not known here.
        """
        if choice.kv not in _KV_TYPES:
            raise BadInputError(
                f"--kv-dtype: {choice.kv} is none of TensorRT-LLM's that are reckoned here",
                remedy="choose auto or fp8",
            )
        if choice.index not in (AUTO, "fp8_block128"):
            raise BadInputError(
                "--index-dtype: TensorRT-LLM keeps index keys in FP8 with a scale for 128 elements",
                remedy="leave it out",
            )
        if choice.kv != AUTO:
            return choice
        declared = declared_kv_dtype(config)
        if declared is not None:
            if declared.name != "fp8" or not is_modelopt(config):
                raise BadInputError(
                    f"{config.source}: the cache's type that its quantization declares is not one "
                    "that TensorRT-LLM is known here to take",
                    remedy="give --kv-dtype fp8, or leave --engine out",
                )
            return replace(choice, kv="fp8")
        plain = declared_model_dtype(config).name
        return replace(choice, kv="bfloat16" if plain == "float32" else plain)

    def defaults(
        self,
        model: Model,  # noqa: ARG002 - the same for all models
        limits: Limits | None,  # noqa: ARG002
        device: Device,  # noqa: ARG002
    ) -> EngineDefaults:
        """Return TensorRT-LLM's own limits (llmapi/llm_args.py)."""
        return EngineDefaults(
            max_batch_size=Default(2048, "TensorRT-LLM's max_batch_size"),
            max_num_tokens=Default(8192, "TensorRT-LLM's max_num_tokens"),
            tokens_per_block=Default(32, "TensorRT-LLM's kv_cache_config.tokens_per_block"),
            gpu_memory_utilization=0.9,
            utilization_why="TensorRT-LLM's kv_cache_config.free_gpu_memory_fraction: of what is "
            "free after a trial step with the weights loaded",
        )

    def size(
        self,
        model: Model,
        limits: Limits,
        memory: Memory,
        device: Device,  # noqa: ARG002 - the same on all GPUs
    ) -> EngineSizing:
        """Return its pools. Raises BadInputError for models whose rules are not here."""
        is_v2 = _check(model, limits)
        # The first stages have one layer more (mapping.py, Mapping.pp_layers).
        stages = [
            _groups_of(model, layers, limits, is_v2=is_v2) for layers in stages_of(model, limits)
        ]
        groups = max(stages, key=_block_bytes)
        least = _least_bytes(groups, limits, is_v2=is_v2)
        check_room("TensorRT-LLM", limits, memory, least)
        host = _host(groups, limits, memory, is_v2=is_v2)
        gpu = None if memory.gpu_bytes is None else _tier(groups, limits, memory, is_v2=is_v2)
        manager = "V2" if is_v2 else "V1"
        says = (
            f"TensorRT-LLM's KV cache manager {manager}, its default for {model.family} at that "
            "commit (kv_cache_config.use_kv_cache_manager_v2); another release may have another"
        )
        notes = [says]
        windows = any(store.window is not None for store in model.stores)
        if windows and not is_v2:
            notes.append("this manager keeps all tokens of windowed layers")
        if is_v2 and len(groups) > 1:
            notes.append(
                f"it divides memory between its pools as one request of {_TYPICAL_HISTORY} tokens "
                "does, which other lengths do not fill evenly: kv_cache_config.pool_ratio or "
                "avg_seq_len divide it otherwise, and later releases do by themselves"
            )
        return EngineSizing(
            engine=self.name,
            version=self.version,
            model=model,
            limits=limits,
            groups=_engine_groups(groups, stages, limits),
            block_bytes=_shared_block_bytes(groups),
            least_bytes=least,
            gpu=gpu,
            host=host,
            notes=tuple(notes),
        )


def _check(model: Model, limits: Limits) -> bool:
    """Return whether the model has manager V2. Raises BadInputError for what is not known here."""
    if model.family not in (*_V1, *_V2):
        raise unknown_family("TensorRT-LLM", model)
    kinds = {store.kind for store in model.stores}
    unknown = kinds - {Kind.FULL, Kind.WINDOW, Kind.LATENT, Kind.INDEX}
    if unknown or any(not layer for layer in model.layers):
        what = next(iter(sorted(unknown)), "layers that use others' keys").replace("_", " ")
        raise BadInputError(
            f"{model.name}: TensorRT-LLM's pools of {what} are not known here",
            remedy="leave --engine out",
        )
    if limits.speculative_tokens:
        raise BadInputError(
            "--speculative-tokens: how TensorRT-LLM divides memory between a model and its drafts "
            "is not known here",
            remedy="leave it out, and give --gpu-memory without the draft's part",
        )
    if limits.beam_width > 1 and model.family in _V2:
        raise BadInputError(
            f"--beam-width: is {limits.beam_width}, and KV cache manager V2 has no beams",
            remedy="leave it out",
        )
    return model.family in _V2


def _groups_of(
    model: Model, layers: Layers, limits: Limits, *, is_v2: bool
) -> tuple[PoolGroup, ...]:
    """Return a stage's pool groups.

    Buffers of one window and size lie side by side in one pool; windows whose pools have equal
    slots share them (_storage/_config.py, create_storage_config).
    """
    sizes: dict[int | None, dict[int, int]] = {}
    counts: dict[int | None, int] = {}
    for layer in layers:
        windows = {store.window for store in layer}
        window = next(iter(windows)) if is_v2 and model.family in _WINDOWED_V2 else None
        if window is not None and window >= limits.max_seq_len:
            window = None
        counts[window] = counts.get(window, 0) + 1
        for size in (size for store in layer for size in _buffers(model, store, limits)):
            found = sizes.setdefault(window, {})
            found[size] = found.get(size, 0) + size
    merged: dict[tuple[int, ...], PoolGroup] = {}
    for window, found in sizes.items():
        slot_bytes = tuple(sorted(found.values(), reverse=True))
        known = merged.get(slot_bytes, PoolGroup(windows=(), layers=0, slot_bytes=slot_bytes))
        merged[slot_bytes] = replace(
            known, windows=(*known.windows, window), layers=known.layers + counts[window]
        )
    return tuple(merged.values())


def _buffers(model: Model, store: Store, limits: Limits) -> list[int]:
    """Return the bytes of each of a layer's buffers in one block, on one rank."""
    tokens = limits.tokens_per_block
    if store.kind is Kind.LATENT:
        if model.types.ds_mla:  # plain FP8 here: neither scales nor positions in 16 bits
            return [tokens * sum(part.heads * part.elements for part in store.parts)]
        return [tokens * store.rank_bytes(limits.tensor_parallel)]
    return [tokens * part.rank_bytes(limits.tensor_parallel) for part in store.parts]


def _block_bytes(groups: Sequence[PoolGroup]) -> int:
    return sum(sum(group.slot_bytes) * len(group.windows) for group in groups)


def _shared_block_bytes(groups: Sequence[PoolGroup]) -> int:
    """Return the bytes of a block that all layers take theirs from; 0 where pools have their own.

    Windows that share a pool take a block each, for the same tokens.
    """
    return sum(groups[0].slot_bytes) if len(groups) == 1 else 0


def _longest(group: PoolGroup, limits: Limits) -> int:
    """Return the blocks of a request of `max_seq_len` that decodes its last token."""
    history = limits.max_seq_len - 1
    return group.blocks_of(limits.max_seq_len, history, limits.tokens_per_block)


def _slots(
    groups: Sequence[PoolGroup], limits: Limits, size_bytes: int, *, is_v2: bool
) -> tuple[int, ...]:
    if not is_v2:
        # resource_manager.py, calculate_max_num_blocks: whole tokens, then whole blocks.
        token_bytes = _block_bytes(groups) // limits.tokens_per_block
        return (size_bytes // token_bytes // limits.tokens_per_block,)
    grain = granularity(size_bytes)
    shares = shares_of(groups, limits.tokens_per_block, grain)
    floors = floors_of(groups, limits.tokens_per_block)
    return slots_of_quota(groups, size_bytes, shares, floors, grain)


def _least_bytes(groups: Sequence[PoolGroup], limits: Limits, *, is_v2: bool) -> int:
    """Return the memory with which one request of the longest kind fits."""

    def fits(mib: int) -> bool:
        try:
            slots = _slots(groups, limits, mib * _MIB, is_v2=is_v2)
        except BadInputError:
            return False
        return all(
            count >= _longest(group, limits) for count, group in zip(slots, groups, strict=True)
        )

    low, high = 0, 1 << 32
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * _MIB


def _tier(
    groups: Sequence[PoolGroup], limits: Limits, memory: Memory, *, is_v2: bool
) -> EngineTier:
    size_bytes = memory.gpu_bytes or 0
    tokens_per_block = limits.tokens_per_block
    slots = _slots(groups, limits, size_bytes, is_v2=is_v2)
    full = max(range(len(groups)), key=lambda index: None in groups[index].windows)
    blocks = slots[full]
    lines = [f"Estimated max memory in KV cache : {size_bytes / _GIB:.2f} GiB"]
    if not is_v2:
        tokens = blocks * tokens_per_block
        size = blocks * _block_bytes(groups) / _GIB
        lines += [
            f"tokens per block={tokens_per_block}, primary blocks={blocks}",
            f"Allocated {size:.2f} GiB for max tokens in paged KV cache ({tokens})",
        ]
    concurrency = min(
        count / _longest(group, limits) for count, group in zip(slots, groups, strict=True)
    )
    return EngineTier(
        blocks=blocks,
        block_bytes=_shared_block_bytes(groups),
        tokens=int(concurrency * limits.max_seq_len),
        concurrency=concurrency,
        size_bytes=size_bytes,
        log_lines=tuple(lines),
    )


def _host(
    groups: Sequence[PoolGroup], limits: Limits, memory: Memory, *, is_v2: bool
) -> tuple[EngineHost, ...]:
    """Return what `host_cache_size` of each rank holds.

    V1: blocks as on the GPU. V2: slots in the same proportion as there, in pools of whole 2 MiB.
    """
    ranks = limits.tensor_parallel * limits.pipeline_parallel
    block_bytes = _block_bytes(groups)
    given = memory.host_bytes
    if given is None:
        if memory.host_tokens is None:
            return ()
        given = -(-memory.host_tokens // limits.tokens_per_block) * block_bytes
        given = -(-given // _HOST_GRAIN) * _HOST_GRAIN + len(groups) * _HOST_GRAIN
    if not is_v2:
        slots = _slots(groups, limits, given, is_v2=False)
    else:
        gpu_bytes = memory.gpu_bytes
        if gpu_bytes is None and len(groups) > 1:
            raise BadInputError(
                "--host-memory: TensorRT-LLM divides it between its pools as the GPU's are divided",
                remedy="give --gpu or --gpu-memory as well",
            )
        grain = granularity(gpu_bytes or given)
        shares = shares_of(groups, limits.tokens_per_block, grain)
        floors = floors_of(groups, limits.tokens_per_block)
        slots = slots_of_quota(groups, given, shares, floors, _HOST_GRAIN, option="--host-memory")
    full = max(range(len(groups)), key=lambda index: None in groups[index].windows)
    how = (
        f"give kv_cache_config.host_cache_size {given}: each rank has as much, in memory of its "
        "own that cannot be prepared (docs/engines/trtllm.md)"
    )
    usual = groups[full].blocks_of(limits.typical, limits.typical - 1, limits.tokens_per_block)
    return (
        EngineHost(
            way="trtllm",
            blocks=slots[full],
            block_bytes=sum(groups[full].slot_bytes) * ranks,
            copies=ranks,
            size_bytes=given * ranks,
            blocks_per_request=usual,
            notes=(how,),
        ),
    )


def _engine_groups(
    groups: Sequence[PoolGroup], stages: Sequence[Sequence[PoolGroup]], limits: Limits
) -> tuple[EngineGroup, ...]:
    """Return the fullest stage's pool groups, with the layers that all stages have of each."""
    found = []
    for group in groups:
        windows = [window for window in group.windows if window is not None]
        name = "full" if not windows else "full and window" if len(group.windows) > 1 else "window"
        per_window = group.layers // len(group.windows)
        alike = (other for stage in stages for other in stage if other.windows == group.windows)
        found.append(
            EngineGroup(
                name=name,
                layers=sum(other.layers for other in alike),
                padded_layers=per_window,
                tokens_per_block=limits.tokens_per_block,
                page_bytes=-(-sum(group.slot_bytes) // per_window),
                blocks_per_request=_longest(group, limits),
                window=windows[0] if windows else None,
            )
        )
    return tuple(found)
