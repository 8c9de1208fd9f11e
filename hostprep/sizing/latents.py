"""Models whose layers keep latents: DeepSeek and its kin, with and without sparse attention."""

from __future__ import annotations

from hostprep.api.slot_layout import round_up
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import DTYPES, CacheTypes, DType
from hostprep.sizing.model import Kind, Layer, Layers, Store, Vectors

_SWA_ONLY = (0, 1)
"""Ratios of layers that keep a window and nothing else; 0 in the published configs."""
_OVERLAPPING = 4
_FLOAT32 = DTYPES["float32"]
_SPARSE = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""What transformers calls layers with an indexer, in newer and older versions."""
_OF_QUERIES = ("q_lora_rank", "o_lora_rank", "qk_nope_head_dim", "qk_head_dim")
"""Queries' and outputs' own latents, and the part of a head that is not rotated: none is kept."""
_INDEX_LETTERS = {"F": "full", "S": "shared"}


def latent_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what multi-head latent attention keeps in every layer. See `latent_store`."""
    return ((latent_store(config, types),),) * config.layers()


def latent_store(config: ModelConfig, types: CacheTypes) -> Store:
    """Return what a layer with multi-head latent attention keeps.

    (kv_lora_rank + qk_rope_head_dim) x bytes, a token and layer, the same on every rank of a
    tensor-parallel group. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    As `fp8_ds_mla` 512 + 4 x 4 + 64 x 2 = 656 bytes: the rank in FP8 with a float32 scale for 128
    elements, the positions in 16 bits. Source: vLLM, FlashMLA sparse backend.
    """
    rank = config.integer("kv_lora_rank")
    rope = config.integer("qk_rope_head_dim", least=0)
    # Of queries and of what is computed from latents: nothing of it is kept.
    config.read("num_key_value_heads", "head_dim", "v_head_dim", "mla_use_nope")
    config.read("mla_use_output_gate", *_OF_QUERIES)
    parts: tuple[Vectors, ...] = (_whole(rank + rope, types.kv),)
    if types.ds_mla:
        parts = (_whole(rank, DTYPES["fp8_block128"]), _whole(rope, DTYPES["bfloat16"]))
    return Store(name="full", kind=Kind.LATENT, parts=parts)


def indexed_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what DeepSeek-V3.2 and GLM-5 keep: latents, and index keys in some layers.

    A layer has an indexer unless it shares an earlier layer's choice: as `indexer_types` lists it,
    by the letters F and S of `index_topk_pattern`, or by `index_topk_freq` and
    `index_skip_topk_offset`: layer i has one where max(i - offset + 1, 0) is a multiple of freq.
    Source: transformers 5.19, GlmMoeDsaConfig; vLLM 0.32, models/deepseek_v32/attention.py.
    """
    latent, index = latent_store(config, types), _index_store(config, types)
    config.read("index_share_for_mtp_iteration")  # of what is computed, not of what is kept
    if set(config.per_layer("layer_types", str) or ()) - _SPARSE:
        raise config.unknown("layer_types", f"names others than {' and '.join(sorted(_SPARSE))}")
    shares = _shared_indexes(config)
    return tuple((latent,) if shared else (latent, index) for shared in shares)


def indexed_draft(config: ModelConfig, types: CacheTypes) -> Layer:
    """Return what a draft layer keeps: it always has an indexer of its own."""
    return latent_store(config, types), _index_store(config, types)


def _index_store(config: ModelConfig, types: CacheTypes) -> Store:
    part = _whole(config.integer("index_head_dim"), types.index)
    return Store(name="full", kind=Kind.INDEX, parts=(part,))


def _shared_indexes(config: ModelConfig) -> tuple[bool, ...]:
    """Return for each layer whether it uses an earlier layer's choice of tokens."""
    count = config.layers()
    freq = config.optional("index_topk_freq", 1)
    offset = config.optional("index_skip_topk_offset", 2, least=0)
    ways = {
        "index_topk_freq": tuple(max(i - offset + 1, 0) % freq != 0 for i in range(count)),
    }
    letters = config.text("index_topk_pattern")
    if letters:
        if len(letters) != count or set(letters) - set(_INDEX_LETTERS):
            raise config.wrong("index_topk_pattern", f"is not {count} letters F or S")
        ways["index_topk_pattern"] = tuple(letter == "S" for letter in letters)
        if not config.says("index_topk_freq"):
            del ways["index_topk_freq"]
    listed = config.per_layer("indexer_types", str)
    if listed is not None:
        if set(listed) - set(_INDEX_LETTERS.values()):
            raise config.unknown("indexer_types", "names others than full and shared")
        # vLLM does not look at this list: it must say the same as the fields that it reads.
        ways["indexer_types"] = tuple(one == "shared" for one in listed)
    if len(set(ways.values())) > 1:
        raise config.wrong(" and ".join(ways), "contradict each other")
    return next(iter(ways.values()))


