"""Models whose layers keep keys and values: of all tokens, of a window, or of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import CacheTypes
from hostprep.sizing.model import Kind, Layer, Layers, Store, Vectors

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads whose keys and values are kept, and the elements of each."""

    kv_heads: int
    key_elements: int
    value_elements: int
    name: str = "num_key_value_heads"


def head_shape(config: ModelConfig, *keys: str) -> Shape:
    """Return the shape of a layer's keys and values.

    The first of the fields `keys` (`head_dim`) that is given, or that the model's class has a
    default for, else `hidden_size / num_attention_heads`; as many heads as there are for queries
    where the class computes `num_key_value_heads`; a kind without a known class must have it.
    Raises BadInputError where the counts contradict one another.
    """
    heads = config.integer("num_attention_heads")
    if not config.has("num_key_value_heads") and not config.class_has("num_key_value_heads"):
        raise config.missing("num_key_value_heads")
    kv_heads = config.optional("num_key_value_heads", heads)
    _check_divides(config, "num_key_value_heads", kv_heads, heads)
    names = keys or ("head_dim",)
    said = [key for key in names if config.says(key)]
    if len({config.integer(key) for key in said}) > 1:
        raise config.wrong(said[0], f"and {said[1]} contradict each other")
    known = said or [key for key in names if config.class_default(key) is not None]
    if known:
        # A class with a default takes no null: config.integer refuses that.
        elements = config.integer(known[0])
    else:
        config.read(*names)
        elements = _divided(config, heads)
    return Shape(kv_heads, elements, elements)


def _divided(config: ModelConfig, heads: int) -> int:
    if not config.has("hidden_size"):
        raise config.missing("head_dim", "hidden_size")
    hidden = config.integer("hidden_size")
    if hidden % heads:
        raise config.wrong(
            "hidden_size", f"is {hidden}, which {heads} attention heads do not divide"
        )
    return hidden // heads


def _check_divides(config: ModelConfig, key: str, kv_heads: int, heads: int) -> None:
    if heads % kv_heads:
        raise config.wrong(key, f"is {kv_heads}, which does not divide {heads} attention heads")


def attention_store(
    shape: Shape, types: CacheTypes, window: int | None = None, kind: Kind | None = None
) -> Store:
    """Return what such a layer keeps: a key and a value for each head and token.

    2 x heads x elements x bytes, a token and layer. Source: Kwon et al., Efficient Memory
    Management for LLM Serving with PagedAttention (arXiv 2309.06180), section 3; with grouped
    queries the heads are those of keys and values (arXiv 2305.13245).
    """
    kind = kind or (Kind.FULL if window is None else Kind.WINDOW)
    name = "full" if window is None else f"window-{window}"
    if kind is Kind.CHUNK:
        name = f"chunk-{window}"
    return Store(
        name=name,
        kind=kind,
        window=window,
        parts=tuple(
            Vectors(heads=shape.kv_heads, elements=size, dtype=types.kv, name=shape.name)
            for size in (shape.key_elements, shape.value_elements)
        ),
    )


_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")

Rule = Callable[[ModelConfig], tuple[str, ...] | None]
"""A model class's own kinds of layers where the file does not list them; None: it must."""


def no_window(config: ModelConfig) -> tuple[str, ...]:
    """Every layer keeps everything; a `sliding_window` beside that is not understood."""
    return (FULL,) * config.layers()


def every_layer(config: ModelConfig) -> tuple[str, ...]:
    """Every layer has the window, where there is one: Mistral, Mixtral, Phi-3."""
    return (SLIDING if config.has("sliding_window") else FULL,) * config.layers()


def from_layer(config: ModelConfig) -> tuple[str, ...]:
    """Layers from `max_window_layers` on have it, with `use_sliding_window`: Qwen 2 and 3.

    Source: transformers 5.19, Qwen2Config and Qwen3Config, __post_init__.
    """
    count = config.layers()
    first = config.optional("max_window_layers", 28, least=0)
    used = config.flag("use_sliding_window", default=False)
    if not used:
        config.read("sliding_window")
    has_window = used and config.has("sliding_window")
    return tuple(SLIDING if has_window and index >= first else FULL for index in range(count))


