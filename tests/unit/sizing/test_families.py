"""What each family of models keeps, group by group."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep.errors import BadInputError
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.groups import groups_of
from tests.unit.sizing.models import MODELS, groups, limits, model, model_from, per_token

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.1-8b", {"full": (32, None)}),
        ("mistral-7b-v0.1", {"window-4096": (32, 4096)}),
        ("gemma-2-9b", {"full": (21, None), "window-4096": (21, 4096)}),
        ("gemma-3-27b", {"full": (10, None), "window-1024": (52, 1024)}),
        ("gemma-4-31b", {"full": (10, None), "window-1024": (50, 1024)}),
        ("gpt-oss-120b", {"full": (18, None), "window-128": (18, 128)}),
        ("deepseek-v3", {"full": (61, None)}),
        (
            "deepseek-v4-flash",
            {
                "compressed-4": (21, None),
                "compressed-128": (20, None),
                "window-128": (43, 128),
                "state": (41, None),
            },
        ),
        (
            "deepseek-v4-pro",
            {
                "compressed-4": (30, None),
                "compressed-128": (31, None),
                "window-128": (61, 128),
                "state": (61, None),
            },
        ),
        ("qwen3-next-80b-a3b", {"full": (12, None), "state": (36, None)}),
        ("nemotron-h-8b", {"full": (4, None), "state": (24, None)}),
        ("mamba2-2.7b", {"state": (64, None)}),
    ],
)
def test_layers_that_keep_the_same_are_one_group(
    name: str, expected: dict[str, tuple[int, int | None]]
) -> None:
    found = groups(name)
    assert {key: (group.layers, group.window) for key, group in found.items()} == expected
    assert {key for key, group in found.items() if group.per_sequence} <= {"state"}


def test_every_example_can_be_sized() -> None:
    for path in MODELS.glob("*.json"):
        assert groups(path.stem)


def test_gemma_4_stores_keys_and_values_of_both_kinds_of_layers() -> None:
    """3,523,215,360 bytes at 32,768 tokens with a window of 1,024: 838,860,800 of them windows."""
    full = per_token("gemma-4-31b", "full") * 32_768
    windows = per_token("gemma-4-31b", "window-1024") * 1024
    assert (full, windows) == (2_684_354_560, 838_860_800)


def test_layers_that_use_others_keys_have_no_slots() -> None:
    fields = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    }
    found = {group.name: group.layers for group in groups_of(model_from(fields), limits())}
    assert found == {"full": 2, "window-512": 2}


@pytest.mark.parametrize(
    ("name", "types", "expected"),
    [
        # 2 x 8 heads x 128, 32 layers
        ("llama-3.1-8b", {}, 131_072),
        ("llama-3.1-8b", {"kv": "fp8"}, 65_536),
        ("llama-3.1-8b", {"kv": "fp8_per_token_head"}, 32 * 16 * (128 + 4)),
        ("llama-3.1-8b", {"kv": "nvfp4"}, 32 * 16 * (64 + 8)),
        ("llama-3.1-8b", {"kv": "q8_0"}, 32 * 16 * 136),
        # 512 + 64
        ("deepseek-v3", {}, 61 * 1152),
        ("deepseek-v3", {"kv": "fp8"}, 61 * 576),
        ("deepseek-v3", {"kv": "fp8_ds_mla"}, 61 * 656),
        # and the index's keys: 128 + a scale
        ("deepseek-v3.2", {}, 61 * (656 + 132)),
        ("deepseek-v3.2", {"kv": "fp8"}, 61 * (656 + 132)),
        ("deepseek-v3.2", {"kv": "bfloat16"}, 61 * (1152 + 132)),
        ("deepseek-v3.2", {"kv": "bfloat16", "index": "bfloat16"}, 61 * (1152 + 256)),
        ("deepseek-v3.2", {"kv": "fp8_ds_mla"}, 61 * (656 + 132)),
    ],
)
def test_scales_are_counted(name: str, types: dict[str, str], expected: int) -> None:
    assert per_token(name, "full", types=TypeChoice(**types)) == expected


def test_compressed_latents_in_their_own_format() -> None:
    found = groups("deepseek-v4-flash", types=TypeChoice(kv="fp8_ds_mla"))
    assert found["window-128"].slot_bytes == 43 * 128 * 584
    assert found["compressed-4"].slot_bytes == 21 * 32 * (584 + 132)
    assert found["compressed-128"].slot_bytes == 20 * 584


def test_a_compressors_state_does_not_depend_on_the_caches_type() -> None:
    plain, packed = (
        groups("deepseek-v4-flash"),
        groups("deepseek-v4-flash", types=TypeChoice(kv="fp8_ds_mla")),
    )
    assert plain["state"] == packed["state"]


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_dealt_out_and_few_of_them_repeated(ranks: int, heads: int) -> None:
    served = limits(tensor_parallel=ranks)
    assert per_token("llama-3.1-8b", served=served) == 32 * 2 * heads * 128 * 2


def test_latents_are_whole_on_every_rank() -> None:
    assert per_token("deepseek-v3", served=limits(tensor_parallel=8)) == per_token("deepseek-v3")


def test_states_are_dealt_out_too() -> None:
    whole = groups("qwen3-next-80b-a3b")["state"].slot_bytes
    part = groups("qwen3-next-80b-a3b", served=limits(tensor_parallel=8))["state"].slot_bytes
    assert part * 8 == whole
    # A model with the same heads on 8 ranks: ssm_block_page_size=262144 (vllm-ascend issue 7393).
    assert part == 36 * (262_144 + 3 * 8192 // 8 * 2)


def test_drafted_tokens_keep_their_inputs() -> None:
    plain, drafted = model("nemotron-h-8b"), model("nemotron-h-8b", drafts=2)
    sizes = [groups_of(one, limits())[1].slot_bytes for one in (plain, drafted)]
    assert sizes[1] - sizes[0] == 24 * 2 * (128 * 64 + 2 * 8 * 128) * 2


def test_stages_have_the_slots_of_the_fullest() -> None:
    whole = groups("gemma-3-27b")
    staged = groups("gemma-3-27b", served=limits(pipeline_parallel=4))
    # 62 layers are 16, 16, 15 and 15: of every 6 one is full, and the last two are not.
    assert staged["full"].slot_bytes * 10 == whole["full"].slot_bytes * 3
    assert staged["window-1024"].slot_bytes * 52 == whole["window-1024"].slot_bytes * 14
    assert staged["full"].layers == 10


def test_a_window_that_never_closes_keeps_everything() -> None:
    found = groups("gemma-3-27b", served=limits(max_seq_len=1024))
    assert {key: (group.layers, group.window) for key, group in found.items()} == {
        "full": (62, None)
    }


@pytest.mark.parametrize(
    ("name", "served", "words"),
    [
        ("llama-3.1-8b", {"tensor_parallel": 3}, "--tp: is 3"),
        ("llama-3.1-8b", {"tensor_parallel": 12}, "--tp: is 12"),
        ("llama-3.1-8b", {"pipeline_parallel": 33}, "--pp: is 33 for 32 layers"),
        ("deepseek-v4-flash", {"tokens_per_block": 64}, "--tokens-per-block: is 64"),
        ("deepseek-v4-flash", {"tokens_per_block": 200}, "--tokens-per-block: is 200"),
        ("nemotron-h-8b", {"tensor_parallel": 5}, "--tp: is 5"),
    ],
)
def test_what_does_not_go_together_is_refused(
    name: str, served: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        groups(name, served=limits(**served))
    assert str(caught.value).startswith(words)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch_size": 0},
        {"max_batch_size": -1},
        {"max_seq_len": 0},
        {"max_num_tokens": 0},
        {"tokens_per_block": 0},
        {"beam_width": 0},
        {"speculative_tokens": -1},
        {"tensor_parallel": 0},
        {"pipeline_parallel": 0},
        {"typical_seq_len": 0},
        {"max_seq_len": 1 << 40},
    ],
)
def test_a_limit_that_makes_no_sense_is_named(wrong: dict[str, int]) -> None:
    (name,) = wrong
    option = {"tensor_parallel": "tp", "pipeline_parallel": "pp"}.get(name, name.replace("_", "-"))
    with pytest.raises(BadInputError, match=f"--{option}: is {wrong[name]}") as caught:
        limits(**wrong)
    assert caught.value.remedy


def test_a_usual_request_is_no_longer_than_the_longest() -> None:
    with pytest.raises(BadInputError, match="--typical-seq-len"):
        limits(max_seq_len=100, typical_seq_len=101)
