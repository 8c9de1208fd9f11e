"""What an engine looks at before it sizes anything: with these it does not start, or not so.

Read from vLLM 0.32.0 (config/model.py, transformers_utils/model_arch_config_convertor.py,
model_executor/models/registry.py, layers/mamba/mamba_mixer2.py), SGLang 0.5.23
(configs/model_config.py, utils/hf_transformers/common.py) and TensorRT-LLM
(_torch/pyexecutor/model_engine.py, _torch/models/modeling_utils.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hostprep.errors import BadInputError
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.families import with_class_defaults
from hostprep.sizing.groups import Limits

ALLOW_LONGER = {
    "vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    "trtllm": "TLLM_ALLOW_LONG_MAX_MODEL_LEN",
}
"""The variable of its environment with which an engine serves more tokens than the model has."""

_POSITIONS = (
    "max_position_embeddings", "max_seq_len", "seq_length", "model_max_length",
    "max_sequence_length", "max_seq_length",
)  # fmt: skip
_SGLANG_POSITIONS = (
    "max_sequence_length", "seq_length", "max_seq_len", "model_max_length",
    "max_position_embeddings",
)  # fmt: skip
"""In SGLang's order: the first that is there counts."""
_SCALED_ALREADY = frozenset({"su", "longrope", "llama3", "yarn"})
"""Kinds of scaled positions whose models say the longest sequence with the scaling in it."""
_VLLM_SCALED_ALREADY = _SCALED_ALREADY | {"deepseek_yarn", "deepseek_llama_scaling"}
_MAMBA2 = frozenset({"mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"})