def switched_off(config: ModelConfig) -> tuple[str, ...]:
    """Every layer keeps everything: the window is there, and not used.

    Where it is used, classes and engines do not agree on the layers: refused.
    """
    if config.flag("use_sliding_window", default=False):
        raise config.unknown(
            "use_sliding_window", "is true: which layers then have it is not known"
        )
    config.read("sliding_window", "max_window_layers")
    return (FULL,) * config.layers()


def listed_only(config: ModelConfig) -> tuple[str, ...] | None:
    """Every layer keeps everything unless the file lists them; a window without a list is none."""
    return None if config.has("sliding_window") else (FULL,) * config.layers()


def every_nth(period: int, *, stated: bool = False, last_is_full: bool = False) -> Rule:
    """Every n-th layer keeps everything, the others the window.

    What transformers' configuration classes fill in. `stated`: the class looks at
    `sliding_window_pattern`, which says another n; elsewhere that field is not understood.
    """

    def kinds(config: ModelConfig) -> tuple[str, ...]:
        count = config.layers()
        if not config.has("sliding_window"):
            return (FULL,) * count
        nth = period
        keys = [key for key in _PATTERNS if stated and config.has(key)]
        if keys:
            nth = config.integer(keys[0])
            if any(config.integer(key) != nth for key in keys):
                raise config.wrong(keys[0], f"and {keys[1]} contradict each other")
        found = [FULL if (index + 1) % nth == 0 else SLIDING for index in range(count)]
        if last_is_full:
            found[-1] = FULL
        return tuple(found)

    return kinds


def exaone_kinds(config: ModelConfig) -> tuple[str, ...] | None:
    """EXAONE 4: a number n as elsewhere, or letters (LLLG) that repeat, the last layer full.

    Classes and engines read the letters from the list that the file has beside them; without that
    list letters are refused. Source: transformers 5.19, Exaone4Config.
    """
    count = config.layers()
    pattern = config.value("sliding_window_pattern")
    if not config.has("sliding_window"):
        return (FULL,) * count
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise config.wrong("sliding_window_pattern", "holds others than L and G")
        letters = [pattern[index % len(pattern)] for index in range(count)]
        kinds = [SLIDING if letter == "L" else FULL for letter in letters]
        kinds[-1] = FULL
        return tuple(kinds)
    nth = config.integer("sliding_window_pattern")
    return tuple(FULL if (index + 1) % nth == 0 else SLIDING for index in range(count))


def layer_kinds(
    config: ModelConfig, rule: Rule, *, list_decides: bool = True, extra: int = 0
) -> tuple[str, ...]:
    """Return each layer's kind: as listed, or by the model class's rule.

    Raises BadInputError where list and rule contradict each other: a rule that the file itself
    states (a pattern, a flag), or where the class does not look at a list (`list_decides`).
    """
    listed = config.per_layer("layer_types", str, extra=extra)
    by_rule = rule(config)
    if listed is None:
        if by_rule is None:
            raise config.missing("layer_types")
        return by_rule
    unknown = next((kind for kind in listed if kind not in (FULL, SLIDING)), None)
    if unknown is not None:
        raise config.unknown("layer_types", f"names {unknown[:40]!r}, which is not known here")
    own = listed[: config.layers()]
    stated = [key for key in (*_PATTERNS, "use_sliding_window") if config.says(key)]
    if by_rule is not None and own != by_rule and (stated or not list_decides):
        beside = stated[0] if stated else "model_type"
        raise config.wrong("layer_types", f"and {beside} contradict each other")
    return listed


def check_causal(config: ModelConfig, *harmless: str) -> None:
    """Refuse attention that looks both ways: its windows are others (Gemma's embedders)."""
    value = config.value("use_bidirectional_attention")
    if value not in (None, False, *harmless):
        raise config.unknown("use_bidirectional_attention", "is set, and changes the windows")


