"""Models whose layers keep keys and values: full, windowed, and DeepSeek's latents."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.api.slot_layout import round_up
from hostprep.sizing.config import DTYPES, CacheTypes, DType, ModelConfig
from hostprep.sizing.model import Layers, Store, Vectors

FULL = "full_attention"
SLIDING = "sliding_attention"

_EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2", "ministral")
_FROM_LAYER = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_5_vl_text", "qwen3_vl_text")
_PERIOD = {
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "gemma3_text": 6,
    "gemma3": 6,
    "gemma4_text": 6,
    "gemma4": 6,
}
"""Every n-th layer sees all tokens, where the config does not list them: what transformers'
configuration classes of these models fill in."""

_SWA_ONLY = (0, 1)
"""Ratios of layers that keep a window and nothing else; 0 in the published configs."""

_OVERLAPPING = 4
_FLOAT32 = DTYPES["float32"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads whose keys and values are kept, and the elements of each."""

    kv_heads: int
    key_elements: int
    value_elements: int
    name: str = "num_key_value_heads"


def head_shape(config: ModelConfig) -> Shape:
    """Return the shape of a layer's keys and values.

    `head_dim` where it is given, else `hidden_size / num_attention_heads`; as many heads as
    there are for queries where `num_key_value_heads` is missing.
    Raises BadInputError where the counts contradict one another.
    """
    heads = config.integer("num_attention_heads")
    kv_heads = config.optional("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.wrong(
            "num_key_value_heads", f"is {kv_heads}, which does not divide {heads} attention heads"
        )
    if config.has("head_dim") or config.has("attention_head_dim"):
        key = "head_dim" if config.has("head_dim") else "attention_head_dim"
        elements = config.integer(key)
    else:
        if not config.has("hidden_size"):
            raise config.missing("head_dim", "hidden_size")
        hidden = config.integer("hidden_size")
        if hidden % heads:
            raise config.wrong(
                "hidden_size", f"is {hidden}, which {heads} attention heads do not divide"
            )
        elements = hidden // heads
    return Shape(kv_heads, elements, config.optional("v_head_dim", elements))


def attention_store(shape: Shape, types: CacheTypes, window: int | None = None) -> Store:
    """Return what such a layer keeps: a key and a value for each head and token.

    2 x heads x elements x bytes, a token and layer. Source: Kwon et al., Efficient Memory
    Management for LLM Serving with PagedAttention (arXiv 2309.06180), section 3; with grouped
    queries the heads are those of keys and values (arXiv 2305.13245).
    """
    sizes = (shape.key_elements, shape.value_elements)
    return Store(
        name="full" if window is None else f"window-{window}",
        window=window,
        parts=tuple(
            Vectors(heads=shape.kv_heads, elements=size, dtype=types.kv, name=shape.name)
            for size in sizes
        ),
    )


def attention_layers(config: ModelConfig, types: CacheTypes) -> Layers:
    """Return what each layer keeps.

    Gemma 4's layers without a window have heads of their own (`num_global_key_value_heads`,
    `global_head_dim`); where keys serve as values (`attention_k_eq_v`) engines store both, for
    only keys are normalized and rotated. The last `num_kv_shared_layers` use other layers'.
    """
    shape = head_shape(config)
    full = attention_store(_global_shape(config, shape), types)
    kinds = layer_kinds(config)
    sliding = full
    if SLIDING in kinds:
        sliding = attention_store(shape, types, _window(config))
    shared = config.optional("num_kv_shared_layers", 0, least=0)
    if shared >= len(kinds):
        raise config.wrong("num_kv_shared_layers", f"is {shared} of {len(kinds)} layers")
    own = len(kinds) - shared
    stores = ((sliding,) if kind == SLIDING else (full,) for kind in kinds)
    return tuple(store if index < own else () for index, store in enumerate(stores))


def _global_shape(config: ModelConfig, shape: Shape) -> Shape:
    if not config.has("global_head_dim"):
        return shape
    elements = config.integer("global_head_dim")
    heads = config.optional("num_global_key_value_heads", shape.kv_heads)
    return Shape(heads, elements, elements, "num_global_key_value_heads")


def _window(config: ModelConfig) -> int:
    """Return the window. Raises BadInputError for one larger than the model's sequences."""
    window = config.integer("sliding_window")
    most = config.optional("max_position_embeddings", window)
    if window > most:
        raise config.wrong(
            "sliding_window",
            f"is {window}, larger than max_position_embeddings, {most}",
            "write null: such a window never closes",
        )
    return window


def layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """Return each layer's kind: as listed, by the model's rule, or all of them full."""
    listed = config.per_layer("layer_types", str)
    if listed is not None:
        unknown = next((kind for kind in listed if kind not in (FULL, SLIDING)), None)
        if unknown is not None:
            raise config.wrong("layer_types", f"names {unknown[:40]!r}, which is not known here")
        return listed
    count = config.layers()
    family = config.text("model_type")
    if not config.has("sliding_window"):
        return (FULL,) * count
    if family in _EVERY_LAYER:
        return (SLIDING,) * count
    if family in _FROM_LAYER:
        if not config.flag("use_sliding_window", default=False):
            return (FULL,) * count
        first = config.optional("max_window_layers", count, least=0)
        return tuple(SLIDING if index >= first else FULL for index in range(count))
    if family in _PERIOD:
        period = _period(config, _PERIOD[family])
        return tuple(FULL if (index + 1) % period == 0 else SLIDING for index in range(count))
    raise config.missing("layer_types")


