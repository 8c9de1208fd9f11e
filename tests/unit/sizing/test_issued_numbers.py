"""Models that were sized with wrong numbers once, or that nobody could size: what is right.

The fields are those of the published config.json files that caches depend on, and those that sound
as if caches did; the numbers are reckoned from vLLM 0.32's source, as each test says. Whole files
are sized where a package carries them (docs/sizing.md, Published configurations, as they are).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hostprep.errors import BadInputError
from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.engines import rules_of
from hostprep.sizing.engines.rules import DEFAULT_DEVICE
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import CacheGroup, groups_of, min_slots, slots_of_request
from hostprep.sizing.model import Kind
from tests.unit.sizing.models import MODELS, limits, model_from

pytestmark = pytest.mark.unit

BAMBA_9B: dict[str, Any] = {
    "model_type": "bamba",
    "torch_dtype": "bfloat16",
    "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
}
GRANITE_4_SMALL: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "layer_types": ["attention" if index in {5, 15, 25, 35} else "mamba" for index in range(40)],
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
}
GEMMA_3_12B: dict[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16},
}
GEMMA_3_4B: dict[str, Any] = {
    **GEMMA_3_12B,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
FALCON_H1_34B: dict[str, Any] = {
    "model_type": "falcon_h1",
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 5120,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_ssm": 4096,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_n_heads": 32,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 262144,
    "num_attention_heads": 20,
    "num_hidden_layers": 72,
    "num_key_value_heads": 4,
    "ssm_multipliers": [0.25, 0.25, 0.25, 0.25, 0.25],
}
NEMOTRON_3_NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "sliding_window": None,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "use_conv_bias": True,
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}
GLM_4_6: dict[str, Any] = {
    "model_type": "glm4_moe",
    "torch_dtype": "bfloat16",
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 202752,
    "num_attention_heads": 96,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "use_qk_norm": True,
}
DEEPSEEK_V3_2: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"},
    "v_head_dim": 128,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def found_groups(
    fields: dict[str, Any], *, types: TypeChoice | None = None, **served: Any
) -> dict[str, CacheGroup]:
    drafts = served.get("speculative_tokens", 0)
    model = model_from(fields, drafts=drafts, types=types)
    return {group.name: group for group in groups_of(model, limits(**served))}


def token_bytes(fields: dict[str, Any], name: str = "full", **more: Any) -> float:
    return found_groups(fields, **more)[name].slot_bytes / 128


def refusal(fields: dict[str, Any], *, drafts: int = 0) -> str:
    with pytest.raises(BadInputError) as caught:
        model_from(fields, drafts=drafts)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bamba_attends_in_the_layers_that_it_lists() -> None:
    found = found_groups(BAMBA_9B)
    assert {name: group.layers for name, group in found.items()} == {"full": 3, "state": 29}
    assert found["full"].slot_bytes == 128 * 12_288  # 3 layers x 2 x 8 heads x 128 x 2 bytes
    # Heads of 64 x 128 in float32, and (8192 + 2 x 128) x 3 inputs: MambaStateShapeCalculator.
    assert found["state"].slot_bytes == 29 * (128 * 64 * 128 * 4 + (8192 + 2 * 128) * 3 * 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**BAMBA_9B, "attn_layer_indices": None}, "attn_layer_indices, layer_types are missing"),
        ({**BAMBA_9B, "attn_layer_indices": [9, 32]}, "attn_layer_indices names others"),
        ({**BAMBA_9B, "layer_types": ["mamba"] * 32}, "contradict each other"),
        ({**GRANITE_4_SMALL, "layer_types": None}, "attn_layer_indices, layer_types are missing"),
        ({**GRANITE_4_SMALL, "layer_types": ["mamba3"] * 40}, "layer_types names 'mamba3'"),
        ({**GRANITE_4_SMALL, "layer_types": ["mamba"] * 39}, "layer_types has 39 items"),
    ],
)
def test_a_mixture_whose_layers_are_not_known_is_refused(
    fields: dict[str, Any], words: str
) -> None:
    assert words in refusal(fields)


@pytest.mark.parametrize(
    ("fields", "full", "window", "layers"),
    [
        # 8 heads x (256 + 256) x 2 bytes in each of 8 full layers and of 40 with the window.
        (GEMMA_3_12B, 65_536, 327_680, (8, 40)),
        # 4 heads, which the published file leaves to the class like everything but the layers.
        (GEMMA_3_4B, 5 * 4096, 29 * 4096, (5, 29)),
    ],
)
def test_gemma_3_has_its_class_s_heads(
    fields: dict[str, Any], full: int, window: int, layers: tuple[int, int]
) -> None:
    assert token_bytes(fields) == full
    assert token_bytes(fields, "window-1024") == window
    found = found_groups(fields)
    assert (found["full"].layers, found["window-1024"].layers) == layers


@pytest.mark.parametrize(
    ("fields", "ranks", "state_bytes"),
    [
        # extra_groups_for_head_shards: each rank keeps one group of B and one of C.
        (GRANITE_4_SMALL, 8, 19_150_848),
        (FALCON_H1_34B, 4, 76_161_024),
        (NEMOTRON_3_NANO, 16, 3_085_312),
        (QWEN3_NEXT, 4, 36 * (8 * 128 * 128 * 4 + (2 * 4 + 8) * 128 * 3 * 2)),
    ],
)
def test_states_on_ranks_are_those_of_vllm(
    fields: dict[str, Any], ranks: int, state_bytes: int
) -> None:
    assert found_groups(fields, tensor_parallel=ranks)["state"].slot_bytes == state_bytes


def test_states_cannot_be_on_more_ranks_than_heads() -> None:
    """Heads of keys are repeated on ranks that would have none; a state's never are."""
    with pytest.raises(BadInputError, match="--tp: is 32, which does not divide 16"):
        found_groups(QWEN3_NEXT, tensor_parallel=32)


