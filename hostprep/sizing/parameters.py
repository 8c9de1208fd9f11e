"""The weights of models whose every tensor config.json tells.

For folders without their safetensors files. Kinds of models, and ways of quantizing, that are not
here are not guessed: their files' index says it, or --weights.
Source of the shapes: transformers 5.19, the modeling_*.py of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hostprep.errors import BadInputError
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.weight_types import tensor_sizes
from hostprep.sizing.weights import Tensor, unknown_weights

_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def reckon(
    document: Mapping[str, Any], *, source: str, modelopt: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """Return every tensor of the model, those of a layer's experts together.

    `document`: config.json as it is; `modelopt`: hf_quant_config.json beside it. Layers that draft
    are left out. Raises BadInputError, asking for --weights, where the kind of model or its
    quantization is not known to the last tensor.
    """
    kind = document.get("model_type")
    shapes = _KINDS.get(kind) if isinstance(kind, str) else None
    if shapes is None:
        raise unknown_weights(source, f"the tensors of {str(kind)[:40]!r} are not known")
    text = document.get("text_config", {})
    if not isinstance(text, dict) or (kind in _SEEING) is not bool(text):
        raise unknown_weights(source, "text_config is not as usual in its kind")
    fields = {**document, **text}
    if fields.get("mlp_only_layers"):
        raise unknown_weights(source, "mlp_only_layers is not empty")
    plain = "bfloat16" if kind in ("gpt_oss", "minimax_m2") else None  # their files name none
    bits = _BITS.get(str(fields.get("dtype") or fields.get("torch_dtype") or plain))
    if bits is None:
        raise unknown_weights(source, "dtype is none of bfloat16, float16 and float32")
    size = tensor_sizes(
        document.get("quantization_config"), modelopt, kind == "gpt_oss", bits, source
    )
    vision = document.get("vision_config")
    try:
        found = list(shapes(ModelConfig(fields, source=source)))
        if kind in _SEEING:
            if not isinstance(vision, dict):
                raise unknown_weights(source, "vision_config is missing")
            found += _qwen_vision(ModelConfig(vision, source=source, path="vision_config."))
        return [Tensor(name, size(name, shape), len(shape)) for name, shape in found]
    except BadInputError as error:
        raise unknown_weights(source, error.message.removeprefix(f"{source}: ")) from error


_MOST_BLOCKS = 1024
"""Of what a model sees with; the largest have about 60."""
_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


def _ends(config: ModelConfig, *, tied: bool = False, root: str = "model") -> _Shapes:
    vocabulary, hidden = config.integer("vocab_size"), config.integer("hidden_size")
    yield f"{root}.embed_tokens.weight", (vocabulary, hidden)
    yield f"{root}.norm.weight", (hidden,)
    if not config.flag("tie_word_embeddings", default=tied):
        yield "lm_head.weight", (vocabulary, hidden)


def _linear(name: str, out: int, into: int, *, bias: bool = False) -> _Shapes:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _attention(
    config: ModelConfig,
    at: str,
    *,
    bias: bool,
    out_bias: bool,
    head_norm: bool = False,
    own_size: bool = True,
    gated: bool = False,
) -> _Shapes:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.optional("num_key_value_heads", heads)
    size = config.integer("head_dim") if own_size else config.optional("head_dim", hidden // heads)
    queries = heads * size * (2 if gated else 1)
    yield from _linear(f"{at}.self_attn.q_proj", queries, hidden, bias=bias)
    yield from _linear(f"{at}.self_attn.k_proj", kv_heads * size, hidden, bias=bias)
    yield from _linear(f"{at}.self_attn.v_proj", kv_heads * size, hidden, bias=bias)
    yield from _linear(f"{at}.self_attn.o_proj", hidden, heads * size, bias=out_bias)
    if head_norm:
        yield f"{at}.self_attn.q_norm.weight", (size,)
        yield f"{at}.self_attn.k_norm.weight", (size,)


def _mlp(config: ModelConfig, at: str, width: int, *, bias: bool = False) -> _Shapes:
    hidden = config.integer("hidden_size")
    yield from _linear(f"{at}.gate_proj", width, hidden, bias=bias)
    yield from _linear(f"{at}.up_proj", width, hidden, bias=bias)
    yield from _linear(f"{at}.down_proj", hidden, width, bias=bias)


def _experts(config: ModelConfig, at: str, count: int, width: int) -> _Shapes:
    hidden = config.integer("hidden_size")
    yield f"{at}.gate.weight", (count, hidden)
    yield f"{at}.experts.gate_proj.weight", (count, width, hidden)
    yield f"{at}.experts.up_proj.weight", (count, width, hidden)
    yield f"{at}.experts.down_proj.weight", (count, hidden, width)


def _norms(config: ModelConfig, at: str, *names: str) -> _Shapes:
    for name in ("input_layernorm", "post_attention_layernorm", *names):
        yield f"{at}.{name}.weight", (config.integer("hidden_size"),)


def _layers(config: ModelConfig, root: str = "model") -> Iterator[tuple[int, str]]:
    return ((index, f"{root}.layers.{index}") for index in range(config.layers()))


def _llama(config: ModelConfig) -> _Shapes:
    """Yield Llama's and Mistral's tensors."""
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    yield from _ends(config)
    for _, at in _layers(config):
        yield from _attention(config, at, bias=bias, out_bias=bias, own_size=False)
        yield from _mlp(config, f"{at}.mlp", config.integer("intermediate_size"), bias=mlp_bias)
        yield from _norms(config, at)


def _qwen2(config: ModelConfig) -> _Shapes:
    yield from _ends(config)
    for _, at in _layers(config):
        yield from _attention(config, at, bias=True, out_bias=False, own_size=False)
        yield from _mlp(config, f"{at}.mlp", config.integer("intermediate_size"))
        yield from _norms(config, at)


def _qwen3(config: ModelConfig, root: str = "model") -> _Shapes:
    """Yield Qwen 3's tensors, with experts or without."""
    bias = config.flag("attention_bias", default=False)
    is_moe = config.has("num_experts")
    step = config.optional("decoder_sparse_step", 1) if is_moe else 1
    yield from _ends(config, root=root)
    for index, at in _layers(config, root):
        yield from _attention(config, at, bias=bias, out_bias=bias, head_norm=True)
        if is_moe and (index + 1) % step == 0:
            width = config.integer("moe_intermediate_size")
            yield from _experts(config, f"{at}.mlp", config.integer("num_experts"), width)
        else:
            yield from _mlp(config, f"{at}.mlp", config.integer("intermediate_size"))
        yield from _norms(config, at)


