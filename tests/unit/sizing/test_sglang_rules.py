"""SGLang's rules: its own classes' answers, the logs of others, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostprep.errors import BadInputError
from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import AUTO, TypeChoice
from hostprep.sizing.engines.rules import Device, EngineSizing
from hostprep.sizing.engines.sglang import mem_fraction_static
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import Limits
from hostprep.sizing.size import Memory
from tests.unit.sizing.models import MODELS, model_from
from tests.unit.sizing.sglang_cases import (
    ANSWERS,
    B200,
    GIB,
    H200,
    RULES,
    Case,
    answer_of,
    cases,
    gigabytes_of,
)

pytestmark = pytest.mark.unit

ANSWERED: dict[str, dict[str, Any]] = json.loads(ANSWERS.read_text(encoding="utf-8"))
GB = 10**9
A_SMALL_ONE = Device(name="T4", capability=75, memory_bytes=16 * GIB)


def size(
    name: str,
    *,
    device: Device = H200,
    kv: str = AUTO,
    drafts: int = 0,
    memory: Memory | None = None,
    fields: dict[str, Any] | None = None,
    **changes: Any,
) -> EngineSizing:
    document = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8")) | (fields or {})
    config = load_config(json.dumps(document).encode(), source=f"{name}.json")
    choice = RULES.types(config, TypeChoice(kv=kv), device)
    model = read_model(config, name=name, choice=choice, drafts=drafts)
    values = {"max_batch_size": 4, "max_seq_len": 4096, "tokens_per_block": 1} | changes
    limits = Limits(speculative_tokens=drafts, **values)
    return RULES.size(model, limits, memory or Memory(), device)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_pools_are_those_of_sglangs_own_classes(case: Case) -> None:
    answer = ANSWERED[case.name]
    ours = case.ours()
    for name, value in answer_of(ours).items():
        assert answer[name] == value, name
    if case.host_bytes is not None:
        assert ours.host[0].blocks * case.page == answer["host_tokens"]


def test_every_case_was_answered() -> None:
    assert {case.name for case in cases()} == set(ANSWERED)
    assert not any("error" in answer for answer in ANSWERED.values())


@pytest.mark.parametrize(
    ("device", "ranks", "latent", "fraction"),
    [
        # MiB: 512, 1.5 for each token of a chunk of 8192, 128 a rank, 2 for each of the 256 or 512
        # requests of the largest graph, 8 for each of 58 graphs of prompts (latents: 1536).
        (H200, 1, False, 1 - (512 + 12288 + 128 + 512 + 464) / 144384),
        (H200, 8, False, 1 - (512 + 12288 + 1024 + 1024 + 464) / 144384),
        (H200, 8, True, 1 - (512 + 12288 + 1024 + 1024 + 1536) / 144384),
        (A_SMALL_ONE, 1, False, 1 - (512 + 3072 + 128 + 16 + 8 * 42) / 16384),
    ],
)
def test_its_share_of_memory_leaves_room_for_chunks_ranks_and_graphs(
    device: Device, ranks: int, latent: bool, fraction: float
) -> None:
    found = mem_fraction_static(
        device, tensor_parallel=ranks, pipeline_parallel=1, is_latent=latent
    )
    assert found == round(fraction, 3)


def test_a_page_is_one_token_and_more_where_attention_needs_it() -> None:
    llama = size("llama-3.1-8b").model
    sparse = size("deepseek-v3.2", tokens_per_block=64).model
    states = size("qwen3-next-80b-a3b").model
    assert RULES.defaults(llama, None, H200).tokens_per_block.value == 1
    assert RULES.defaults(llama, None, B200).tokens_per_block.value == 64
    assert RULES.defaults(sparse, None, H200).tokens_per_block.value == 64
    assert RULES.defaults(states, None, B200).tokens_per_block.value == 1


@pytest.mark.parametrize(
    ("device", "kv", "token_bytes"),
    [
        (H200, AUTO, 576 * 2),
        (H200, "fp8", 656),  # 512 in FP8, 4 scales of 4 bytes, 64 positions of 16 bits
        (B200, AUTO, 576),  # TensorRT-LLM's kernels: neither scales nor wide positions
        (B200, "fp8", 576),
        (B200, "bfloat16", 576 * 2),
    ],
)
def test_latents_of_sparse_attention_are_kept_as_the_gpus_kernels_want_them(
    device: Device, kv: str, token_bytes: int
) -> None:
    found = size("deepseek-v3.2", device=device, kv=kv, tokens_per_block=64)
    index_bytes = 128 + 4
    assert found.block_bytes == 64 * 61 * (token_bytes + index_bytes)


def test_auto_follows_modelopt_and_not_compressed_tensors() -> None:
    scheme = {"type": "float", "num_bits": 8, "dynamic": False}
    compressed = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    modelopt = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    plain = size("llama-3.1-8b").block_bytes
    assert size("llama-3.1-8b", fields={"quantization_config": compressed}).block_bytes == plain
    assert size("llama-3.1-8b", fields={"quantization_config": modelopt}).block_bytes == plain // 2


def test_windows_have_a_pool_of_their_own_only_where_sglang_gives_them_one() -> None:
    windows = size("gpt-oss-120b", memory=Memory(gpu_bytes=20 * GIB))
    assert [(group.name, group.layers, group.window) for group in windows.groups] == [
        ("full", 18, None),
        ("window", 18, 128),
    ]
    as_if_full = size("gemma-3-27b", memory=Memory(gpu_bytes=20 * GIB))
    assert [(group.name, group.layers) for group in as_if_full.groups] == [("full", 62)]
    assert "keeps all tokens" in " ".join(as_if_full.notes)


def test_a_request_of_the_longest_kind_fits_into_the_least_and_into_no_less() -> None:
    for name in ("llama-3.1-8b", "gpt-oss-120b", "qwen3-next-80b-a3b", "deepseek-v3"):
        least = size(name).least_bytes
        found = size(name, memory=Memory(gpu_bytes=least)).gpu
        assert found is not None
        assert found.tokens >= 4096
        with pytest.raises(BadInputError, match="--gpu-memory"):
            size(name, memory=Memory(gpu_bytes=least - (1 << 20)))


def test_drafts_take_layers_of_the_same_pool() -> None:
    fields = {"num_nextn_predict_layers": 1}
    without = size("deepseek-v3", fields=fields)
    drafting = size("deepseek-v3", fields=fields, drafts=3)
    assert drafting.block_bytes - without.block_bytes == 576 * 2
    assert drafting.groups[0].padded_layers == 62


def test_pipeline_stages_get_what_the_last_one_can() -> None:
    # 61 layers: the last stages have one more.
    found = size("deepseek-v3", pipeline_parallel=4, memory=Memory(gpu_bytes=16 * 576 * 2 * 10_000))
    assert found.gpu is not None
    assert found.groups[0].padded_layers == 16
    assert found.gpu.tokens == 10_000


def test_host_pools_are_whole_gigabytes_with_a_page_more() -> None:
    found = size("llama-3.1-8b", tensor_parallel=4, memory=Memory(host_bytes=40 * GB + GB // 2))
    host = found.host[0]
    token_bytes = 32 * 2 * 2 * 128 * 2
    assert gigabytes_of(found) == 40
    assert host.blocks == 40 * GB // token_bytes + 1
    assert host.copies == 4
    assert host.block_bytes == 4 * token_bytes
    # As published: https://github.com/sgl-project/sglang/issues/14282 (TP 4, --hicache-size 40).
    assert "40.00 GB host memory" in host.notes[0]


def test_a_host_size_that_its_extra_page_breaks_is_one_gigabyte_less() -> None:
    found = size("llama-3.1-8b", memory=Memory(host_bytes=40 * GB))
    assert gigabytes_of(found) == 39


def test_index_keys_come_on_top_of_the_hosts_size() -> None:
    found = size("deepseek-v3.2", kv="fp8", tokens_per_block=64, memory=Memory(host_bytes=100 * GB))
    gigabytes = gigabytes_of(found)
    pages = gigabytes * GB // (656 * 61) // 64 + 1
    assert found.host[0].blocks == pages
    assert pages * 64 * 61 * (656 + 132) <= 100 * GB
    assert gigabytes == 83


@pytest.mark.parametrize("name", ["gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_host_pools_are_divided_as_the_gpus_are(name: str) -> None:
    with pytest.raises(BadInputError, match="--host-memory"):
        size(name, memory=Memory(host_bytes=100 * GB))
    found = size(name, memory=Memory(gpu_bytes=40 * GIB, host_bytes=100 * GB))
    small = size(name, memory=Memory(gpu_bytes=40 * GIB, host_bytes=20 * GB))
    assert 4.9 < found.host[0].blocks / small.host[0].blocks < 5.4


def test_tokens_that_the_host_is_to_keep_are_kept() -> None:
    found = size("qwen3-1.7b", memory=Memory(host_tokens=1_000_000))
    token_bytes = 28 * 2 * 8 * 128 * 2
    assert found.host[0].blocks >= 1_000_000
    assert gigabytes_of(found) == -(-1_000_000 * token_bytes // GB)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("deepseek-v4-flash", {"tokens_per_block": 256}, "deepseek_v4"),
        ("mamba2-2.7b", {}, "mamba2"),
        ("gpt-oss-120b", {"drafts": 2}, "--speculative-tokens"),
        ("llama-3.1-8b", {"beam_width": 2}, "--beam-width"),
        ("llama-3.1-8b", {"kv": "int8"}, "--kv-dtype"),
        ("llama-3.1-8b", {"kv": "nvfp4"}, "--kv-dtype"),
        ("llama-3.1-8b", {"pipeline_parallel": 33}, "--pp"),
        ("llama-3.1-8b", {"memory": Memory(host_bytes=GB // 2)}, "--host-memory"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInputError, match=said):
        size(name, **changes)


def test_layers_that_use_others_keys_are_refused() -> None:
    fields = {"num_kv_shared_layers": 10}
    with pytest.raises(BadInputError, match="num_kv_shared_layers"):
        size("gemma-4-31b", fields=fields)


@settings(deadline=None, max_examples=60)
@given(
    memory=st.tuples(st.integers(1 << 30, 1 << 36), st.integers(0, 1 << 33)),
    layers=st.integers(2, 12),
    heads=st.sampled_from((1, 2, 8)),
    page=st.sampled_from((1, 16, 64)),
    windowed=st.booleans(),
)
def test_pools_fit_and_more_memory_never_means_fewer_tokens(
    memory: tuple[int, int], layers: int, heads: int, page: int, windowed: bool
) -> None:
    fields: dict[str, Any] = {
        "model_type": "gpt_oss" if windowed else "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": heads,
        "hidden_size": 512,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    if windowed:
        kinds = ["sliding_attention", "full_attention"]
        fields |= {
            "sliding_window": 128,
            "layer_types": [kinds[index % 2] for index in range(layers)],
        }
    limits = Limits(max_batch_size=1, max_seq_len=1024, tokens_per_block=page)
    model = model_from(fields)
    found = []
    for size_bytes in (memory[0], sum(memory)):
        sizing = RULES.size(model, limits, Memory(gpu_bytes=size_bytes), H200)
        assert sizing.gpu is not None
        answer = answer_of(sizing)
        per_layer = 2 * heads * 64 * 2
        taken = sum(
            (answer["swa_tokens"] if group.window else answer["tokens"]) * group.padded_layers
            for group in sizing.groups
        )
        assert taken * per_layer <= size_bytes
        found.append(sizing.gpu.tokens)
    assert found[0] <= found[1]


@settings(deadline=None, max_examples=40)
@given(host_bytes=st.integers(2 * GB, 500 * GB), page=st.sampled_from((1, 64)))
def test_host_pools_fit_into_the_memory_that_is_given(host_bytes: int, page: int) -> None:
    found = size("qwen3-1.7b", memory=Memory(host_bytes=host_bytes), tokens_per_block=page)
    host = found.host[0]
    assert host.blocks * host.block_bytes <= host_bytes
    larger = Memory(host_bytes=host_bytes + GB)
    more = size("qwen3-1.7b", memory=larger, tokens_per_block=page)
    assert more.host[0].blocks > host.blocks