def test_a_sequence_keeps_a_state_for_each_drafted_token_too() -> None:
    served: dict[str, Any] = {"tensor_parallel": 4, "speculative_tokens": 2}
    state = found_groups(QWEN3_NEXT, **served)["state"]
    bound = limits(max_batch_size=7, **served)
    assert slots_of_request(state, bound, 1000) == 3
    assert min_slots(state, bound) == 21
    # (1 + 2) x 36 layers x (8 x 128 x 128 x 4 + 2048 x (3 + 2) x 2)
    assert 3 * state.slot_bytes == 58_834_944


def test_the_models_own_draft_layer_keeps_keys_as_well() -> None:
    plain = found_groups(GLM_4_6, tensor_parallel=8)["full"]
    drafting = found_groups(GLM_4_6, tensor_parallel=8, speculative_tokens=1)["full"]
    assert (plain.layers, drafting.layers) == (92, 93)
    assert drafting.slot_bytes * 92 == plain.slot_bytes * 93
    model = model_from(GLM_4_6, drafts=1)
    assert len(model.draft_layers) == 1
    assert any("1 layer keeps a cache for drafts" in note for note in model.notes)


def test_drafts_from_elsewhere_are_said_to_be() -> None:
    model = model_from({**GLM_4_6, "num_nextn_predict_layers": 0}, drafts=1)
    assert model.draft_layers == ()
    assert any("drafts come from elsewhere" in note for note in model.notes)


def test_draft_layers_are_on_the_last_stage() -> None:
    served: dict[str, Any] = {"pipeline_parallel": 2, "speculative_tokens": 1}
    assert token_bytes(GLM_4_6, **served) == 47 * 2 * 8 * 128 * 2


def test_draft_layers_that_are_not_known_are_refused() -> None:
    fields = {**LLAMA, "num_nextn_predict_layers": 1}
    assert "num_nextn_predict_layers says that the model drafts" in refusal(fields, drafts=1)
    assert model_from(fields).draft_layers == ()