def window_layers(
    rule: Rule, *, list_decides: bool = True, shares: bool = False
) -> Callable[[ModelConfig, CacheTypes, int], Layers]:
    """Return the reader of models whose layers all have the same heads.

    `shares`: the class has `num_kv_shared_layers`; elsewhere that field is not understood.
    """
    decides = list_decides and rule not in (no_window, switched_off, from_layer)

    def read(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
        check_causal(config)
        shape = head_shape(config)
        stores = {FULL: attention_store(shape, types)}
        kinds = layer_kinds(config, rule, list_decides=decides)
        if SLIDING in kinds:
            window = config.integer("sliding_window")
            stores[SLIDING] = attention_store(shape, types, window)
        layers = tuple((stores[kind],) for kind in kinds)
        return _with_shared(config, layers) if shares else layers

    return read


def _with_shared(config: ModelConfig, layers: Layers) -> Layers:
    """Let the last `num_kv_shared_layers` use other layers' keys: they keep none."""
    shared = config.optional("num_kv_shared_layers", 0, least=0)
    if shared >= len(layers):
        raise config.wrong("num_kv_shared_layers", f"is {shared} of {len(layers)} layers")
    own = len(layers) - shared
    return tuple(layer if index < own else () for index, layer in enumerate(layers))


def gemma4_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what Gemma 4 keeps: layers without a window have heads of their own.

    Those have `global_head_dim`, and `num_global_key_value_heads` with `attention_k_eq_v` only.
    Where keys serve as values engines store both, for only keys are normalized and rotated. The
    last layer has no window. Source: transformers 5.19, Gemma4TextConfig, __post_init__; vLLM
    0.32, models/gemma4.py.
    """
    check_causal(config, "vision")
    shape = head_shape(config)
    kinds = layer_kinds(config, every_nth(6, last_is_full=True))
    kinds = (*kinds[:-1], FULL)
    heads = shape.kv_heads
    elements = config.integer("global_head_dim")
    if config.flag("attention_k_eq_v", default=False):
        heads = config.integer("num_global_key_value_heads")
        _check_divides(
            config, "num_global_key_value_heads", heads, config.integer("num_attention_heads")
        )
    config.read("num_global_key_value_heads")  # without attention_k_eq_v nothing looks at it
    full = Shape(heads, elements, elements, "num_global_key_value_heads")
    stores = {FULL: attention_store(full, types)}
    if SLIDING in kinds:
        stores[SLIDING] = attention_store(shape, types, config.integer("sliding_window"))
    return _with_shared(config, tuple((stores[kind],) for kind in kinds))


def gemma3n_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what Gemma 3n keeps: every fifth layer is full, the last 15 use others' keys.

    Source: transformers 5.19, Gemma3nTextConfig; vLLM 0.32, models/gemma3n.py.
    """
    return window_layers(every_nth(5), shares=True)(config, types, 0)


def llama4_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what Llama 4 keeps: layers with positions attend within a chunk.

    `no_rope_layers` has 0 for layers without positions, which attend to everything; every
    `no_rope_layer_interval`-th (4) where there is no list. Source: transformers 5.19,
    Llama4TextConfig, __post_init__; vLLM 0.32, models/llama4.py.
    """
    count = config.layers()
    listed = config.value("no_rope_layers")
    nth = config.integer("no_rope_layer_interval")
    roped = tuple(int((index + 1) % nth != 0) for index in range(count))
    if listed:
        own = config.per_layer("no_rope_layers", int) or ()
        if set(own) - {0, 1}:
            raise config.wrong("no_rope_layers", "holds others than 0 and 1")
        if config.says("no_rope_layer_interval") and own != roped:
            raise config.wrong("no_rope_layers", "and no_rope_layer_interval contradict each other")
        roped = own
    kinds = tuple(CHUNKED if one else FULL for one in roped)
    if (types_listed := config.per_layer("layer_types", str)) and types_listed != kinds:
        raise config.wrong("layer_types", "contradicts no_rope_layers")
    shape = head_shape(config)
    stores = {FULL: attention_store(shape, types), CHUNKED: attention_store(shape, types)}
    if config.has("attention_chunk_size"):
        chunk = config.integer("attention_chunk_size")
        stores[CHUNKED] = attention_store(shape, types, chunk, Kind.CHUNK)
    return tuple((stores[kind],) for kind in kinds)


def mimo_v2_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what MiMo-V2-Flash keeps: layers with a window have heads of their own.

    `hybrid_layer_pattern` has 1 for those. Values have fewer elements than keys.
    Source: vLLM 0.32, models/mimo_v2.py, MiMoV2FlashDecoderLayer.
    """
    del drafts
    pattern = config.per_layer("hybrid_layer_pattern", int)
    if pattern is None:
        raise config.missing("hybrid_layer_pattern")
    if set(pattern) - {0, 1}:
        raise config.wrong("hybrid_layer_pattern", "holds others than 0 and 1")
    full, sliding = _mimo_stores(config, types)
    return tuple((sliding if one else full,) for one in pattern)


def mimo_v2_drafts(config: ModelConfig, types: CacheTypes, layers: Layers) -> Layers:
    """Return what its draft layer keeps: a window. Source: vLLM 0.32, models/mimo_v2_mtp.py."""
    del layers
    return ((_mimo_stores(config, types)[1],),)


def _mimo_stores(config: ModelConfig, types: CacheTypes) -> tuple[Store, Store]:
    windows = {
        key: config.integer(key)
        for key in ("sliding_window", "sliding_window_size", "attention_chunk_size")
        if config.says(key)
    }
    if len(set(windows.values())) != 1:
        raise config.wrong("sliding_window", f"is missing, or contradicts {', '.join(windows)}")
    (window,) = set(windows.values())
    shapes = []
    for prefix in ("", "swa_"):
        heads = config.integer(f"{prefix}num_attention_heads")
        kv_heads = config.integer(f"{prefix}num_key_value_heads")
        _check_divides(config, f"{prefix}num_key_value_heads", kv_heads, heads)
        keys = config.integer(f"{prefix}head_dim")
        # Classes and engines differ in what they take for a missing one: it must be there.
        values = config.integer(f"{prefix}v_head_dim")
        shapes.append(Shape(kv_heads, keys, values, f"{prefix}num_key_value_heads"))
    return attention_store(shapes[0], types), attention_store(shapes[1], types, window)


def step_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what Step-3.5 and 3.7 keep; draft layers may follow in `layer_types`.

    `num_attention_groups` are heads of keys; `attention_other_setting` has those of one kind of
    layers. Source: vLLM 0.32, models/step3p5.py, Step3p5DecoderLayer.
    """
    found = _step_layers(config, types)
    return found[: config.layers()]


def step_drafts(config: ModelConfig, types: CacheTypes, layers: Layers) -> Layers:
    """Return what its draft layers keep: as `layer_types` goes on, or else says at its end."""
    found = _step_layers(config, types)
    count = config.optional("num_nextn_predict_layers", 0, least=0, most=64)
    more = found[len(layers) :]
    if count and len(more) != count:
        raise config.unknown(
            "layer_types",
            f"does not say what the {count} draft layers (num_nextn_predict_layers) are",
            "size without --speculative-tokens",
        )
    return more


def _step_layers(config: ModelConfig, types: CacheTypes) -> Layers:
    if config.says("num_key_value_heads") and config.says("num_attention_groups"):
        raise config.wrong("num_key_value_heads", "and num_attention_groups contradict each other")
    key = "num_attention_groups" if config.says("num_attention_groups") else "num_key_value_heads"
    heads, kv_heads = config.integer("num_attention_heads"), config.integer(key)
    _check_divides(config, key, kv_heads, heads)
    elements = config.integer("head_dim")
    shapes = dict.fromkeys((FULL, SLIDING), Shape(kv_heads, elements, elements, key))
    if (other := config.part("attention_other_setting")) is not None:
        kind = other.text("attention_type")
        if kind not in shapes:
            raise other.unknown("attention_type", f"is {kind[:40]!r}, which is not known here")
        own, size = other.integer("num_attention_groups"), other.integer("head_dim")
        _check_divides(other, "num_attention_groups", own, other.integer("num_attention_heads"))
        shapes[kind] = Shape(own, size, size, "attention_other_setting.num_attention_groups")
    drafting = config.optional("num_nextn_predict_layers", 0, least=0, most=64)
    kinds = layer_kinds(config, listed_only, extra=drafting)
    stores = {FULL: attention_store(shapes[FULL], types)}
    if SLIDING in kinds:
        window = config.integer("sliding_window")
        stores[SLIDING] = attention_store(shapes[SLIDING], types, window)
    return tuple((stores[kind],) for kind in kinds)


def nas_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what Nemotron-NAS keeps: `block_configs` says it of each layer.

    `n_heads_in_group` queries share a head of keys; a layer without attention, or with a matrix in
    its place, keeps nothing. Source: vLLM 0.32, models/nemotron_nas.py; the models'
    configuration_decilm.py and block_config.py.
    """
    blocks = config.parts("block_configs")
    if len(blocks) != config.layers():
        raise config.wrong("block_configs", f"has {len(blocks)} items for {config.layers()} layers")
    heads = config.integer("num_attention_heads")
    if config.says("num_key_value_heads"):
        raise config.wrong("num_key_value_heads", "and block_configs contradict each other")
    elements = config.integer("head_dim") if config.says("head_dim") else _divided(config, heads)
    layers: list[Layer] = []
    for block in blocks:
        attention = block.part("attention")
        if attention is None:
            raise block.missing("attention")
        nothing = [attention.flag(key, default=False) for key in ("no_op", "replace_with_linear")]
        attention.read("use_prefill_window_in_sink_attention")  # of sinks, which are refused
        if any(nothing):
            attention.read("n_heads_in_group", "window_length", "num_sink_tokens", "sparsify")
            layers.append(())
            continue
        if attention.value("num_sink_tokens"):
            raise attention.unknown("num_sink_tokens", "is set, and not known here")
        group = attention.integer("n_heads_in_group")
        _check_divides(attention, "n_heads_in_group", group, heads)
        shape = Shape(heads // group, elements, elements, "block_configs.n_heads_in_group")
        layers.append((attention_store(shape, types),))
    return tuple(layers)


def minimax_m3_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what MiniMax-M3 keeps: keys and values everywhere, index keys in sparse layers.

    `sparse_attention_config` has the sparse layers (`sparse_attention_freq`) and the elements of
    the one index key for each token, which has the model's type and no scale.
    Source: vLLM 0.32, models/minimax_m3, MiniMaxM3IndexerCache.
    """
    full = attention_store(head_shape(config), types)
    count = config.layers()
    sparse = config.part("sparse_attention_config")
    if sparse is None or not sparse.flag("use_sparse_attention", default=False):
        raise config.missing("sparse_attention_config")
    freq = sparse.listed("sparse_attention_freq", int)
    if freq is None or len(freq) != count or set(freq) - {0, 1}:
        raise sparse.wrong("sparse_attention_freq", f"is not a list of 0 or 1 for {count} layers")
    off = sparse.listed("sparse_disable_index_value", int)
    if off is not None and off != freq:
        # Sparse layers whose index has values too would keep those.
        raise sparse.unknown("sparse_disable_index_value", "differs from sparse_attention_freq")
    if off is None:
        raise sparse.missing("sparse_disable_index_value")
    sparse.read(
        "sparse_num_index_heads", "sparse_topk_blocks", "sparse_block_size", "sparse_score_type",
        "sparse_init_block", "sparse_local_block",
    )  # fmt: skip
    key = Vectors(
        heads=1, elements=sparse.integer("sparse_index_dim"), dtype=types.index, split=False
    )
    index = Store(name="full", kind=Kind.INDEX, parts=(key,))
    return tuple((full, index) if one else (full,) for one in freq)