def _period(config: ModelConfig, default: int) -> int:
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if config.has(key):
            return config.integer(key)
    return default


def latent_layers(config: ModelConfig, types: CacheTypes) -> Layers:
    """Return what multi-head latent attention keeps.

    (kv_lora_rank + qk_rope_head_dim) x bytes, a token and layer, the same on every rank of a
    tensor-parallel group. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    With an indexer (DeepSeek-V3.2, GLM-5) index_head_dim more: its keys.
    """
    parts = [*_latent(config.integer("kv_lora_rank"), config, types)]
    if config.has("index_head_dim"):
        parts.append(_whole(config.integer("index_head_dim"), types.index))
    return ((Store(name="full", parts=tuple(parts)),),) * config.layers()


def compressed_layers(config: ModelConfig, types: CacheTypes) -> Layers:
    """Return what DeepSeek-V4 keeps.

    Every layer: `head_dim` elements, keys and values in one, of the last `sliding_window` tokens.
    A layer with a ratio: as many once for that number of tokens, and with ratio 4 the indexer's
    keys as well, and the compressor's state. Source: vLLM, DeepSeek V4 in vLLM: Efficient
    Long-context Attention; the state from DeepSeek's inference code: keys' and scores' sums in
    float32, [c x ratio, c x head_dim] each, with c = 2 where neighbours overlap (ratio 4), else 1.
    """
    ratios = config.per_layer("compress_ratios", int, extra=True)
    if ratios is None:
        raise config.missing("compress_ratios")
    bad = next((ratio for ratio in ratios if not 0 <= ratio <= 1 << 16), None)
    if bad is not None:
        raise config.wrong("compress_ratios", f"holds {bad}")
    window = config.integer("sliding_window")
    latent = _latent_of_head(config, types)
    recent = Store(name=f"window-{window}", window=window, parts=latent)
    return tuple((recent, *_compressed(ratio, latent, config, types)) for ratio in ratios)


def _compressed(
    ratio: int, latent: tuple[Vectors, ...], config: ModelConfig, types: CacheTypes
) -> tuple[Store, ...]:
    if ratio in _SWA_ONLY:
        return ()
    overlap = 2 if ratio == _OVERLAPPING else 1
    widths = [config.integer("head_dim")]
    parts = [*latent]
    if ratio == _OVERLAPPING:
        widths.append(config.integer("index_head_dim"))
        parts.append(_whole(widths[-1], types.index))
    state = tuple(
        Vectors(heads=2 * overlap * ratio, elements=overlap * width, dtype=_FLOAT32, split=False)
        for width in widths
    )
    return (
        Store(name=f"compressed-{ratio}", ratio=ratio, parts=tuple(parts)),
        Store(name="state", per_sequence=True, parts=state),
    )


def _latent(rank: int, config: ModelConfig, types: CacheTypes) -> tuple[Vectors, ...]:
    """Return a latent's parts.

    As `fp8_ds_mla` 512 + 4 x 4 + 64 x 2 = 656 bytes: the rank in FP8 with a float32 scale for 128
    elements, the positions in 16 bits. Source: vLLM, FlashMLA sparse backend.
    """
    rope = config.integer("qk_rope_head_dim", least=0)
    if not types.ds_mla:
        return (_whole(rank + rope, types.kv),)
    return (_whole(rank, DTYPES["fp8_block128"]), _whole(rope, DTYPES["bfloat16"]))


def _latent_of_head(config: ModelConfig, types: CacheTypes) -> tuple[Vectors, ...]:
    """Return the parts of DeepSeek-V4's `head_dim`, of which qk_rope_head_dim carry positions.

    As `fp8_ds_mla` 448 + 64 x 2 + 8 = 584 bytes: an 8-bit scale for 64 elements, padded to 8.
    Source: SGLang, DeepSeekV4SingleKVPool; vLLM stores the same.
    """
    elements = config.integer("head_dim")
    if not types.ds_mla:
        return (_whole(elements, types.kv),)
    rope = config.integer("qk_rope_head_dim", least=0)
    if rope >= elements:
        raise config.wrong("qk_rope_head_dim", f"is {rope} of a head_dim of {elements}")
    plain = elements - rope
    scales = round_up(round_up(plain, 64) // 64, 8)
    return (
        _whole(plain, DTYPES["fp8"]),
        _whole(rope, DTYPES["bfloat16"]),
        _whole(scales, DTYPES["int8"]),
    )


def _whole(elements: int, dtype: DType) -> Vectors:
    """Return a vector that every rank keeps whole."""
    return Vectors(heads=1, elements=elements, dtype=dtype, split=False)