@pytest.mark.parametrize(
    ("chosen", "bytes_a_layer"),
    [("auto", 656 + 132), ("fp8", 656 + 132), ("bfloat16", 1152 + 132)],
)
def test_latents_with_an_indexer_are_packed_and_index_keys_always_fp8(
    chosen: str, bytes_a_layer: int
) -> None:
    types = TypeChoice(kv=chosen)
    assert token_bytes(DEEPSEEK_V3_2, types=types) == 61 * bytes_a_layer
    model = model_from(DEEPSEEK_V3_2, types=types)
    assert {store.kind for store in model.stores} == {Kind.LATENT, Kind.INDEX}
    assert any("index keys are FP8" in note for note in model.notes)
    assert any("fp8_ds_mla" in note for note in model.notes) == (chosen != "bfloat16")


MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}


@pytest.mark.parametrize(
    "quantization",
    [
        MODELOPT,
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
        {"producer": {"name": "modelopt"}, "kv_cache_scheme": "FP8"},
        {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
    ],
)
def test_a_checkpoint_with_an_fp8_cache_keeps_half(quantization: dict[str, Any]) -> None:
    fields = {**LLAMA, "quantization_config": quantization}
    assert token_bytes(fields) == 65_536
    assert token_bytes(fields, types=TypeChoice(kv="bfloat16")) == 131_072
    assert any("auto is fp8" in note for note in model_from(fields).notes)


@pytest.mark.parametrize(
    "scheme",
    [
        "FP6",
        {"num_bits": 8, "type": "int"},
        {"num_bits": 8, "type": "float", "dynamic": True},
        {"num_bits": 2, "type": "float"},
        7,
    ],
)
def test_a_caches_quantization_that_is_not_known_is_refused(scheme: object) -> None:
    fields = {**LLAMA, "quantization_config": {**MODELOPT, "kv_cache_scheme": scheme}}
    words = refusal(fields)
    assert "quantization_config.kv_cache_scheme is a KV cache's quantization" in words
    assert words.endswith("choose --kv-dtype")
    assert token_bytes(fields, types=TypeChoice(kv="bfloat16")) == 131_072


def test_two_files_that_do_not_say_the_same_of_the_cache_are_refused() -> None:
    """vLLM reads the first alone, others the second: transformers_utils/config.py."""
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    config = json.dumps({**LLAMA, "quantization_config": said}).encode()
    beside = json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}).encode()
    both = load_config(config, source="config.json", quantization=beside)
    with pytest.raises(BadInputError, match="hf_quant_config.quantization.kv_cache_quant_algo"):
        read_model(both, name="m")
    chosen = read_model(both, name="m", choice=TypeChoice(kv="fp8"))
    assert chosen.types.kv.name == "fp8"
    vllm = rules_of("vllm").types(both, TypeChoice(kv="fp8"), DEFAULT_DEVICE)
    assert vllm.kv == "fp8"  # and no refusal: that is what the remedy says
    alone = load_config(json.dumps(LLAMA).encode(), source="config.json", quantization=beside)
    assert read_model(alone, name="m").types.kv.name == "fp8"


def test_weights_that_are_quantized_alone_leave_the_cache() -> None:
    nothing: tuple[object, ...] = (None, "none", {})
    for none in nothing:
        fields = {**LLAMA, "quantization_config": {**MODELOPT, "kv_cache_scheme": none}}
        assert token_bytes(fields) == 131_072


def test_a_model_in_float32_is_served_in_16_bits() -> None:
    fields = {**LLAMA, "torch_dtype": "float32"}
    assert token_bytes(fields) == 131_072
    assert any("published in float32" in note for note in model_from(fields).notes)


PHI_3_MINI_128K: dict[str, Any] = {
    "model_type": "phi3",
    "torch_dtype": "bfloat16",
    "hidden_size": 3072,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"long_factor": [1.05], "short_factor": [1.0], "type": "longrope"},
    "sliding_window": 262144,
}
PHI_4_MINI: dict[str, Any] = {
    **PHI_3_MINI_128K,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
}
FALCON_MAMBA_7B: dict[str, Any] = {
    "model_type": "falcon_mamba",
    "torch_dtype": "bfloat16",
    "conv_kernel": 4,
    "expand": 16,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 64,
    "state_size": 16,
    "time_step_rank": 256,
    "use_conv_bias": True,
}
COMMAND_R7B: dict[str, Any] = {
    "model_type": "cohere2",
    "torch_dtype": "bfloat16",
    "cache_implementation": "hybrid",
    "hidden_size": 4096,
    "layer_switch": 4,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
LFM2_1_2B: dict[str, Any] = {
    "model_type": "lfm2",
    "torch_dtype": "bfloat16",
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
}
QWEN2_5_VL_7B: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
}
LLAMA_4_SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
}
MINIMAX_TEXT_01: dict[str, Any] = {
    "model_type": "minimax_text_01",
    "attn_type_list": [int(index % 8 == 7) for index in range(80)],
    "head_dim": 128,
    "hidden_size": 6144,
    "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_alpha": 3.5565588200778455,
    "max_position_embeddings": 10240000,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}