def _qwen3_vl(config: ModelConfig) -> _Shapes:
    yield from _qwen3(config, _TEXT)


def _qwen3_5(config: ModelConfig) -> _Shapes:
    """Yield the tensors of Qwen 3.5: layers that attend, with a gate, and delta nets."""
    bias = config.flag("attention_bias", default=False)
    hidden, width = config.integer("hidden_size"), config.optional("moe_intermediate_size", 0)
    kinds = config.per_layer("layer_types", str)
    if kinds is None:
        raise config.missing("layer_types")
    yield from _ends(config, root=_TEXT)
    for index, at in _layers(config, _TEXT):
        if kinds[index] == "linear_attention":
            yield from _delta_net(config, f"{at}.linear_attn")
        else:
            yield from _attention(config, at, bias=bias, out_bias=bias, head_norm=True, gated=True)
        if config.has("num_experts"):
            yield from _experts(config, f"{at}.mlp", config.integer("num_experts"), width)
            shared = config.integer("shared_expert_intermediate_size")
            yield from _mlp(config, f"{at}.mlp.shared_expert", shared)
            yield f"{at}.mlp.shared_expert_gate.weight", (1, hidden)
        else:
            yield from _mlp(config, f"{at}.mlp", config.integer("intermediate_size"))
        yield from _norms(config, at)