VLLM_CLASSES = frozenset(
    {
        "ApertusForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM",
        "DeciLMForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM",
        "DeepseekV4ForConditionalGeneration", "Ernie4_5ForCausalLM", "Exaone4ForCausalLM",
        "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "FalconH1ForCausalLM",
        "FalconMambaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM",
        "Gemma3nForConditionalGeneration", "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
        "GemmaForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM",
        "GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM", "JambaForCausalLM",
        "KimiK25ForConditionalGeneration", "KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM", "KimiVLForConditionalGeneration", "LLaMAForCausalLM",
        "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration", "LlamaForCausalLM", "Mamba2ForCausalLM",
        "MambaForCausalLM", "MiMoForCausalLM", "MiMoV2FlashForCausalLM",
        "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration", "Ministral3ForCausalLM",
        "Mistral3ForConditionalGeneration", "MistralForCausalLM", "MixtralForCausalLM",
        "NemotronForCausalLM", "NemotronHForCausalLM", "OlmoeForCausalLM",
        "Phi3ForCausalLM", "PhiMoEForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
        "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration", "StableLmForCausalLM", "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    }
)  # fmt: skip
"""Of vLLM's own model classes those of the kinds that are sized here (registry.py)."""


def check_starts(
    engine: str, config: ModelConfig, limits: Limits, *, allows_longer: bool = False
) -> None:
    """Refuse what the engine itself refuses at its start, or serves otherwise than it is asked.

    `allows_longer`: whether the engine's variable in `ALLOW_LONGER` is set.
    Raises BadInputError naming the option and the field.
    """
    config = with_class_defaults(config)
    _check_heads(config, limits.tensor_parallel)
    if not allows_longer:
        _check_length(engine, config, limits.max_seq_len)
    if engine == "vllm":
        _check_class(config)
        _check_state_groups(config, limits.tensor_parallel)


def _check_heads(config: ModelConfig, ranks: int) -> None:
    """Refuse ranks that attention heads do not divide into, whatever is kept of them.

    vLLM refuses it for every model, and so do SGLang's and TensorRT-LLM's attention layers. Heads
    of keys and values are looked at with what they keep: Vectors.heads_on_rank.
    """
    for key in ("num_attention_heads", "swa_num_attention_heads"):
        heads = config.integer(key) if config.has(key) else 0
        if heads % ranks:
            raise BadInputError(
                f"--tp: is {ranks}, which does not divide {heads} attention heads ({key})",
                remedy="give a number that does",
            )


def _check_length(engine: str, config: ModelConfig, length: int) -> None:
    longest = longest_served(engine, config)
    if longest is not None and length > longest:
        raise BadInputError(
            f"--max-seq-len: is {length}, and {engine} serves {longest} tokens of this model at "
            "most, by its max_position_embeddings and scaling",
            remedy=f"give --max-seq-len {longest} or less, or set {ALLOW_LONGER[engine]}=1 for "
            "both, as the engine has it then",
        )


def longest_served(engine: str, config: ModelConfig) -> int | None:
    """Return the longest request that the engine takes; None where the config does not say.

    The model's own length, times the factor of kinds of positions that are scaled while serving.
    """
    if engine == "sglang":
        first = next((key for key in _SGLANG_POSITIONS if config.has(key)), None)
        if first is None:
            return None
        scaling = _rope(config)
        is_whole = "original_max_position_embeddings" in scaling or _kind(scaling) == "llama3"
        return int(config.integer(first) * (1.0 if is_whole else _factor(scaling)))
    if engine == "trtllm":
        if not config.has("max_position_embeddings"):
            return None
        scaling = _rope(config)
        factor = 1.0 if _kind(scaling) in _SCALED_ALREADY else _factor(scaling)
        return math.ceil(config.integer("max_position_embeddings") * factor)
    known = [config.integer(key) for key in _POSITIONS if config.has(key)]
    if config.has("model_max_length"):
        known = [config.integer("model_max_length")]
    if not known:
        return None
    factor = 1.0
    if not config.text("model_type").startswith("gemma3"):
        for scaling in _each_rope(_rope(config)):
            if _kind(scaling) not in _VLLM_SCALED_ALREADY:
                factor = _factor(scaling, factor)
    return int(min(known) * factor)


def _rope(config: ModelConfig) -> Mapping[str, Any]:
    for key in ("rope_parameters", "rope_scaling"):
        value = config.value(key)
        if isinstance(value, dict):
            return value
    return {}


def _each_rope(scaling: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the scaling, or that of each kind of layers where they have their own."""
    nested = [value for value in scaling.values() if isinstance(value, dict)]
    if nested:
        yield from nested
    else:
        yield scaling


def _kind(scaling: Mapping[str, Any]) -> object:
    return scaling.get("rope_type", scaling.get("type"))


def _factor(scaling: Mapping[str, Any], default: float = 1.0) -> float:
    """Return by how much positions are scaled; what is no number scales nothing."""
    value = scaling.get("factor", default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 1.0
    return float(value) if 0 < value < 1 << 20 else 1.0


def _check_class(config: ModelConfig) -> None:
    """Refuse models that vLLM has no class of its own for.

    It takes Transformers' then, whose caches are divided otherwise: other states, other limits.
    """
    whole = config.beside("architectures")
    named = whole if isinstance(whole, list) and whole else config.value("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if VLLM_CLASSES.intersection(names):
        return
    said = f"names {names[0][:60]!r}" if names else "is missing"
    raise BadInputError(
        f"{config.source}: architectures {said}, by which vLLM chooses its code: it has no class "
        "of its own for that, and how it serves the model then is not known here",
        reason="UnknownEngineRule",
        remedy="give the config.json as published, with its architectures, or leave --engine out",
    )


def _check_state_groups(config: ModelConfig, ranks: int) -> None:
    """Refuse ranks that Mamba 2's groups do not divide into, which one group alone may."""
    kind = config.text("model_type")
    keys = ("n_groups", "mamba_n_groups")
    key = next((key for key in keys if config.has(key)), None)
    if kind not in _MAMBA2 or key is None:
        return
    groups = config.integer(key)
    if groups != 1 and groups % ranks:
        raise BadInputError(
            f"--tp: is {ranks}, which does not divide {groups} groups of states ({key}): vLLM "
            "does not start with that",
            remedy="give a number that does",
        )