EXAONE_4_32B: dict[str, Any] = {
    "model_type": "exaone4",
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 5120,
    "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(64)],
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
}
GEMMA_3N_E4B: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
    "head_dim": 256,
    "hidden_size": 2048,
    "layer_types": ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(35)],
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "sliding_window": 512,
}
KIMI_LINEAR_48B: dict[str, Any] = {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "head_dim": 72,
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "max_position_embeddings": 1048576,
    "mla_use_nope": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GLM_5_2: dict[str, Any] = {
    **DEEPSEEK_V3_2,
    "model_type": "glm_moe_dsa",
    "head_dim": 192,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
    "indexer_types": ["full" if i < 3 or i % 4 == 2 else "shared" for i in range(78)],
    "num_hidden_layers": 78,
}


def test_a_window_larger_than_the_sequences_never_closes() -> None:
    """Phi-3-mini-128k and Phi-4-mini are published so; at full length all tokens are kept."""
    assert token_bytes(PHI_3_MINI_128K, max_seq_len=131_072) == 32 * 2 * 32 * 96 * 2
    assert token_bytes(PHI_4_MINI, max_seq_len=131_072) == 131_072
    model = model_from(PHI_3_MINI_128K)
    assert {(store.kind, store.window) for store in model.stores} == {(Kind.WINDOW, 262_144)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (QWEN2_5_VL_7B, {"full": 28 * 2 * 4 * 128 * 2}),
        # Every fourth layer has no positions and sees everything: transformers, Llama4TextConfig.
        (LLAMA_4_SCOUT, {"full": 12 * 4096, "chunk-8192": 36 * 4096}),
        (EXAONE_4_32B, {"full": 16 * 4096, "window-4096": 48 * 4096}),
        # 20 of 35 layers have keys of their own.
        (GEMMA_3N_E4B, {"full": 4 * 2048, "window-512": 16 * 2048}),
        (MINIMAX_TEXT_01, {"full": 10 * 4096, "state": 70 * 64 * 128 * 128 * 4 / 128}),
        (
            KIMI_LINEAR_48B,
            # kda_state_shape: 3 x 32 x 128 inputs of 3 tokens, and 32 x 128 x 128 in float32.
            {"full": 7 * 1152, "state": 20 * (3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4) / 128},
        ),
        (COMMAND_R7B, {"full": 8 * 4096, "window-4096": 24 * 4096}),
        (LFM2_1_2B, {"full": 6 * 2048, "state": 10 * 2048 * 2 * 2 / 128}),
        # `expand` says 65,536, and the file's own intermediate_size is what the model has.
        (FALCON_MAMBA_7B, {"state": 64 * 8192 * (3 * 2 + 16 * 4) / 128}),
        # Layers that share an earlier one's choice have no index keys: 21 of 78 have.
        (GLM_5_2, {"full": 78 * 656 + 21 * 132}),
    ],
)
def test_kinds_that_were_refused_are_sized(
    fields: dict[str, Any], expected: dict[str, float]
) -> None:
    found = found_groups(fields)
    assert {name: group.slot_bytes / 128 for name, group in found.items()} == expected


@pytest.mark.parametrize(
    ("field", "value"), [("architectures", ["BambaForCausalLM"]), ("model_type", "bamba")]
)
def test_a_whole_of_another_kind_than_its_text_part_is_refused(field: str, value: object) -> None:
    text = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    whole = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    assert model_from({**whole, "text_config": text}).layers
    words = refusal({**whole, "text_config": text, field: value})
    assert f"model_type is llama, and {field} of the whole bamba: they contradict" in words


