"""From a config to a model: each known kind of model, and the function that reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hostprep.errors import BadInputError
from hostprep.sizing import attention, latents, states
from hostprep.sizing.class_defaults import class_defaults
from hostprep.sizing.config import PUBLISHED_CONFIG, ModelConfig
from hostprep.sizing.dtypes import (
    AUTO,
    CacheTypes,
    DeclaredTypes,
    Resolver,
    TypeChoice,
    resolve_types,
)
from hostprep.sizing.model import Kind, Layers, Model
from hostprep.sizing.quantization import (
    declared_kv_dtype,
    declared_model_dtype,
    declared_state_dtype,
)

Reader = Callable[[ModelConfig, CacheTypes, int], Layers]
"""From a config, types, and the tokens that are drafted at once to what each layer keeps."""
Drafter = Callable[[ModelConfig, CacheTypes, Layers], Layers]
"""From a config, types and the model's own layers to what its draft layers keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is known of the models of one `model_type`."""

    read: Reader
    draft: Drafter | None = None
    """Of the layers with which it drafts tokens itself; None where engines know of none."""
    ignores: frozenset[str] = frozenset()
    """Fields that sound like caches, and that change none of this family's."""
    latent: bool = False
    indexed: bool = False
    compressed: bool = False
    index_is_plain: bool = False


def _copies(key: str, default: int = 0) -> Drafter:
    """Return the drafter of models whose draft layers are as many as the field says, all full.

    Each keeps what a layer of the model itself keeps that attends to everything.
    """

    def draft(config: ModelConfig, types: CacheTypes, layers: Layers) -> Layers:
        del types
        count = config.optional(key, default, least=0, most=64)
        kinds = (Kind.FULL, Kind.LATENT)
        full = next((one for one in layers if one and one[0].kind in kinds), None)
        if count and full is None:
            raise config.unknown(key, "is set, and no layer attends to everything")
        return (full,) * count if full is not None else ()

    return draft


def _indexed(config: ModelConfig, types: CacheTypes, layers: Layers) -> Layers:
    del layers
    count = config.optional("num_nextn_predict_layers", 0, least=0, most=64)
    return (latents.indexed_draft(config, types),) * count


_NEXTN = _copies("num_nextn_predict_layers")

_MAMBA_IGNORES = frozenset(
    {
        "chunk_size", "conv_bias", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias",
        "mamba_hidden_act", "mamba_norm_before_gate", "mamba_rms_norm", "mamba_use_mlp",
        "mamba_dt_rank", "mamba_inner_layernorms", "mamba_dt_min", "mamba_dt_max",
        "mamba_dt_limit", "mamba_dt_init_floor", "use_conv_bias", "use_mamba_kernels",
        "ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "mixer_rms_eps",
        "use_falcon_mambapy", "use_mambapy",
    }
)  # fmt: skip
_PHI = frozenset({"original_max_position_embeddings"})
_MINIMAX = frozenset({"full_attn_alpha_factor", "full_attn_beta_factor", "block_size"})
_MINIMAX |= {"linear_attn_alpha_factor", "linear_attn_beta_factor"}
_MINIMAX |= {"layernorm_full_attention_alpha", "layernorm_full_attention_beta"}
_MINIMAX |= {"layernorm_linear_attention_alpha", "layernorm_linear_attention_beta"}