def compressed_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what DeepSeek-V4 keeps.

    Every layer: `head_dim` elements, keys and values in one, of the last `sliding_window` tokens.
    A layer with a ratio: as many once for that number of tokens, and with ratio 4 the indexer's
    keys as well, and the compressor's state. Source: vLLM, DeepSeek V4 in vLLM: Efficient
    Long-context Attention; the state from DeepSeek's inference code: keys' and scores' sums in
    float32, [c x ratio, c x head_dim] each, with c = 2 where neighbours overlap (ratio 4), else 1.
    A reference format (`deepseek_ref`) says by its architecture that it is this model.
    """
    is_reference = config.text("model_type") == "deepseek_ref"
    if is_reference and "DeepseekV4ForCausalLM" not in (config.listed("architectures", str) or ()):
        raise config.unknown("model_type", "is deepseek_ref, and architectures do not say of what")
    return _compressed_layers(config, types)[: config.layers()]


def compressed_drafts(config: ModelConfig, types: CacheTypes, layers: Layers) -> Layers:
    """Return what its draft layers keep: `compress_ratios` goes on with theirs."""
    count = config.optional("num_nextn_predict_layers", 0, least=0, most=64)
    more = _compressed_layers(config, types)[len(layers) :]
    if len(more) != count:
        raise config.wrong(
            "compress_ratios", f"has {len(more)} items for {count} draft layers beyond the others"
        )
    return more


def _compressed_layers(config: ModelConfig, types: CacheTypes) -> Layers:
    drafting = config.optional("num_nextn_predict_layers", 0, least=0, most=64)
    ratios = config.per_layer("compress_ratios", int, extra=drafting)
    if ratios is None:
        raise config.missing("compress_ratios")
    bad = next((ratio for ratio in ratios if not 0 <= ratio <= 1 << 16), None)
    if bad is not None:
        raise config.wrong("compress_ratios", f"holds {bad}")
    config.read("num_key_value_heads", "compress_rope_theta", "index_head_dim", *_OF_QUERIES)
    if config.optional("num_key_value_heads", 1) != 1:
        raise config.unknown("num_key_value_heads", "is not 1")
    window = config.integer("sliding_window")
    latent = _latent_of_head(config, types)
    recent = Store(name=f"window-{window}", kind=Kind.WINDOW, window=window, parts=latent)
    return tuple((recent, *_compressed(ratio, latent, config, types)) for ratio in ratios)


def _compressed(
    ratio: int, latent: tuple[Vectors, ...], config: ModelConfig, types: CacheTypes
) -> tuple[Store, ...]:
    if ratio in _SWA_ONLY:
        return ()
    overlap = 2 if ratio == _OVERLAPPING else 1
    widths = [config.integer("head_dim")]
    name = f"compressed-{ratio}"
    stores = [Store(name=name, kind=Kind.COMPRESSED, ratio=ratio, parts=latent)]
    if ratio == _OVERLAPPING:
        widths.append(config.integer("index_head_dim"))
        keys = (_whole(widths[-1], types.index),)
        stores.append(Store(name=name, kind=Kind.INDEX, ratio=ratio, parts=keys))
    sums = tuple(
        Vectors(heads=overlap * ratio, elements=2 * overlap * width, dtype=_FLOAT32, split=False)
        for width in widths
    )
    state = Store(name="state", kind=Kind.COMPRESSOR, per_sequence=True, parts=sums)
    return (*stores, state)


def _latent_of_head(config: ModelConfig, types: CacheTypes) -> tuple[Vectors, ...]:
    """Return the parts of DeepSeek-V4's `head_dim`, of which qk_rope_head_dim carry positions.

    As `fp8_ds_mla` 448 + 64 x 2 + 8 = 584 bytes: an 8-bit scale for 64 elements, padded to 8.
    Source: SGLang, DeepSeekV4SingleKVPool; vLLM stores the same.
    """
    elements = config.integer("head_dim")
    rope = config.integer("qk_rope_head_dim", least=0)
    if rope >= elements:
        raise config.wrong("qk_rope_head_dim", f"is {rope} of a head_dim of {elements}")
    if not types.ds_mla:
        return (_whole(elements, types.kv),)
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
