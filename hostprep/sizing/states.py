"""Models with recurrent states: Mamba, delta nets, linear attention, and mixtures of them."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.sizing.attention import FULL, attention_store, head_shape
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import CacheTypes
from hostprep.sizing.latents import latent_store
from hostprep.sizing.model import Kind, Layer, Layers, Store, Vectors

LINEAR = "linear_attention"
_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEWER_NAMES = {LINEAR: "mamba", FULL: "attention"}
"""transformers from version 5 on writes these for layers of Mamba mixtures."""


def delta_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Qwen3-Next and Qwen3.5 keep: every n-th layer attends, the others have a state.

    The state: a convolution of (kernel - 1) inputs over keys, queries and values in the model's
    type, and value_heads x key_elements x value_elements. `drafts`: tokens that are speculated,
    whose inputs the convolution keeps too. Source: vLLM 0.32, MambaStateShapeCalculator,
    gated_delta_net_state_shape; transformers 5.19, Qwen3NextConfig.
    """
    count = config.layers()
    listed = config.per_layer("layer_types", str)
    period = config.optional("full_attention_interval", 4)
    kinds = tuple(FULL if (index + 1) % period == 0 else LINEAR for index in range(count))
    if listed is not None:
        _check_kinds(config, "layer_types", listed, (FULL, LINEAR))
        if config.says("full_attention_interval") and listed != kinds:
            raise config.wrong("layer_types", "and full_attention_interval contradict each other")
        kinds = listed
    key_heads = config.integer("linear_num_key_heads")
    value_heads = config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise config.wrong(
            "linear_num_value_heads", f"is {value_heads}, no multiple of {key_heads} heads of keys"
        )
    key_size = config.integer("linear_key_head_dim")
    value_size = config.integer("linear_value_head_dim")
    kept = config.integer("linear_conv_kernel_dim", least=2) - 1 + drafts
    keys = _conv(key_heads, key_size * kept, types, "linear_num_key_heads")
    state = _state(
        keys,
        keys,  # of queries: not one vector of both, for each has its own heads to deal out
        _conv(value_heads, value_size * kept, types, "linear_num_value_heads"),
        _heads(value_heads, key_size * value_size, types, "linear_num_value_heads"),
    )
    full = attention_store(head_shape(config), types)
    return tuple((state,) if kind == LINEAR else (full,) for kind in kinds)


def kda_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Kimi-Linear and Kimi-K3 keep: latents, or the state of Kimi delta attention.

    `linear_attn_config` lists both kinds of layers, counted from 1. The state: (kernel - 1) inputs
    of keys, queries and values in the model's type, and heads x elements x elements.
    Source: vLLM 0.32, transformers_utils/configs/kimi_linear.py; kda_state_shape.
    """
    count = config.layers()
    linear = config.part("linear_attn_config")
    if linear is None:
        raise config.missing("linear_attn_config")
    has_state = linear.listed("kda_layers", int)
    attends = linear.listed("full_attn_layers", int)
    if has_state is None or attends is None:
        raise linear.missing("kda_layers" if has_state is None else "full_attn_layers")
    if sorted(has_state + attends) != list(range(1, count + 1)):
        raise linear.wrong(
            "kda_layers", f"and full_attn_layers do not name each of the {count} layers once"
        )
    linear.read("use_full_rank_gate", "gate_lower_bound")
    heads, size = linear.integer("num_heads"), linear.integer("head_dim")
    kept = linear.integer("short_conv_kernel_size", least=2) - 1 + drafts
    state = _state(
        _conv(3 * heads, size * kept, types, "linear_attn_config.num_heads"),
        _heads(heads, size * size, types, "linear_attn_config.num_heads"),
    )
    latent = latent_store(config, types)
    stateful = frozenset(has_state)
    return tuple((state,) if index in stateful else (latent,) for index in range(1, count + 1))


def lightning_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what MiniMax-Text-01 keeps: most layers a state of heads x elements x elements.

    `attn_type_list` has 1 for layers that attend, 0 for linear ones; `layer_types` says the same
    in the library's own format. Source: vLLM, linear_attention_state_shape; the models' own code.
    """
    numbers = config.per_layer("attn_type_list", int)
    listed = config.per_layer("layer_types", str)
    if numbers is not None:
        if set(numbers) - {0, 1}:
            raise config.unknown("attn_type_list", "holds others than 0 and 1")
        kinds = tuple(FULL if number else LINEAR for number in numbers)
        if listed is not None and listed != kinds:
            raise config.wrong("layer_types", "and attn_type_list contradict each other")
    elif listed is not None:
        _check_kinds(config, "layer_types", listed, (FULL, LINEAR))
        kinds = listed
    else:
        raise config.missing("attn_type_list")
    shape = head_shape(config)
    heads = config.integer("num_attention_heads")
    state = _state(_heads(heads, shape.key_elements**2, types, "num_attention_heads"))
    full = attention_store(shape, types)
    return tuple((state,) if kind == LINEAR else (full,) for kind in kinds)