def _delta_net(config: ModelConfig, at: str) -> _Shapes:
    hidden, heads = config.integer("hidden_size"), config.integer("linear_num_value_heads")
    size = config.integer("linear_value_head_dim")
    keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
    mixed = 2 * keys + heads * size
    yield f"{at}.conv1d.weight", (mixed, 1, config.integer("linear_conv_kernel_dim"))
    yield f"{at}.dt_bias", (heads,)
    yield f"{at}.A_log", (heads,)
    yield f"{at}.norm.weight", (size,)
    yield f"{at}.out_proj.weight", (hidden, heads * size)
    yield f"{at}.in_proj_qkv.weight", (mixed, hidden)
    yield f"{at}.in_proj_z.weight", (heads * size, hidden)
    yield f"{at}.in_proj_b.weight", (heads, hidden)
    yield f"{at}.in_proj_a.weight", (heads, hidden)


def _qwen_vision(vision: ModelConfig) -> _Shapes:
    """Yield the tensors of what Qwen 3 and 3.5 see with."""
    hidden, width = vision.integer("hidden_size"), vision.integer("intermediate_size")
    patch, at = vision.integer("patch_size"), "model.visual"
    frames, channels = vision.integer("temporal_patch_size"), vision.integer("in_channels")
    yield f"{at}.patch_embed.proj.weight", (hidden, channels, frames, patch, patch)
    yield f"{at}.patch_embed.proj.bias", (hidden,)
    yield f"{at}.pos_embed.weight", (vision.integer("num_position_embeddings"), hidden)
    for index in range(vision.integer("depth", most=_MOST_BLOCKS)):
        block = f"{at}.blocks.{index}"
        for norm in ("norm1", "norm2"):
            yield f"{block}.{norm}.weight", (hidden,)
            yield f"{block}.{norm}.bias", (hidden,)
        yield from _linear(f"{block}.attn.qkv", 3 * hidden, hidden, bias=True)
        yield from _linear(f"{block}.attn.proj", hidden, hidden, bias=True)
        yield from _linear(f"{block}.mlp.linear_fc1", width, hidden, bias=True)
        yield from _linear(f"{block}.mlp.linear_fc2", hidden, width, bias=True)
    merged = hidden * vision.integer("spatial_merge_size") ** 2
    mergers = [("merger", hidden)]
    for index in vision.listed("deepstack_visual_indexes", int) or ():
        mergers.append((f"deepstack_merger_list.{index}", merged))
    for name, normed in mergers:
        yield f"{at}.{name}.norm.weight", (normed,)
        yield f"{at}.{name}.norm.bias", (normed,)
        yield from _linear(f"{at}.{name}.linear_fc1", merged, merged, bias=True)
        out = vision.integer("out_hidden_size")
        yield from _linear(f"{at}.{name}.linear_fc2", out, merged, bias=True)


def _minimax_m2(config: ModelConfig) -> _Shapes:
    heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    size, count = config.integer("head_dim"), config.integer("num_local_experts")
    if not config.flag("use_qk_norm", default=True) or config.optional(
        "shared_intermediate_size", 0, least=0
    ):
        raise unknown_weights(
            config.source, "use_qk_norm or shared_intermediate_size is not as in M2"
        )
    yield from _ends(config)
    for _, at in _layers(config):
        yield from _attention(config, at, bias=False, out_bias=False)
        yield f"{at}.self_attn.q_norm.weight", (heads * size,)
        yield f"{at}.self_attn.k_norm.weight", (kv_heads * size,)
        at_moe = f"{at}.block_sparse_moe"
        yield from _experts(config, at_moe, count, config.integer("intermediate_size"))
        yield f"{at_moe}.e_score_correction_bias", (count,)
        yield from _norms(config, at)


