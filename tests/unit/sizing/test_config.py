"""A config.json that cannot be: refused in one line, the field named, nothing guessed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.errors import BadInputError
from hostprep.sizing.config import MAX_CONFIG_BYTES, load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import groups_of
from tests.unit.sizing.models import MODELS, limits, model_from

pytestmark = pytest.mark.unit

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
GEMMA = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 1024}


def refusal(data: bytes) -> str:
    with pytest.raises(BadInputError) as caught:
        read_model(load_config(data, source="config.json"), name="m")
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[]", "holds no object"),
        (b"null", "holds no object"),
        (b'{"num_hidden_layers": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "larger than 4 MiB"),
        (b'{"text_config": 5}', "text_config is no object"),
        (b'{"model_type": "llama", "num_hidden_layers": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_what_is_no_config_is_refused(data: bytes, words: str) -> None:
    assert words in refusal(data)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (LLAMA, {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA, {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA, {"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
        (LLAMA, {"num_attention_heads": None}, "num_attention_heads is missing"),
        (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide 32"),
        (LLAMA, {"num_key_value_heads": 64}, "num_key_value_heads is 64"),
        (LLAMA, {"head_dim": None, "hidden_size": 4097}, "hidden_size is 4097"),
        (LLAMA, {"head_dim": None, "hidden_size": None}, "head_dim, hidden_size are missing"),
        (LLAMA, {"dtype": "float7"}, "dtype: there is no data type 'float7'"),
        (LLAMA, {"dtype": 16}, "dtype is 16"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window is 0"),
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types has 1 items for 32 layers"),
        (GEMMA, {"layer_types": ["new_attention"] * 32}, "layer_types names 'new_attention'"),
        (GEMMA, {"layer_types": [1] * 32}, "layer_types is not a list of strs"),
        (GEMMA, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (
            {**GEMMA, "model_type": "gemma3n_text"},
            {"num_kv_shared_layers": 32},
            "num_kv_shared_layers is 32 of 32 layers",
        ),
        ({**LLAMA, "sliding_window": 512}, {}, "sliding_window may say what layers keep"),
    ],
)
def test_a_field_that_cannot_be_is_named(
    base: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    assert words in refusal(json.dumps({**base, **changes}).encode())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 2},
            "kv_lora_rank is missing",
        ),
        (
            {"model_type": "deepseek_v4", "num_hidden_layers": 2, "head_dim": 512},
            "compress_ratios is missing",
        ),
        (
            {"model_type": "kimi_linear", "num_hidden_layers": 2, "linear_attn_config": {}},
            "linear_attn_config.kda_layers is missing",
        ),
        (
            {"model_type": "nemotron_h", "num_hidden_layers": 2, "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern has other letters than M*-E",
        ),
        ({"model_type": "mamba2", "num_hidden_layers": 2}, "hidden_size is missing"),
        ({"model_type": "bamba", "num_hidden_layers": 2}, "attn_layer_indices, layer_types are"),
    ],
)
def test_the_field_that_a_family_lacks_is_named(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(json.dumps(fields).encode())


def test_an_unknown_architecture_is_refused_with_what_was_missing() -> None:
    words = refusal(b'{"model_type": "retnet", "num_hidden_layers": 24, "state_size": 8}')
    assert "model_type 'retnet' is not known" in words
    assert "missing: num_attention_heads, num_key_value_heads, head_dim" in words
    assert "state_size would have to be understood" in words


def test_hidden_size_will_do_in_place_of_head_dim() -> None:
    words = refusal(b'{"model_type": "new", "num_hidden_layers": 2, "hidden_size": 8}')
    assert "not known; missing: num_attention_heads, num_key_value_heads; give" in words
    assert words.endswith('write "model_type": "llama", and what is missing')
    words = refusal(json.dumps({**LLAMA, "model_type": "new", "head_dim": None}).encode())
    assert "missing" not in words


@pytest.mark.parametrize(
    "fields", [{}, {"max_length": 20, "eos_token_id": 2}, {"text_config": {"hidden_size": 8}}]
)
def test_a_file_that_is_no_models_config_is_told_so(fields: dict[str, Any]) -> None:
    words = refusal(json.dumps(fields).encode())
    assert "is no model's config.json: model_type, architectures, num_hidden_layers are" in words


def test_a_model_that_says_its_class_is_one() -> None:
    nested = {"architectures": ["NewForCausalLM"], "text_config": {"hidden_size": 8}}
    words = refusal(json.dumps(nested).encode())
    assert "model_type is missing; missing: num_hidden_layers" in words


def test_a_model_that_does_not_say_what_it_is_is_not_guessed() -> None:
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert "model_type is missing" in refusal(json.dumps(fields).encode())


def test_fields_of_a_part_are_named_with_their_path() -> None:
    nested = {"model_type": "gemma3", "text_config": {**GEMMA, "num_hidden_layers": 0}}
    assert "text_config.num_hidden_layers is 0" in refusal(json.dumps(nested).encode())


@pytest.mark.parametrize("name", ["int4", "", "x" * 500, "float32\n"])
def test_an_unknown_data_type_of_the_cache_is_refused(name: str) -> None:
    with pytest.raises(BadInputError, match="--kv-dtype: there is no data type"):
        model_from(LLAMA, types=TypeChoice(kv=name))


def test_a_latents_format_is_for_latents() -> None:
    with pytest.raises(BadInputError, match="--kv-dtype: fp8_ds_mla"):
        model_from(LLAMA, types=TypeChoice(kv="fp8_ds_mla"))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


_TELLING = (
    "window", "chunk", "lora_rank", "rope_head_dim", "layer_types", "block_type", "pattern", "conv",
    "ssm", "mamba", "linear_heads", "index_head_dim", "compress", "kv_heads", "shared_layers",
    "head_dim", "state", "swa", "cla", "attn_layer", "interval", "period", "sparse_attention",
)  # fmt: skip
_HOLDING = st.integers(1, 1 << 20) | st.just(True) | st.lists(st.integers(1, 9), min_size=1)


@given(
    name=st.sampled_from(sorted(path.stem for path in MODELS.glob("*.json"))),
    word=st.sampled_from(_TELLING),
    other=st.text("abcdefghijkl", min_size=3, max_size=8),
    value=_HOLDING | _HOLDING.map(lambda held: {"inner_window": held}),
    nested=st.booleans(),
)
def test_tomorrows_field_is_refused_by_name(
    name: str, word: str, other: str, value: object, nested: bool
) -> None:
    """A field that nobody knows, in the text part, beside it, or in an object of its own."""
    fields = json.loads((MODELS / f"{name}.json").read_text())
    field = f"{other}_{word}"
    part = fields.get("text_config", fields)
    if nested:
        fields["new_options"] = {field: value}
    else:
        part[field] = value
    with pytest.raises(BadInputError, match=f"{field}.* may say what layers keep") as caught:
        model_from(fields)
    assert caught.value.reason == "UnknownArchitecture"


@pytest.mark.parametrize("nothing", [None, False, 0, "", [], {}, [0, 0], [None]])
def test_a_field_that_holds_nothing_changes_nothing(nothing: object) -> None:
    assert model_from({**LLAMA, "new_window": nothing}).layers == model_from(LLAMA).layers


def test_fields_beside_the_text_part_are_looked_at_too() -> None:
    nested = {"model_type": "gemma3", "text_config": GEMMA}
    assert model_from({**nested, "sliding_window": 1024}).layers == model_from(nested).layers
    assert model_from({**nested, "vision_config": {"window_size": 9}}).layers
    words = refusal(json.dumps({**nested, "sliding_window": 4096}).encode())
    assert "text_config.sliding_window is 1024, and sliding_window beside it 4096" in words
    words = refusal(json.dumps({**nested, "layers": [{"attention_window": 5}]}).encode())
    assert "layers.attention_window may say" in words


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"num_hidden_layers": 8}, "text_config.num_hidden_layers is 32, and num_hidden_layers"),
        ({"head_dim": 64}, "text_config.head_dim is 128, and head_dim beside it 64"),
        ({"dtype": "float32"}, "text_config.dtype is 'bfloat16', and dtype beside it 'float32'"),
        ({"torch_dtype": "float32"}, "text_config.dtype is 'bfloat16', and torch_dtype beside"),
        ({"quantization_config": {"kv_cache_scheme": None}}, "text_config.quantization_config is"),
        ({"num_layers": 8}, "num_layers may say what layers keep"),
        ({"image_cross_layers": [3]}, "image_cross_layers may say what layers keep"),
        ({"cache_implementation": "hybrid"}, "cache_implementation is 'hybrid'"),
    ],
)
def test_the_whole_must_not_contradict_its_text_part(beside: dict[str, Any], words: str) -> None:
    part = {**LLAMA, "dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    whole = {"model_type": "llava", "text_config": part, "hidden_size": 4096, "dtype": "bfloat16"}
    assert model_from({**whole, "num_hidden_layers": 32}).layers == model_from(LLAMA).layers
    assert words in refusal(json.dumps({**whole, **beside}).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_self_decoder_layers", 2),  # YOCO: one cache for half of the layers
        *{key: [1] for key in ("global_attn_idx", "full_attn_idxs", "global_layers")}.items(),
        *{key: [1] for key in ("softmax_layers", "attn_layers", "image_cross_layers")}.items(),
        ("mixer_types", ["minicpm4", "lightning"]),
        *dict.fromkeys(("q_lora_rank", "o_lora_rank", "qk_nope_head_dim"), 64).items(),
        *dict.fromkeys(("attn_impl", "attention_method"), "mla").items(),
        *dict.fromkeys(("differential_attention", "diff_attn", "layer_sharing"), True).items(),
        # Looped models keep a cache for each time that a layer is run: Ouro, Huginn.
        *dict.fromkeys(("total_ut_steps", "num_loops", "num_recurrences"), 4).items(),
        ("mean_recurrence", 32),
        *dict.fromkeys(("num_layers", "n_layers", "n_layer", "decoder_layers"), 8).items(),
        *dict.fromkeys(("n_heads", "num_query_groups", "rnn_width", "key_dim"), 4).items(),
        *dict.fromkeys(("value_dim", "mem_tokens", "prefix_tokens", "sink_size"), 16).items(),
        ("streaming_llm", True),
        *dict.fromkeys(("cache_implementation",), "sliding_window").items(),
    ],
)
def test_a_field_that_others_publish_is_refused_where_its_family_has_none(
    name: str, value: object
) -> None:
    assert f"config.json: {name} " in refusal(json.dumps({**LLAMA, name: value}).encode())
    neutral: tuple[object, ...] = (None, False, 0, [], "")
    for nothing in neutral:
        assert model_from({**LLAMA, name: nothing}).layers == model_from(LLAMA).layers


@pytest.mark.parametrize(
    "same",
    [
        *({name: 32} for name in ("num_layers", "n_layer", "decoder_layers", "n_heads")),
        {"num_query_groups": 8},
        {"cache_implementation": "static", "_attn_implementation": "sdpa", "sinkhorn_iters": 20},
        {"scale_attn_by_inverse_layer_idx": True, "repetition_penalty": 1.1, "pad_idx": 3},
    ],
)
def test_what_says_the_same_again_or_nothing_of_caches_is_passed_over(same: dict[str, Any]) -> None:
    assert model_from({**LLAMA, **same}).layers == model_from(LLAMA).layers


def test_windows_may_ask_transformers_for_a_cache_of_their_own() -> None:
    assert model_from({**GEMMA, "cache_implementation": "hybrid"}) == model_from(GEMMA)


def test_two_text_parts_are_not_chosen_from() -> None:
    both = {"model_type": "gemma3", "text_config": GEMMA, "llm_config": GEMMA}
    assert "text_config and llm_config contradict" in refusal(json.dumps(both).encode())


def test_a_field_that_is_there_twice_is_refused() -> None:
    """Every parser takes another one of them."""
    words = refusal(b'{"model_type": "llama", "num_hidden_layers": 2, "num_hidden_layers": 3}')
    assert "'num_hidden_layers' is there twice" in words


def test_infinity_is_read_where_nothing_depends_on_it() -> None:
    plain = json.dumps({**LLAMA, "time_limit": [0, 1]}).encode()
    config = load_config(plain.replace(b"1]", b"Infinity]"), source="config.json")
    assert read_model(config, name="m").layers == model_from(LLAMA).layers
    wrong = json.dumps({**LLAMA, "num_hidden_layers": 99}).replace("99", "Infinity")
    assert "num_hidden_layers is inf" in refusal(wrong.encode())


@given(
    name=st.sampled_from(sorted(path.stem for path in MODELS.glob("*.json"))),
    data=st.data(),
)
def test_a_spoilt_config_is_a_model_or_bad_input_in_one_line(
    name: str, data: st.DataObject
) -> None:
    fields = json.loads((MODELS / f"{name}.json").read_text())
    part = fields.get("text_config", fields)
    for key in data.draw(st.lists(st.sampled_from(sorted(part)), min_size=1, max_size=2)):
        part[key] = data.draw(_JSON)
    try:
        groups_of(model_from(fields), limits())
    except BadInputError as error:
        assert "\n" not in str(error)  # noqa: PT017