def short_conv_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what LFM2 keeps: the inputs of a short convolution, or keys and values.

    Source: vLLM 0.32, short_conv_state_shape; models/lfm2.py.
    """
    count = config.layers()
    ways: dict[str, tuple[str, ...]] = {}
    if (listed := config.per_layer("layer_types", str)) is not None:
        _check_kinds(config, "layer_types", listed, (FULL, "conv"))
        ways["layer_types"] = listed
    if (attends := config.listed("full_attn_idxs", int)) is not None:
        if any(not 0 <= index < count for index in attends):
            raise config.wrong("full_attn_idxs", f"names others than {count} layers have")
        ways["full_attn_idxs"] = tuple(
            FULL if index in set(attends) else "conv" for index in range(count)
        )
    if not ways:
        raise config.missing("layer_types", "full_attn_idxs")
    if len(set(ways.values())) > 1:
        raise config.wrong(" and ".join(ways), "contradict each other")
    kinds = next(iter(ways.values()))
    width = config.optional("conv_dim", config.integer("hidden_size"))
    kept = config.integer("conv_L_cache", least=2) - 1 + drafts
    state = _state(_conv(width, kept, types, "hidden_size"))
    full = attention_store(head_shape(config), types)
    return tuple((state,) if kind == "conv" else (full,) for kind in kinds)


def mamba1_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what Mamba keeps: inner x (kernel - 1), and inner x state elements.

    Source: Gu and Dao, Mamba (arXiv 2312.00752); vLLM, mamba1_state_shape.
    """
    if config.says("intermediate_size"):
        # What the file says wins over what the class computes: Falcon Mamba's `expand` is another.
        inner = config.integer("intermediate_size")
        config.read("expand")
    else:
        inner = config.integer("hidden_size") * config.integer("expand")
    state, kernel = config.integer("state_size"), config.integer("conv_kernel", least=2)
    return ((_mamba1_state(inner, state, kernel, types),),) * config.layers()


def jamba_layers(config: ModelConfig, types: CacheTypes, _: int) -> Layers:
    """Return what Jamba keeps: Mamba's state, and keys and values in every n-th layer.

    Layers i with i mod `attn_layer_period` = `attn_layer_offset` attend. Source: transformers
    5.19, JambaConfig.
    """
    inner = config.integer("hidden_size") * config.integer("mamba_expand")
    state, kernel = config.integer("mamba_d_state"), config.integer("mamba_d_conv", least=2)
    store = _mamba1_state(inner, state, kernel, types)
    period = config.integer("attn_layer_period")
    offset = config.integer("attn_layer_offset", least=0)
    if offset >= period:
        raise config.wrong("attn_layer_offset", f"is {offset} of a period of {period}")
    full = attention_store(head_shape(config), types)
    return tuple(
        (full,) if index % period == offset else (store,) for index in range(config.layers())
    )


def _mamba1_state(inner: int, state: int, kernel: int, types: CacheTypes) -> Store:
    return _state(
        _conv(inner, kernel - 1, types, "inner size"), _heads(inner, state, types, "inner size")
    )


def mamba2_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Mamba 2 keeps in every layer."""
    inner = config.integer("hidden_size") * config.integer("expand")
    return ((_mamba2_state(config, types, drafts, _PLAIN, inner),),) * config.layers()


def falcon_h1_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Falcon H1 keeps: every layer has a state and attends as well.

    Source: transformers 5.19, FalconH1Config; vLLM 0.32, models/falcon_h1.py.
    """
    inner = config.optional("mamba_d_ssm", 0, least=0) or (
        config.integer("hidden_size") * config.integer("mamba_expand")
    )
    config.read("mamba_expand")
    state = _mamba2_state(config, types, drafts, _BAMBA, inner)
    return ((attention_store(head_shape(config), types), state),) * config.layers()


