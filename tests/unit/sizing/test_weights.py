"""Bytes of weights: from files and indexes, reckoned from config.json, divided among ranks."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostprep.errors import BadInputError
from hostprep.sizing.parameters import reckon
from hostprep.sizing.weights import (
    Division,
    RankWeights,
    Tensor,
    check_total,
    divide,
    divide_total,
    read_header,
    read_index,
)

pytestmark = pytest.mark.unit

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL_8X22B = {
    "model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384,
    "num_attention_heads": 48, "num_hidden_layers": 56, "num_key_value_heads": 8,
    "num_local_experts": 8, "vocab_size": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "num_experts": 128, "vocab_size": 151936, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "num_local_experts": 128, "vocab_size": 201088, "attention_bias": True,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "first_k_dense_replace": 3, "vocab_size": 129280, "dtype": "bfloat16",
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("config", "size_bytes"),
    [
        # metadata.total_size of the published indexes, and the tensors' bytes of gpt-oss-120b.
        pytest.param(LLAMA_8B, 16_060_522_496, id="Llama-3.1-8B"),
        pytest.param(MIXTRAL_8X22B, 281_241_268_224, id="Mixtral-8x22B"),
        pytest.param(GPT_OSS_120B, 65_248_815_744, id="gpt-oss-120b"),
        # Parameters that transformers 5.19 makes of the published config, in 16 bits.
        pytest.param(QWEN3_30B, 2 * 30_532_122_624, id="Qwen3-30B-A3B"),
        pytest.param(DEEPSEEK_V3, 2 * 671_026_419_200, id="DeepSeek-V3"),
    ],
)
def test_what_is_reckoned_is_what_is_published(config: dict[str, Any], size_bytes: int) -> None:
    assert sum(one.size_bytes for one in reckon(config, source="config.json")) == size_bytes


def test_fp8_halves_what_multiplies_and_adds_a_scale_for_each_block() -> None:
    plain = {one.name: one for one in reckon(DEEPSEEK_V3, source="config.json")}
    fp8 = {
        one.name: one.size_bytes
        for one in reckon(DEEPSEEK_V3 | {"quantization_config": FP8}, source="config.json")
    }
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.9.mlp.gate.weight"):
        assert fp8[name] == plain[name].size_bytes
    assert fp8["model.layers.0.self_attn.q_a_proj.weight"] == 1536 * 7168 + 4 * 12 * 56
    experts = "model.layers.9.mlp.experts.down_proj.weight"
    assert fp8[experts] == 256 * (7168 * 2048 + 4 * 56 * 16)


def test_modules_that_are_not_converted_stay_as_they_are() -> None:
    kept = {**FP8, "modules_to_not_convert": ["model.layers.3.self_attn.q_proj"]}
    sizes = {
        one.name: one.size_bytes
        for one in reckon(QWEN3_30B | {"quantization_config": kept}, source="config.json")
    }
    assert sizes["model.layers.3.self_attn.q_proj.weight"] == 2 * 4096 * 2048
    assert sizes["model.layers.33.self_attn.q_proj.weight"] < 1.01 * 4096 * 2048


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bloom"}, "the tensors of 'bloom' are not known"),
        ({"model_type": None}, "the tensors of 'None' are not known"),
        ({"torch_dtype": "float8"}, "dtype is none of"),
        ({"torch_dtype": None}, "dtype is none of"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized in the way 'awq'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized in the way 'mxfp4'"),
        ({"quantization_config": 8}, "quantization_config is no object"),
        ({"quantization_config": {**FP8, "modules_to_not_convert": 1}}, "is no list of names"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers is not empty"),
    ],
)
def test_what_is_not_known_to_the_last_tensor_asks_for_the_weights(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        reckon(QWEN3_30B | change, source="config.json")
    assert words in caught.value.message
    assert "--weights" in str(caught.value.remedy)
    assert caught.value.reason == "UnknownWeights"


def by(
    tp: int = 1, pp: int = 1, *, layers: int = 4, kv_heads: int = 8, drafts: bool = False
) -> Division:
    return Division(
        layers=layers, kv_heads=kv_heads, tensor_parallel=tp, pipeline_parallel=pp, drafts=drafts
    )


def ranks(tensors: list[Tensor], division: Division) -> RankWeights:
    return divide(tensors, division, source="made up")


def test_norms_routers_and_latents_are_kept_by_every_rank() -> None:
    for name, dims in (
        ("model.layers.0.input_layernorm.weight", 1),
        ("model.layers.0.mlp.gate.weight", 2),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 2),
        ("model.layers.0.self_attn.indexer.wq_b.weight", 2),
    ):
        found = ranks([Tensor(name, 800, dims)], by(8))
        assert (found.rank_bytes, found.least_bytes, found.most_bytes) == (800, 100, 800)


def test_ranks_beyond_the_heads_keep_a_head_of_keys_each() -> None:
    tensors = [Tensor("model.layers.0.self_attn.k_proj.weight", 800, 2)]
    assert ranks(tensors, by(4)).rank_bytes == 200
    assert ranks(tensors, by(16)).rank_bytes == 100
    vision = [Tensor("vision_tower.layers.0.self_attn.k_proj.weight", 800, 2)]
    assert ranks(vision, by(16)).rank_bytes == 50


def test_what_is_not_known_is_divided_and_the_bound_says_so() -> None:
    found = ranks([Tensor("model.layers.0.strange", 800, 2)], by(8))
    assert (found.rank_bytes, found.most_bytes) == (100, 800)


def test_stages_hold_adjacent_layers_and_the_ends_more() -> None:
    layers = [Tensor(f"model.layers.{n}.mlp.up_proj.weight", 100, 2) for n in range(5)]
    assert ranks(layers, by(1, 2, layers=5)).rank_bytes == 300
    ends = [Tensor("model.embed_tokens.weight", 40, 2), Tensor("lm_head.weight", 500, 2)]
    assert ranks(layers + ends, by(1, 2, layers=5)).rank_bytes == 700
    assert ranks(layers + ends, by(1, 5, layers=5)).rank_bytes == 600


def test_drafting_layers_are_loaded_with_drafts_only() -> None:
    tensors = [
        Tensor("model.layers.3.mlp.up_proj.weight", 100, 2),
        Tensor("model.layers.4.mlp.up_proj.weight", 70, 2),
        Tensor("mtp.layers.0.mlp.up_proj.weight", 50, 2),
    ]
    assert ranks(tensors, by()).total_bytes == 100
    assert ranks(tensors, by(drafts=True)).total_bytes == 220


_NAMES = st.sampled_from(
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
        "model.visual.blocks.9.attn.qkv.weight",
        "something.else",
        "",
    ]
)
_TENSORS = st.lists(
    st.builds(Tensor, _NAMES, st.integers(0, 1 << 40), st.integers(0, 3)), max_size=9
)


@given(_TENSORS, st.sampled_from([1, 2, 8, 64]), st.integers(1, 4), st.sampled_from([1, 4, 128]))
def test_the_estimate_lies_between_its_bounds(
    tensors: list[Tensor], tp: int, pp: int, kv_heads: int
) -> None:
    found = ranks(tensors, by(tp, pp, kv_heads=kv_heads))
    assert found.total_bytes == sum(one.size_bytes for one in tensors)
    assert found.least_bytes <= found.rank_bytes <= found.most_bytes <= found.total_bytes
    if tp == pp == 1:
        assert found.rank_bytes == found.total_bytes == found.least_bytes


@given(st.integers(1, 1 << 50), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2]))
def test_a_sum_is_divided_as_the_same_models_reckoned_weights_are(
    total: int, tp: int, pp: int
) -> None:
    division = by(tp, pp, layers=61, kv_heads=128)
    alike = divide(_V3, division, source="config.json")
    found = divide_total(total, division, source="index", alike=alike)
    assert -(-total // (tp * pp)) == found.least_bytes <= found.rank_bytes <= found.most_bytes
    wanted = total * alike.rank_bytes / alike.total_bytes
    assert found.rank_bytes == pytest.approx(wanted, abs=2)


_V3 = reckon(DEEPSEEK_V3, source="config.json")

_KEYS = st.sampled_from(
    ["dtype", "shape", "data_offsets", "weight_map", "metadata", "total_size", "a"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(_JSON | st.dictionaries(_KEYS, _JSON))
def test_any_header_and_index_is_read_or_refused(document: Any) -> None:
    data = json.dumps(document).encode()
    for read in (partial(read_header, tensor_bytes=0), read_index):
        try:
            read(data, source="file")
        except BadInputError as error:
            assert error.message.startswith("file: ")  # noqa: PT017


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (partial(read_header, tensor_bytes=0), read_index):
        with pytest.raises(BadInputError, match="file: "):
            read(b"\xff" + data, source="file")


def header(**tensors: tuple[str, list[int], list[int]]) -> bytes:
    keys = ("dtype", "shape", "data_offsets")
    return json.dumps(
        {name: dict(zip(keys, one, strict=True)) for name, one in tensors.items()}
    ).encode()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": ("Q99", [4], [0, 8])}, "'a' of type 'Q99', which is not known"),
        ({"a": ("BF16", [1000, 1000], [0, 8])}, "has 8 bytes for 'a', of which its shape makes"),
        ({"a": ("U8", [8], [0, 8]), "b": ("U8", [4], [4, 8])}, "has 'b' at 4, and not at 8"),
        ({"a": ("U8", [4], [0, 4]), "b": ("U8", [2], [6, 8])}, "has 'b' at 6, and not at 4"),
        ({"a": ("U8", [10**17], [0, 10**17])}, "has 8 bytes of tensors, and lists 1000000"),
        ({"a": ("U8", [4], [0, 4])}, "has 8 bytes of tensors, and lists 4"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(
    tensors: dict[str, tuple[str, list[int], list[int]]], words: str
) -> None:
    with pytest.raises(BadInputError, match=words):
        read_header(header(**tensors), source="file", tensor_bytes=8)


def test_tensors_of_all_sizes_are_read_in_any_order() -> None:
    data = header(b=("F4", [4], [8, 10]), a=("BF16", [2, 2], [0, 8]), c=("F32", [0], [10, 10]))
    found = read_header(data, source="file", tensor_bytes=10)
    assert sorted((one.name, one.size_bytes) for one in found) == [("a", 8), ("b", 2), ("c", 0)]


def test_a_sum_far_from_what_is_reckoned_is_refused() -> None:
    alike = RankWeights(
        total_bytes=16 << 30, rank_bytes=1, least_bytes=1, most_bytes=1, source="config.json"
    )
    for total in (100, (8 << 30) - 1, (32 << 30) + 1):
        with pytest.raises(BadInputError, match="index: says that the weights have"):
            check_total(total, alike, source="index")
    check_total(8 << 30, alike, source="index")
    check_total(32 << 30, alike, source="index")