def _nemotron_h(config: ModelConfig) -> _Shapes:
    """Yield the tensors of Nemotron-H and Nemotron 3: each layer mixes by one thing alone."""
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    if config.flag("use_bias", default=False) or config.flag("mlp_bias", default=False):
        raise unknown_weights(config.source, "use_bias or mlp_bias is set")
    kinds = config.listed("layers_block_type", str)
    if kinds is None:
        kinds = tuple(config.text("hybrid_override_pattern"))
    mixers = {"M": _mamba2, "*": _attention_mixer, "-": _plain_mlp, "E": _latent_experts}
    mixers |= {"mamba": _mamba2, "attention": _attention_mixer, "moe": _latent_experts}
    mixers["mlp"] = _plain_mlp
    if not kinds or not set(kinds) <= set(mixers):
        raise unknown_weights(
            config.source, "layers_block_type or hybrid_override_pattern is missing"
        )
    yield "backbone.embeddings.weight", (vocabulary, hidden)
    yield "backbone.norm_f.weight", (hidden,)
    if not config.flag("tie_word_embeddings", default=False):
        yield "lm_head.weight", (vocabulary, hidden)
    for index, kind in enumerate(kinds):
        yield f"backbone.layers.{index}.norm.weight", (hidden,)
        yield from mixers[kind](config, f"backbone.layers.{index}.mixer")


def _mamba2(config: ModelConfig, at: str) -> _Shapes:
    hidden, heads = config.integer("hidden_size"), config.integer("mamba_num_heads")
    inner = heads * config.integer("mamba_head_dim")
    mixed = inner + 2 * config.integer("n_groups") * config.integer("ssm_state_size")
    yield f"{at}.conv1d.weight", (mixed, 1, config.integer("conv_kernel"))
    if config.flag("use_conv_bias", default=True):
        yield f"{at}.conv1d.bias", (mixed,)
    yield f"{at}.in_proj.weight", (inner + mixed + heads, hidden)
    yield f"{at}.out_proj.weight", (hidden, inner)
    yield f"{at}.norm.weight", (inner,)
    for name in ("dt_bias", "A_log", "D"):
        yield f"{at}.{name}", (heads,)


def _attention_mixer(config: ModelConfig, at: str) -> _Shapes:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    size = config.integer("head_dim" if config.has("head_dim") else "attention_head_dim")
    kept = config.integer("num_key_value_heads") * size
    yield f"{at}.q_proj.weight", (heads * size, hidden)
    yield f"{at}.k_proj.weight", (kept, hidden)
    yield f"{at}.v_proj.weight", (kept, hidden)
    yield f"{at}.o_proj.weight", (hidden, heads * size)


def _plain_mlp(config: ModelConfig, at: str, width: int | None = None) -> _Shapes:
    """Yield an MLP without a gate."""
    hidden, inner = config.integer("hidden_size"), width or config.integer("intermediate_size")
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


def _latent_experts(config: ModelConfig, at: str) -> _Shapes:
    hidden, count = config.integer("hidden_size"), config.integer("n_routed_experts")
    width, into = config.integer("moe_intermediate_size"), hidden
    yield f"{at}.gate.weight", (count, hidden)
    yield f"{at}.gate.e_score_correction_bias", (count,)
    if config.has("moe_latent_size"):
        into = config.integer("moe_latent_size")
        yield f"{at}.fc1_latent_proj.weight", (into, hidden)
        yield f"{at}.fc2_latent_proj.weight", (hidden, into)
    yield f"{at}.experts.up_proj.weight", (count, width, into)
    yield f"{at}.experts.down_proj.weight", (count, into, width)
    shared = config.integer("moe_shared_expert_intermediate_size")
    yield from _plain_mlp(config, f"{at}.shared_experts", shared)


def _mixtral(config: ModelConfig) -> _Shapes:
    yield from _ends(config)
    for _, at in _layers(config):
        yield from _attention(config, at, bias=False, out_bias=False, own_size=False)
        count, width = config.integer("num_local_experts"), config.integer("intermediate_size")
        yield from _experts(config, f"{at}.mlp", count, width)
        yield from _norms(config, at)


def _gpt_oss(config: ModelConfig) -> _Shapes:
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    count = config.integer("num_local_experts")
    bias = config.flag("attention_bias", default=True)
    yield from _ends(config)
    for _, at in _layers(config):
        yield from _attention(config, at, bias=bias, out_bias=bias)
        yield f"{at}.self_attn.sinks", (config.integer("num_attention_heads"),)
        yield from _linear(f"{at}.mlp.router", count, hidden, bias=True)
        yield f"{at}.mlp.experts.gate_up_proj", (count, hidden, 2 * width)
        yield f"{at}.mlp.experts.gate_up_proj_bias", (count, 2 * width)
        yield f"{at}.mlp.experts.down_proj", (count, width, hidden)
        yield f"{at}.mlp.experts.down_proj_bias", (count, hidden)
        yield from _norms(config, at)


