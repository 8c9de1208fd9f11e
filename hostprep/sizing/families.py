"""From a config to a model: each known kind of model, and the function that reads it."""

from __future__ import annotations

from collections.abc import Callable

from hostprep.errors import BadInputError
from hostprep.sizing import attention, states
from hostprep.sizing.config import DS_MLA, PUBLISHED_CONFIG, CacheTypes, ModelConfig, TypeChoice
from hostprep.sizing.model import Layers, Model

_ATTENTION = (
    "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen2_5_vl_text", "qwen3_vl_text", "phi3", "starcoder2", "cohere", "cohere2", "glm4",
    "glm4_moe", "granite", "olmo2", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4",
    "gemma4_text", "gpt_oss",
)  # fmt: skip
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa")
_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_MAMBA1 = ("mamba", "falcon_mamba", "jamba")
_MAMBA2 = ("mamba2", "bamba", "granitemoehybrid", "falcon_h1")

_COMPRESSED = "deepseek_v4"

_READERS: dict[str, Callable[[ModelConfig, CacheTypes, int], Layers]] = {
    **dict.fromkeys(_ATTENTION, lambda config, types, _: attention.attention_layers(config, types)),
    **dict.fromkeys(_LATENT, lambda config, types, _: attention.latent_layers(config, types)),
    _COMPRESSED: lambda config, types, _: attention.compressed_layers(config, types),
    **dict.fromkeys(_DELTA, states.delta_layers),
    **dict.fromkeys(_MAMBA1, lambda config, types, _: states.mamba1_layers(config, types)),
    **dict.fromkeys(_MAMBA2, states.mamba2_layers),
    "nemotron_h": states.nemotron_layers,
}
"""What reads the config of each kind of model, by its `model_type`."""

KINDS = tuple(sorted(_READERS))
"""Every `model_type` that is known."""

_PLAIN = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_OF_A_MODEL = ("model_type", "architectures", "num_hidden_layers")
_OTHER_CACHES = (
    "kv_lora_rank", "compress_ratios", "sliding_window", "layer_types", "hybrid_override_pattern",
    "linear_num_key_heads", "ssm_state_size", "state_size", "attention_chunk_size",
)  # fmt: skip
"""Fields of models whose cache is not keys and values of all tokens."""


def read_model(
    config: ModelConfig, *, name: str, choice: TypeChoice | None = None, drafts: int = 0
) -> Model:
    """Return what the model keeps of every sequence.

    `drafts`: tokens that are speculated at once. Raises BadInputError naming the field, for a
    kind of model that is not known too.
    """
    choice = choice or TypeChoice()
    kind = config.text("model_type")
    read_layers = _READERS.get(kind)
    if read_layers is None:
        raise _unknown(config, kind)
    if choice.kv == DS_MLA and kind not in (*_LATENT, _COMPRESSED):
        raise BadInputError(
            f"--kv-dtype: {DS_MLA} is a way to store latents, and {kind} has none",
            remedy="choose fp8",
        )
    types = CacheTypes.of(config, choice)
    layers = read_layers(config, types, drafts)
    longest = "max_position_embeddings"
    positions = config.integer(longest) if config.has(longest) else None
    return Model(name=name, family=kind, layers=layers, max_positions=positions, dtype=types.model)


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