def mixed_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Bamba and Granite 4 keep: Mamba 2's state, or keys and values.

    `attn_layer_indices` names the layers that attend, `layer_types` or `layers_block_type` all of
    them. Without either the class would have no layer attend, which no published model means:
    refused. Source: transformers 5.19, BambaConfig and GraniteMoeHybridConfig.
    """
    count = config.layers()
    ways: dict[str, tuple[str, ...]] = {}
    indices = config.listed("attn_layer_indices", int)
    if indices is not None:
        if any(not 0 <= index < count for index in indices):
            raise config.wrong("attn_layer_indices", f"names others than {count} layers have")
        ways["attn_layer_indices"] = tuple(
            "attention" if index in set(indices) else "mamba" for index in range(count)
        )
    for key in ("layer_types", "layers_block_type"):
        if (listed := config.per_layer(key, str)) is not None:
            named = tuple(_NEWER_NAMES.get(kind, kind) for kind in listed)
            _check_kinds(config, key, named, ("mamba", "attention"))
            ways[key] = named
    if not ways:
        raise config.missing("attn_layer_indices", "layer_types")
    if len(set(ways.values())) > 1:
        raise config.wrong(" and ".join(ways), "contradict each other")
    inner = config.integer("hidden_size") * config.integer("mamba_expand")
    state = _mamba2_state(config, types, drafts, _BAMBA, inner)
    full = attention_store(head_shape(config), types)
    kinds = next(iter(ways.values()))
    return tuple((full,) if kind == "attention" else (state,) for kind in kinds)


def nemotron_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Nemotron-H keeps: its pattern says which layers have a state, attend, or neither.

    M is Mamba 2, * attention, - and E have no cache. Source: transformers 5.19, NemotronHConfig,
    hybrid_override_pattern.
    """
    ways: dict[str, tuple[str, ...]] = {}
    if pattern := config.text("hybrid_override_pattern"):
        ways["hybrid_override_pattern"] = _nemotron_pattern(
            config, "hybrid_override_pattern", pattern
        )
    for key in ("layers_block_type", "layer_types"):
        if (listed := config.listed(key, str)) is not None:
            named = tuple(_NEWER_NAMES.get(kind, kind) for kind in listed)
            _check_kinds(config, key, named, tuple(_NEMOTRON.values()))
            ways[key] = named
    for key, kinds in ways.items():
        # The class counts what is listed; files without num_hidden_layers are published.
        if config.says("num_hidden_layers") and len(kinds) != config.layers():
            raise config.wrong(key, f"has {len(kinds)} items for {config.layers()} layers")
    if not ways:
        raise config.missing("hybrid_override_pattern")
    if len(set(ways.values())) > 1:
        raise config.wrong(" and ".join(ways), "contradict each other")
    state = _mamba2_state(config, types, drafts, _NEMOTRON_NAMES, None)
    stores: dict[str, Layer] = {"mamba": (state,), "mlp": (), "moe": ()}
    stores["attention"] = (_nemotron_attention(config, types),)
    return tuple(stores[kind] for kind in next(iter(ways.values())))


def nemotron_drafts(config: ModelConfig, types: CacheTypes, _: Layers) -> Layers:
    """Return what its draft layers keep: `mtp_hybrid_override_pattern`, once for each step.

    Source: vLLM 0.32, models/nemotron_h_mtp.py; transformers 5.19, NemotronHConfig.
    """
    steps = config.optional("num_nextn_predict_layers", 0, least=0, most=64)
    listed = config.listed("mtp_layers_block_type", str)
    kinds = tuple(_NEWER_NAMES.get(kind, kind) for kind in listed or ())
    if pattern := config.text("mtp_hybrid_override_pattern"):
        lettered = _nemotron_pattern(config, "mtp_hybrid_override_pattern", pattern)
        if listed is not None and lettered != kinds:
            raise config.wrong(
                "mtp_hybrid_override_pattern", "and mtp_layers_block_type contradict each other"
            )
        kinds = lettered
    if steps and not kinds:
        raise config.missing("mtp_hybrid_override_pattern")
    _check_kinds(config, "mtp_layers_block_type", kinds, ("attention", "mlp", "moe"))
    attention = (_nemotron_attention(config, types),)
    return tuple(attention if kind == "attention" else () for kind in kinds) * steps