def _gemma(config: ModelConfig) -> _Shapes:
    """Yield the tensors of Gemma 2 and of Gemma 3's text models; the output's are the input's."""
    is_third = config.text("model_type") == "gemma3_text"
    yield from _ends(config, tied=True)
    for _, at in _layers(config):
        yield from _attention(config, at, bias=False, out_bias=False, head_norm=is_third)
        yield from _mlp(config, f"{at}.mlp", config.integer("intermediate_size"))
        yield from _norms(config, at, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _glm4_moe(config: ModelConfig) -> _Shapes:
    bias = config.flag("attention_bias", default=False)
    norm = config.flag("use_qk_norm", default=False)
    yield from _ends(config)
    for index, at in _layers(config):
        yield from _attention(config, at, bias=bias, out_bias=False, head_norm=norm)
        yield from _shared_experts(config, at, index)
        yield from _norms(config, at)


def _shared_experts(config: ModelConfig, at: str, index: int) -> _Shapes:
    """Yield a layer's part of DeepSeek's pattern: dense first, then routed and shared experts."""
    kinds = config.per_layer("mlp_layer_types", str)
    is_dense = index < config.integer("first_k_dense_replace", least=0)
    if kinds is not None and is_dense is not (kinds[index] == "dense"):
        raise unknown_weights(config.source, "mlp_layer_types and first_k_dense_replace differ")
    if is_dense:
        yield from _mlp(config, f"{at}.mlp", config.integer("intermediate_size"))
        return
    count, width = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    yield from _experts(config, f"{at}.mlp", count, width)
    yield f"{at}.mlp.gate.e_score_correction_bias", (count,)
    shared = config.optional("n_shared_experts", 0, least=0)
    if shared:
        yield from _mlp(config, f"{at}.mlp.shared_experts", shared * width)


def _deepseek(config: ModelConfig) -> _Shapes:
    """Yield the tensors of DeepSeek V3 and V3.2, Kimi K2, and GLM 5, whose attention is MLA."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    value, rank = config.integer("v_head_dim"), config.integer("kv_lora_rank")
    query = config.integer("q_lora_rank")
    if config.flag("attention_bias", default=False) or config.optional("moe_layer_freq", 1) != 1:
        raise unknown_weights(
            config.source, "attention_bias or moe_layer_freq is not as in DeepSeek-V3"
        )
    indexed = config.per_layer("indexer_types", str)
    yield from _ends(config)
    for index, layer in _layers(config):
        at = f"{layer}.self_attn"
        yield f"{at}.q_a_proj.weight", (query, hidden)
        yield f"{at}.q_a_layernorm.weight", (query,)
        yield f"{at}.q_b_proj.weight", (heads * (nope + rope), query)
        yield f"{at}.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
        yield f"{at}.kv_a_layernorm.weight", (rank,)
        yield f"{at}.kv_b_proj.weight", (heads * (nope + value), rank)
        yield f"{at}.o_proj.weight", (hidden, heads * value)
        if config.has("index_head_dim") and (indexed is None or indexed[index] == "full"):
            keys, count = config.integer("index_head_dim"), config.integer("index_n_heads")
            yield f"{at}.indexer.wq_b.weight", (count * keys, query)
            yield f"{at}.indexer.wk.weight", (keys, hidden)
            yield f"{at}.indexer.k_norm.weight", (keys,)
            yield f"{at}.indexer.k_norm.bias", (keys,)
            yield f"{at}.indexer.weights_proj.weight", (count, hidden)
        yield from _shared_experts(config, layer, index)
        yield from _norms(config, layer)


_KINDS: dict[str, Callable[[ModelConfig], _Shapes]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "minimax_m2": _minimax_m2,
    "nemotron_h": _nemotron_h,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "glm_moe_dsa": _deepseek,
}

_SEEING = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Kinds whose language model's fields are in text_config."""
_TEXT = "model.language_model"
