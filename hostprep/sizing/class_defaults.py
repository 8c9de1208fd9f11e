"""What the configuration class of each kind of model fills in where a published file is silent.

Source: transformers 5.19, models/*/configuration_*.py, the classes' own fields; for kinds that it
does not have, what the models' own code or the engines' classes say. Only fields that caches depend
on. None means that the class computes it: `head_dim` from the hidden size, heads of keys from those
of queries. The number of layers is never filled in: every published file has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Defaults = Mapping[str, Any]

_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")

_HEADS: dict[str, tuple[int | None, ...]] = {
    # kind: attention heads, heads of keys, head_dim, max_position_embeddings
    "apertus": (32, None, None, 65_536),
    "arcee": (32, None, None, 4096),
    "bamba": (32, 8, None, 262_144),
    "cohere": (64, None, None, 8192),
    "cohere2": (64, None, None, 8192),
    "dots1": (32, 32, None, 2048),
    "ernie4_5": (16, 2, 128, 131_072),
    "ernie4_5_moe": (20, 4, None, 131_072),
    "exaone4": (32, 32, None, 2048),
    "exaone_moe": (32, 32, None, 2048),
    "falcon_h1": (32, 8, None, 8192),
    "gemma": (16, 16, 256, 8192),
    "gemma2": (8, 4, 256, 8192),
    "gemma3_text": (8, 4, 256, 131_072),
    "gemma3n_text": (8, 2, 256, 32_768),
    "gemma4_text": (8, 4, 256, 131_072),
    "gemma4_unified_text": (8, 4, 256, 262_144),
    "glm": (32, 2, 128, 131_072),
    "glm4": (32, 2, 128, 131_072),
    "glm4_moe": (96, 8, None, 131_072),
    "gpt_oss": (64, 8, 64, 131_072),
    "granite": (32, None, None, 2048),
    "granitemoe": (32, None, None, 2048),
    "granitemoehybrid": (32, None, None, 2048),
    "granitemoeshared": (32, None, None, 2048),
    "jamba": (32, 8, None, 262_144),
    "lfm2": (32, 8, None, 128_000),
    "lfm2_moe": (32, 8, None, 128_000),
    "llama": (32, None, None, 2048),
    "llama4_text": (40, 8, 128, 131_072),
    "minimax": (32, 8, None, 131_072),
    "minimax_m2": (48, 8, 128, 196_608),
    "minimax_m3": (64, 4, 128, 524_288),
    "ministral": (32, 8, None, 131_072),
    "ministral3": (32, 8, 128, 262_144),
    "mistral": (32, 8, None, 131_072),
    "mixtral": (32, 8, None, 131_072),
    "nemotron": (48, None, None, 4096),
    "nemotron_h": (32, 8, 128, 4096),
    "olmo": (32, None, None, 2048),
    "olmo2": (32, None, None, 2048),
    "olmo3": (32, None, None, 2048),
    "olmoe": (16, None, None, 4096),
    "phi3": (32, None, None, 4096),
    "phimoe": (32, 8, None, 131_072),
    "qwen2": (32, 32, None, 32_768),
    "qwen2_moe": (16, 16, None, 32_768),
    "qwen2_vl": (64, 8, None, 32_768),
    "qwen3": (32, 32, 128, 32_768),
    "qwen3_5_moe_text": (16, 2, 256, 32_768),
    "qwen3_5_text": (16, 4, 256, 32_768),
    "qwen3_moe": (32, 4, None, 32_768),
    "qwen3_next": (16, 2, 256, 32_768),
    "qwen3_vl_moe_text": (16, 16, None, 128_000),
    "qwen3_vl_text": (32, 32, 128, 128_000),
    "seed_oss": (80, 8, 128, 524_288),
    "smollm3": (16, 4, None, 32_768),
    "solar_open": (64, 8, 128, 131_072),
    "stablelm": (32, 32, None, 4096),
    "starcoder2": (24, 2, None, 4096),
}

_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MAMBA2 = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_MORE: dict[str, Defaults] = {
    "bamba": {"hidden_size": 4096, **_MAMBA2},
    "cohere2": {"sliding_window": 4096},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone_moe": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon_h1": {"mamba_d_ssm": 1024, **_MAMBA2},
    "gemma2": {"sliding_window": 4096},
    "gemma3_text": {"sliding_window": 4096},
    "gemma3n_text": {"sliding_window": 512, "num_kv_shared_layers": 15},
    "gemma4_text": {"sliding_window": 512, "global_head_dim": 512},
    "gemma4_unified_text": {"sliding_window": 1024, "global_head_dim": 512},
    "gpt_oss": {"sliding_window": 128},
    "granitemoehybrid": _MAMBA2,
    "jamba": {
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "lfm2": {"conv_L_cache": 3},
    "lfm2_moe": {"conv_L_cache": 3},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "mamba": {"state_size": 16, "expand": 2, "conv_kernel": 4},
    "mamba2": {
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
    },
    "ministral": {"sliding_window": 4096},
    "mistral": {"sliding_window": 4096},
    "nemotron_h": {
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    },
    "olmo3": {"sliding_window": 4096},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
}

_SAME = {
    "falcon_mamba": "mamba",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "minimax_m3_text": "minimax_m3",
    "minimax_m3_vl": "minimax_m3",
    "minimax_m3_vl_text": "minimax_m3",
    "qwen2_5_vl": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
"""Kinds that name the same class, or the one that holds it."""


def class_defaults(kind: str) -> Defaults:
    """Return the fields that the class of this `model_type` fills in; none where it is not known.

    A kind without any must have every field that its reader asks for.
    """
    kind = _SAME.get(kind, kind)
    heads = dict(zip(_FIELDS, _HEADS.get(kind, ()), strict=False))
    return {**heads, **_MORE.get(kind, {})}