def test_a_reference_format_must_say_of_which_model() -> None:
    fields = json.loads((MODELS / "deepseek-v4-flash.json").read_text())
    fields |= {"model_type": "deepseek_ref", "architectures": ["DeepseekV4ForCausalLM"]}
    assert len(model_from(fields).layers) == 43
    assert "model_type is deepseek_ref" in refusal({**fields, "architectures": None})


def test_a_kind_of_which_no_class_is_known_needs_its_heads() -> None:
    fields = {**LLAMA, "model_type": "mimo", "num_key_value_heads": None}
    assert "num_key_value_heads is missing" in refusal(fields)


def test_how_long_a_sequence_can_be_is_found_where_the_model_says_it() -> None:
    longest = {**KIMI_LINEAR_48B, "max_position_embeddings": None, "model_max_length": 1 << 20}
    assert model_from(longest).max_positions == 1 << 20
    assert model_from(GEMMA_3_4B).max_positions == 131_072  # its class's


def test_chunks_are_told_from_windows() -> None:
    kinds = {store.kind for store in model_from(LLAMA_4_SCOUT).stores}
    assert kinds == {Kind.FULL, Kind.CHUNK}


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        # Accepted in silence once.
        (LLAMA, {"kv_lora_rank": 512}, "kv_lora_rank may say what layers keep"),
        (LLAMA, {"attention_chunk_size": 8192}, "attention_chunk_size may say"),
        (LLAMA, {"num_kv_shared_layers": 2}, "num_kv_shared_layers may say"),
        (LLAMA, {"qk_rope_head_dim": 64}, "qk_rope_head_dim may say"),
        (QWEN3_NEXT, {"layer_types": ["sliding_attention"] * 48}, "names 'sliding_attention'"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"] * 48}, "contradict each other"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 32}, "layer_types and model_type contr"),
        (EXAONE_4_32B, {"sliding_window_pattern": "LG"}, "and sliding_window_pattern contra"),
        (EXAONE_4_32B, {"sliding_window_pattern": 2}, "and sliding_window_pattern contra"),
        (GEMMA_3N_E4B, {"sliding_window_pattern": 5}, "sliding_window_pattern may say"),
        (GLM_5_2, {"index_topk_freq": 2}, "index_topk_freq and indexer_types contradict"),
        (GLM_5_2, {"indexer_types": ["new"] * 78}, "indexer_types names others"),
        (KIMI_LINEAR_48B, {"num_hidden_layers": 28}, "do not name each of the 28 layers once"),
        (MINIMAX_TEXT_01, {"attn_type_list": [2] * 80}, "attn_type_list holds others"),
        (NEMOTRON_3_NANO, {"layers_block_type": ["moe"] * 52}, "contradict each other"),
        (NEMOTRON_3_NANO, {"num_hidden_layers": 50}, "has 52 items for 50 layers"),
        (FALCON_H1_34B, {"mamba_n_heads": 16}, "are not the 4096 that other fields say"),
        (GEMMA_3N_E4B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
        (GEMMA_3N_E4B, {"head_dim": None}, "head_dim is missing"),
        (
            LLAMA,
            {"architectures": ["BambaForCausalLM"]},
            "model_type is llama, and architectures bamba",
        ),
        (
            LLAMA,
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "model_type is llama, and architectures gemma3",
        ),
        (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder may say"),
        (PHI_4_MINI, {"full_attn_mod": 2}, "full_attn_mod is not 1"),
        (COMMAND_R7B, {"order_of_interleaved_layers": "other"}, "order_of_interleaved_layers is"),
        (LFM2_1_2B, {"full_attn_idxs": [16]}, "full_attn_idxs names others"),
        (LFM2_1_2B, {"layer_types": ["conv"] * 16}, "layer_types and full_attn_idxs contradict"),
        (LLAMA, {"model_type": "phi3small"}, "phi3small has blocksparse attention"),
        (LLAMA, {"model_type": "deepseek_v41"}, "deepseek_v41 has Engram tables"),
    ],
)
def test_what_another_cache_would_say_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    assert words in refusal({**base, **changes})