def _minimax_m2(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what MiniMax-M2 keeps: everything everywhere, as its list of ones says."""
    kinds = config.per_layer("attn_type_list", int)
    if kinds is not None and set(kinds) != {1}:
        raise config.unknown("attn_type_list", "holds others than 1")
    return attention.window_layers(attention.no_window)(config, types, drafts)


def _windowed(
    rule: attention.Rule,
    draft: Drafter | None = None,
    ignores: frozenset[str] = frozenset(),
) -> Family:
    return Family(read=attention.window_layers(rule), draft=draft, ignores=ignores)


_NTH = attention.every_nth
_EVERY = attention.window_layers(attention.every_layer, list_decides=False)


def _phi3(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Phi-3 keeps. Phi-4-mini's `full_attn_mod` of 1 says what its class does."""
    if config.optional("full_attn_mod", 1) != 1:
        raise config.unknown("full_attn_mod", "is not 1: which layers have the window is not known")
    return _EVERY(config, types, drafts)


def _cohere2(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Command R7B keeps: windows first, then a layer that sees everything."""
    first = "local_attn_first"
    if config.text("order_of_interleaved_layers", first) != first:
        raise config.unknown("order_of_interleaved_layers", f"is not {first}")
    return attention.window_layers(_NTH(4, stated=True))(config, types, drafts)


FAMILIES: dict[str, Family] = {
    "apertus": _windowed(attention.no_window),
    "arcee": _windowed(attention.no_window),
    "cohere": _windowed(attention.no_window),
    "cohere2": Family(read=_cohere2),
    "ernie4_5": _windowed(attention.no_window),
    "exaone4": _windowed(attention.exaone_kinds),
    "exaone_moe": _windowed(attention.exaone_kinds),
    "gemma": _windowed(attention.no_window),
    "gemma2": _windowed(_NTH(2)),
    "gemma3": _windowed(_NTH(6, stated=True)),
    "gemma3_text": _windowed(_NTH(6, stated=True)),
    "gemma3n": Family(read=attention.gemma3n_layers),
    "gemma3n_text": Family(read=attention.gemma3n_layers),
    "gemma4": Family(read=attention.gemma4_layers),
    "gemma4_text": Family(read=attention.gemma4_layers),
    "gemma4_unified": Family(read=attention.gemma4_layers),
    "gemma4_unified_text": Family(read=attention.gemma4_layers),
    "glm": _windowed(attention.no_window),
    "glm4": _windowed(attention.no_window),
    "glm4_moe": _windowed(attention.no_window, draft=_NEXTN),
    "gpt_oss": _windowed(_NTH(2)),
    "granite": _windowed(attention.no_window),
    "granitemoe": _windowed(attention.no_window),
    "granitemoeshared": _windowed(attention.no_window),
    "llama": _windowed(attention.no_window),
    "llama4_text": Family(
        read=attention.llama4_layers,
        ignores=frozenset({"moe_layers"}),
    ),
    "mimo": _windowed(attention.switched_off, draft=_NEXTN),
    "mimo_v2_flash": Family(
        read=attention.mimo_v2_layers,
        draft=attention.mimo_v2_drafts,
        ignores=frozenset({"swa_rope_theta", "add_swa_attention_sink_bias"}),
    ),
    "minimax_m2": Family(read=_minimax_m2),
    **dict.fromkeys(
        ("minimax_m3", "minimax_m3_text", "minimax_m3_vl", "minimax_m3_vl_text"),
        Family(
            read=attention.minimax_m3_layers,
            indexed=True,
            index_is_plain=True,
        ),
    ),
    "ministral": _windowed(attention.every_layer),
    "ministral3": _windowed(attention.every_layer),
    "mistral": Family(read=_EVERY),
    "mixtral": Family(read=_EVERY),
    "nemotron": _windowed(attention.no_window),
    "nemotron-nas": Family(read=attention.nas_layers),
    "olmo": _windowed(attention.no_window),
    "olmo2": _windowed(attention.no_window),
    "olmo3": _windowed(_NTH(4)),
    "olmoe": _windowed(attention.no_window),
    "phi3": Family(read=_phi3, ignores=_PHI),
    "phimoe": Family(read=_EVERY, ignores=_PHI),
    "qwen2": _windowed(attention.from_layer),
    "qwen2_moe": _windowed(attention.switched_off),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        _windowed(attention.from_layer),
    ),
    "qwen3": _windowed(attention.from_layer),
    "qwen3_moe": _windowed(attention.switched_off),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_text"),
        _windowed(attention.no_window),
    ),
    **dict.fromkeys(
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        _windowed(attention.no_window),
    ),
    "seed_oss": _windowed(attention.no_window),
    "smollm3": _windowed(
        attention.switched_off,
        ignores=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    ),
    "solar_open": _windowed(attention.no_window),
    "stablelm": _windowed(attention.no_window),
    "starcoder2": Family(read=_EVERY),
    **dict.fromkeys(
        ("step3p5", "step3p7"),
        Family(
            read=attention.step_layers,
            draft=attention.step_drafts,
            ignores=frozenset({"use_rope_layers"}),
        ),
    ),
    # Latents.
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        Family(read=latents.latent_layers, draft=_NEXTN, latent=True),
    ),
    "glm4_moe_lite": Family(read=latents.latent_layers, draft=_NEXTN, latent=True),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        Family(
            read=latents.indexed_layers,
            draft=_indexed,
            latent=True,
            indexed=True,
        ),
    ),
    **dict.fromkeys(
        ("deepseek_v4", "deepseek_ref"),
        Family(
            read=latents.compressed_layers,
            draft=latents.compressed_drafts,
            indexed=True,
            compressed=True,
        ),
    ),
    # Recurrent states.
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        Family(
            read=states.delta_layers,
            draft=_copies("mtp_num_hidden_layers"),
            ignores=frozenset({"mtp_use_dedicated_embeddings"}),
        ),
    ),
    "qwen3_next": Family(
        read=states.delta_layers,
        # The checkpoints have one, and their files do not say so.
        draft=_copies("num_nextn_predict_layers", 1),
    ),
    "kimi_linear": Family(
        read=states.kda_layers,
        ignores=frozenset({"attn_res_block_size", "activation_situ_linear_beta"}),
        latent=True,
    ),
    **dict.fromkeys(
        ("minimax", "minimax_text_01", "minimax_m1"),
        Family(read=states.lightning_layers, ignores=_MINIMAX),
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        Family(
            read=states.short_conv_layers,
            ignores=frozenset({"conv_bias", "conv_dim_out", "conv_use_xavier_init"}),
        ),
    ),
    **dict.fromkeys(
        ("mamba", "falcon_mamba"),
        Family(
            read=states.mamba1_layers,
            ignores=_MAMBA_IGNORES,
        ),
    ),
    "jamba": Family(read=states.jamba_layers, ignores=_MAMBA_IGNORES),
    "mamba2": Family(
        read=states.mamba2_layers,
        ignores=_MAMBA_IGNORES,
    ),
    **dict.fromkeys(
        ("bamba", "granitemoehybrid"),
        Family(
            read=states.mixed_layers,
            ignores=_MAMBA_IGNORES,
        ),
    ),
    "falcon_h1": Family(
        read=states.falcon_h1_layers,
        ignores=_MAMBA_IGNORES,
    ),
    "nemotron_h": Family(
        read=states.nemotron_layers,
        draft=states.nemotron_drafts,
        ignores=_MAMBA_IGNORES | {"expand", "rescale_prenorm_residual"},
    ),
}
"""What is known of each kind of model, by its `model_type`."""

KINDS = tuple(sorted(FAMILIES))
"""Every `model_type` that is known."""

_REFUSED = {
    "phi3small": "blocksparse attention: which blocks an engine keeps of it is its own choice",
    "deepseek_v41": "Engram tables in host memory beside the caches, which are not reckoned here",
    "zamba2": "layers that share weights and keep caches of their own, which are not read here",
}
"""Kinds that are known and not sized, and why."""

_LONGEST = ("max_position_embeddings", "model_max_length", "max_seq_len", "seq_length")
"""Where models say how long a sequence can be; Kimi-Linear and Step have others than most."""
_CLASS_ENDS = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
_OF_DRAFTS = re.compile(r"nextn|mtp")
_PLAIN = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_OF_A_MODEL = ("model_type", "architectures", "num_hidden_layers")
_OTHER_CACHES = (
    "kv_lora_rank", "compress_ratios", "sliding_window", "layer_types", "hybrid_override_pattern",
    "linear_num_key_heads", "ssm_state_size", "state_size", "attention_chunk_size",
)  # fmt: skip
"""Fields of models whose cache is not keys and values of all tokens."""


def declared_types(config: ModelConfig, *, reads_kv: bool = True) -> DeclaredTypes:
    """Return what a checkpoint says of its caches' types, for rules that resolve `auto`.

    Raises BadInputError naming the field for a type, or with `reads_kv` a KV cache's quantization,
    that is not known, and for a kind of model that is not.
    """
    kind, family = _family_of(config)
    kv = declared_kv_dtype(config) if reads_kv else None
    config.read("quantization_config", "hf_quant_config")
    return DeclaredTypes(
        family=kind,
        model=declared_model_dtype(config),
        kv=kv,
        state=declared_state_dtype(config),
        is_latent=family.latent,
        has_index=family.indexed,
        is_compressed=family.compressed,
        index_is_plain=family.index_is_plain,
    )


def read_model(
    config: ModelConfig,
    *,
    name: str,
    choice: TypeChoice | None = None,
    drafts: int = 0,
    resolve: Resolver = resolve_types,
) -> Model:
    """Return what the model keeps of every sequence.

    `drafts`: tokens that are speculated at once; a model that drafts with layers of its own keeps
    keys of those too. `resolve`: how an engine resolves the types.
    Raises BadInputError naming the field, for a kind of model that is not known too, and for any
    field that tells about caches and that the kind's reader did not look at.
    """
    choice = choice or TypeChoice()
    kind, family = _family_of(config)
    config = config.of_class(class_defaults(kind))
    config.read("model_type", *family.ignores)
    _check_architectures(config, kind, family)
    declared = declared_types(config, reads_kv=choice.kv == AUTO)
    types = resolve(declared, choice)
    layers = family.read(config, types, drafts)
    _check_allocation(config, layers)
    draft_layers, notes = _draft_layers(config, family, types, layers, drafts)
    longest = next((key for key in _LONGEST if config.has(key)), None)
    positions = None if longest is None else config.integer(longest)
    config.check_all_read(kind)
    return Model(
        name=name,
        family=kind,
        layers=layers,
        draft_layers=draft_layers,
        max_positions=positions,
        types=types,
        notes=(*types.notes, *notes),
    )


def _check_allocation(config: ModelConfig, layers: Layers) -> None:
    """Refuse a transformers cache that windows would need where no layer has one.

    The others (`static`, `dynamic`, ...) say how much is allocated at once, not what is kept.
    """
    key = "cache_implementation"
    has_window = any(store.window is not None for layer in layers for store in layer)
    for value in (config.value(key), config.beside(key)):
        if not value or value in ("dynamic", "static", "offloaded", "offloaded_static"):
            continue
        if value not in ("hybrid", "hybrid_chunked", "sliding_window") or not has_window:
            raise config.unknown(key, f"is {value!r:.40}, and no layer has a window")


def with_class_defaults(config: ModelConfig) -> ModelConfig:
    """Return the config with what its kind's class fills in. Raises BadInputError as read_model."""
    kind, _ = _family_of(config)
    return config.of_class(class_defaults(kind))


def _draft_layers(
    config: ModelConfig, family: Family, types: CacheTypes, layers: Layers, drafts: int
) -> tuple[Layers, tuple[str, ...]]:
    """Return the layers that draft, if any do, and what to say of them."""
    if not drafts:
        config.read_matching(_OF_DRAFTS)
        return (), ()
    if family.draft is None and (told := next(config.telling(_OF_DRAFTS), None)):
        raise config.unknown(
            told,
            "says that the model drafts with layers of its own, and what they keep is not known",
            "size without --speculative-tokens",
        )
    found = family.draft(config, types, layers) if family.draft else ()
    keeping = sum(bool(layer) for layer in found)
    if not keeping:
        note = (
            "drafts come from elsewhere (n-grams, another model): the caches of a draft model are "
            "not in these numbers, size it by its own config.json"
        )
    else:
        keep = "layers keep" if keeping > 1 else "layer keeps"
        note = (
            f"{keeping} {keep} a cache for drafts that the model makes itself; drafts from "
            "elsewhere (n-grams, another model) would do without"
        )
    return found, (note,)


def _family_of(config: ModelConfig) -> tuple[str, Family]:
    kind = config.text("model_type")
    if kind in _REFUSED:
        raise config.unknown("model_type", f"{kind} has {_REFUSED[kind]}")
    family = FAMILIES.get(kind)
    if family is None:
        raise _unknown(config, kind)
    return kind, family


def _check_architectures(config: ModelConfig, kind: str, family: Family) -> None:
    """Refuse the class of another known kind, of the whole too: engines choose their code by it."""
    whole = config.beside("architectures")
    said = [("architectures", name) for name in config.listed("architectures", str) or ()]
    said += [
        ("architectures of the whole", name) for name in (whole if isinstance(whole, list) else ())
    ]
    said.append(("model_type of the whole", config.beside("model_type")))
    for field, name in said:
        stem = _plain_name(_CLASS_ENDS.sub("", name)) if isinstance(name, str) else ""
        other = next((one for one in KINDS if _plain_name(one) == stem), None)
        if other is not None and FAMILIES[other] is not family and stem != _plain_name(kind):
            raise config.wrong(
                "model_type", f"is {kind}, and {field} {other}: they contradict each other"
            )


def _plain_name(name: str) -> str:
    """Return a kind's or class's name without what they write differently."""
    return name.lower().replace("_", "").replace("-", "").removesuffix("text")


def _unknown(config: ModelConfig, kind: str) -> BadInputError:
    """Return the error: which fields are missing to read it as the plainest kind, or forbid that.

    A file without any of a model's fields (a tokenizer's, or a generation_config.json) is reported
    as such: a list of what it lacks would not help.
    """
    if not any(config.has(key) for key in _OF_A_MODEL):
        return BadInputError(
            f"{config.source}: is no model's config.json: {', '.join(_OF_A_MODEL)} are missing",
            reason="UnknownArchitecture",
            remedy=PUBLISHED_CONFIG,
        )
    missing = [key for key in _PLAIN if not config.has(key)]
    if config.has("hidden_size") and "head_dim" in missing:
        missing.remove("head_dim")  # hidden_size / num_attention_heads then
    strange = [key for key in _OTHER_CACHES if config.has(key)]
    why = f"model_type {kind[:40]!r} is not known" if kind else "model_type is missing"
    if missing:
        why += f"; missing: {', '.join(missing)}"
    if strange:
        why += f"; {', '.join(strange)} would have to be understood"
    return BadInputError(
        f"{config.source}: {why}",
        reason="UnknownArchitecture",
        remedy="give one of a known kind; if every layer keeps keys and values of all tokens, "
        'write "model_type": "llama"' + (", and what is missing" if missing else ""),
    )