def _nemotron_attention(config: ModelConfig, types: CacheTypes) -> Store:
    return attention_store(head_shape(config, "attention_head_dim", "head_dim"), types)


def _nemotron_pattern(config: ModelConfig, key: str, pattern: str) -> tuple[str, ...]:
    if set(pattern) - set(_NEMOTRON):
        raise config.unknown(key, f"has other letters than {''.join(_NEMOTRON)}")
    return tuple(_NEMOTRON[letter] for letter in pattern)


def _check_kinds(
    config: ModelConfig, key: str, kinds: tuple[str, ...], known: tuple[str, ...]
) -> None:
    unknown = next((kind for kind in kinds if kind not in known), None)
    if unknown is not None:
        raise config.unknown(key, f"names {unknown[:40]!r}, which is not known for this model_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mamba2Names:
    """Under which names a family has its Mamba 2 layers' sizes."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    state: str = "mamba_d_state"
    groups: tuple[str, ...] = ("mamba_n_groups",)
    kernel: tuple[str, ...] = ("mamba_d_conv",)


_BAMBA = _Mamba2Names()
_PLAIN = _Mamba2Names(
    heads="num_heads",
    head_dim="head_dim",
    state="state_size",
    groups=("n_groups",),
    kernel=("conv_kernel",),
)
_NEMOTRON_NAMES = _Mamba2Names(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    state="ssm_state_size",
    groups=("n_groups", "mamba_n_groups"),
    kernel=("conv_kernel", "mamba_d_conv"),
)


def _mamba2_state(
    config: ModelConfig, types: CacheTypes, drafts: int, names: _Mamba2Names, inner: int | None
) -> Store:
    """Return a Mamba 2 layer's state.

    (inner + 2 x groups x state) x (kernel - 1) in the model's type, and heads x head elements x
    state. Where ranks are no divisor of the groups each keeps one of B and one of C. `inner`: what
    heads x elements must be, from other fields. Source: Dao and Gu, Mamba 2 (arXiv 2405.21060);
    vLLM 0.32, mamba2_state_shape and extra_groups_for_head_shards.
    """
    heads = config.integer(names.heads)
    if config.value(names.head_dim) == "auto":
        if inner is None or inner % heads:
            raise config.wrong(names.head_dim, f"is auto, and {heads} heads do not divide {inner}")
        size = inner // heads
    else:
        size = config.integer(names.head_dim)
    if inner is not None and heads * size != inner:
        raise config.wrong(
            names.head_dim,
            f"is {size}: {heads} heads of it are not the {inner} that other fields say",
        )
    state = config.integer(names.state)
    key = _first(config, *names.groups)
    groups = config.integer(key)
    if heads % groups:
        raise config.wrong(key, f"is {groups}, which does not divide {heads} heads of Mamba")
    kept = config.integer(_first(config, *names.kernel), least=2) - 1 + drafts
    few = Vectors(heads=groups, elements=state * kept, dtype=types.model, name=key)
    return _state(
        _conv(heads, size * kept, types, names.heads),
        few,  # B
        few,  # C: not one vector of both, for each is kept by ranks that would have none
        _heads(heads, size * state, types, names.heads),
    )


def _first(config: ModelConfig, *keys: str) -> str:
    """Return the first of the fields that the file has, or else the class a default for.

    Raises BadInputError where there is none, or two that the file has contradict each other.
    """
    said = [key for key in keys if config.says(key)]
    if len({str(config.value(key)) for key in said}) > 1:
        raise config.wrong(said[0], f"and {said[1]} contradict each other")
    found = said or [key for key in keys if config.has(key)]
    if not found:
        raise config.missing(keys[0])
    return found[0]


def _state(*parts: Vectors) -> Store:
    return Store(name="state", kind=Kind.STATE, per_sequence=True, parts=parts)


def _conv(heads: int, elements: int, types: CacheTypes, name: str) -> Vectors:
    return Vectors(heads=heads, elements=elements, dtype=types.model, repeat=False, name=name)


def _heads(heads: int, elements: int, types: CacheTypes, name: str) -> Vectors:
    return Vectors(heads=heads, elements=elements, dtype=types.state, repeat=False, name=name)
