"""DeepSeek's latents: one vector a token that serves all heads, and its compressed successors."""

from __future__ import annotations

from hostprep.api.slot_layout import round_up
from hostprep.sizing.cache_types import CacheTypes
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import DTYPES, DType
from hostprep.sizing.model import Part, Store

__all__ = ["compressed_layers", "latent_layers"]

_SWA_ONLY = (0, 1)
"""Ratios of layers that keep a window and nothing else; 0 in the published configs."""


def latent_layers(config: ModelConfig, types: CacheTypes) -> tuple[tuple[Store, ...], ...]:
    """Return what multi-head latent attention keeps.

    (kv_lora_rank + qk_rope_head_dim) x bytes, a token and layer, the same on every rank of a
    tensor-parallel group. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    With an indexer (DeepSeek-V3.2, GLM-5) index_head_dim more: its keys.
    """
    parts = [*_latent(config.integer("kv_lora_rank"), config, types)]
    if config.has("index_head_dim"):
        parts.append(_whole(config.integer("index_head_dim"), types.index))
    return ((Store(name="full", parts=tuple(parts)),),) * config.layers()


def compressed_layers(config: ModelConfig, types: CacheTypes) -> tuple[tuple[Store, ...], ...]:
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
    ratio: int, latent: tuple[Part, ...], config: ModelConfig, types: CacheTypes
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
        Part(heads=2 * overlap * ratio, elements=overlap * width, dtype=_FLOAT32, split=False)
        for width in widths
    )
    return (
        Store(name=f"compressed-{ratio}", ratio=ratio, parts=tuple(parts)),
        Store(name="state", per_sequence=True, parts=state),
    )


_OVERLAPPING = 4
_FLOAT32 = DTYPES["float32"]


def _latent(rank: int, config: ModelConfig, types: CacheTypes) -> tuple[Part, ...]:
    """Return a latent's parts.

    As `fp8_ds_mla` 512 + 4 x 4 + 64 x 2 = 656 bytes: the rank in FP8 with a float32 scale for 128
    elements, the positions in 16 bits. Source: vLLM, FlashMLA sparse backend.
    """
    rope = config.integer("qk_rope_head_dim", least=0)
    if not types.ds_mla:
        return (_whole(rank + rope, types.kv),)
    return (_whole(rank, DTYPES["fp8_block128"]), _whole(rope, DTYPES["bfloat16"]))


def _latent_of_head(config: ModelConfig, types: CacheTypes) -> tuple[Part, ...]:
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


def _whole(elements: int, dtype: DType) -> Part:
    """Return a vector that every rank keeps whole."""
    return Part(heads=1, elements=elements, dtype=dtype, split=False)
