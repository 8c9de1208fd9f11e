"""vLLM's rules: figures that vLLM 0.32.0 gave itself, and what must hold whatever the model is.

Tier engines compares many more (tests/engines/test_vllm_sizing.py); here are those of the models
in examples/models, asked of vLLM's own functions in the same way.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.errors import BadInputError
from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.engines import rules_of
from hostprep.sizing.engines.rules import DEFAULT_DEVICE, Device, EngineSizing
from hostprep.sizing.engines.vllm import tokens_in_flight
from hostprep.sizing.engines.vllm_host import WAYS, HostPool, blocks_of_request
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import Limits
from hostprep.sizing.model import Model
from hostprep.sizing.size import Memory
from tests.unit.sizing.models import MODELS, model_from, size_for_engine

pytestmark = pytest.mark.unit

GIB, MIB = 1 << 30, 1 << 20
B200 = Device(name="B200", capability=100, memory_bytes=180 * GIB)
A100 = Device(name="A100", capability=80, memory_bytes=80 * GIB)


def _model(
    name: str, *, drafts: int = 0, device: Device = DEFAULT_DEVICE, kv: str = "auto"
) -> Model:
    data = (MODELS / f"{name}.json").read_bytes()
    config = load_config(data, source=name)
    choice = rules_of("vllm").types(config, TypeChoice(kv=kv), device)
    return read_model(config, name=name, choice=choice, drafts=drafts)


def _limits(**changes: Any) -> Limits:
    usual = {"max_batch_size": 1, "max_seq_len": 32768, "tokens_per_block": 16}
    return Limits(**(usual | changes))


def _size(name: str, *, gib: int = 60, drafts: int = 0, **changes: Any) -> EngineSizing:
    served = _limits(speculative_tokens=drafts, **changes)
    memory = Memory(gpu_bytes=gib * GIB)
    return size_for_engine("vllm", _model(name, drafts=drafts), served, memory)


def _logged(sizing: EngineSizing) -> str:
    assert sizing.gpu is not None
    (line,) = sizing.gpu.log_lines
    return line


def test_a_window_is_charged_with_the_tokens_in_flight() -> None:
    """gpt-oss-120b on 8 ranks: fewer requests than its groups alone would have room for."""
    sizing = _size("gpt-oss-120b", gib=120, tensor_parallel=8, max_seq_len=131072)
    assert _logged(sizing) == (
        "GPU KV cache size: 24,830,876 tokens, Maximum concurrency for 131,072 tokens per "
        "request: 189.44x"
    )
    assert {group.name: group.blocks_per_request for group in sizing.groups} == {
        "window-128": -(-(127 + 2 * 8192) // 16) + 1,
        "full": 131072 // 16,
    }


def test_groups_are_padded_to_one_size() -> None:
    """Gemma-3-27B on 4 ranks: 7 groups of 10 layers, 52 with a window padded to 60."""
    sizing = _size("gemma-3-27b", tensor_parallel=4, max_seq_len=8192)
    assert [group.padded_layers for group in sizing.groups] == [10] * 7
    assert sum(group.layers for group in sizing.groups) == 62
    assert sum(group.blocks_per_request for group in sizing.groups) == 512 + 6 * 513
    # vLLM's own message says 1,122 MiB for the request; the pool's null block comes to that.
    assert (sizing.least_bytes - sizing.block_bytes) // MIB == 1121
    assert sizing.block_bytes == 10 * 32768


@pytest.mark.parametrize(
    ("name", "limits", "line"),
    [
        (
            "llama-3.1-8b",
            {},
            "491,520 tokens, Maximum concurrency for 32,768 tokens per request: 15.00x",
        ),
        (
            "deepseek-v3",
            {"tensor_parallel": 8},
            "916,784 tokens, Maximum concurrency for 32,768 tokens per request: 27.98x",
        ),
        (
            "deepseek-v3.2",
            {"tensor_parallel": 8, "tokens_per_block": 64},
            "822,528 tokens, Maximum concurrency for 32,768 tokens per request: 25.10x",
        ),
        (
            "deepseek-v4-flash",
            {"tensor_parallel": 8, "tokens_per_block": 256},
            "309,299 tokens, Maximum concurrency for 32,768 tokens per request: 9.44x",
        ),
    ],
)  # fmt: skip
def test_the_line_is_vllms(name: str, limits: dict[str, Any], line: str) -> None:
    assert _logged(_size(name, **limits)) == f"GPU KV cache size: {line}"


def test_blocks_are_as_large_as_a_state_and_drafts_keep_states() -> None:
    plain = _size("qwen3-next-80b-a3b", tensor_parallel=4)
    drafting = _size("qwen3-next-80b-a3b", tensor_parallel=4, drafts=2)
    for sizing, states in ((plain, 2), (drafting, 4)):
        kinds = {bool(group.tokens_per_block) for group in sizing.groups}
        assert kinds == {True, False}
        assert len({group.page_bytes for group in sizing.groups}) == 1
        assert {g.blocks_per_request for g in sizing.groups if not g.tokens_per_block} == {states}
        assert any("as large as a state" in note for note in sizing.notes)
    assert sum(group.layers for group in drafting.groups) == 48 + 1


def test_states_alone_have_no_cached_prefixes() -> None:
    sizing = _size("mamba2-2.7b", drafts=0)
    (group,) = sizing.groups
    assert (group.tokens_per_block, group.blocks_per_request) == (0, 1)


def test_a_stage_with_fewer_layers_does_not_limit_and_the_last_has_none_left_over() -> None:
    sizing = _size(
        "llama-3.1-8b", pipeline_parallel=3
    )  # 32 layers: 10, 11, 11 less one: 11, 11, 10
    assert sizing.block_bytes == 11 * 16 * 4096
    assert sizing.host == ()  # ranks would not agree on the size of a host block


@pytest.mark.parametrize(
    ("name", "limits", "words"),
    [
        ("llama-3.1-8b", {"beam_width": 2}, ("--beam-width", "as a request")),
        ("llama-3.1-8b", {"pipeline_parallel": 64}, ("--pp", "32 layers")),
        ("deepseek-v4-flash", {"tokens_per_block": 128}, ("--tokens-per-block", "256")),
        ("deepseek-v3.2", {"tokens_per_block": 32}, ("--tokens-per-block", "64")),
        ("llama-3.1-8b", {"tokens_per_block": 8}, ("--tokens-per-block", "multiples of 16")),
        ("llama-3.1-8b", {"tokens_per_block": 24}, ("--tokens-per-block", "multiples of 16")),
        ("llama-3.1-8b", {"max_num_tokens": 512, "max_batch_size": 1024}, ("--max-num-tokens",)),
    ],
)
def test_what_vllm_cannot_is_refused(
    name: str, limits: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(BadInputError) as refused:
        _size(name, **limits)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        *(
            ("llama-3.1-8b", kv)
            for kv in ("int8", "fp8_block128", "q8_0", "q4_0", "float32", "nvfp4", "fp8_ds_mla")
        ),
        *(
            ("deepseek-v3", kv)
            for kv in ("nvfp4", "int8_per_token_head", "fp8_per_token_head", "fp8_e5m2")
        ),
    ],
)
def test_types_that_vllm_does_not_have_are_refused(name: str, kv: str) -> None:
    with pytest.raises(BadInputError, match="--kv-dtype: .*choose auto, bfloat16 or fp8"):
        _model(name, kv=kv)


def test_types_that_vllm_has_are_sized() -> None:
    plain = _size("llama-3.1-8b").block_bytes
    memory = Memory(gpu_bytes=60 * GIB)
    for kv, part in (("float16", 1.0), ("fp8_e4m3", 0.5), ("int8_per_token_head", 132 / 256)):
        sizing = size_for_engine("vllm", _model("llama-3.1-8b", kv=kv), _limits(), memory)
        assert sizing.block_bytes == plain * part
    # On Blackwell there are kernels for 4 bits: half a byte, and a scale for 16.
    model = _model("llama-3.1-8b", kv="nvfp4", device=B200)
    sizing = size_for_engine("vllm", model, _limits(), memory, B200)
    assert sizing.block_bytes == plain * 72 / 256


@pytest.mark.parametrize(
    ("choice", "option"),
    [(TypeChoice(state="fp8"), "--state-dtype"), (TypeChoice(index="bfloat16"), "--index-dtype")],
)
def test_other_types_of_states_and_index_keys_are_refused(choice: TypeChoice, option: str) -> None:
    config = load_config((MODELS / "deepseek-v3.2.json").read_bytes(), source="deepseek-v3.2")
    with pytest.raises(BadInputError, match=option):
        rules_of("vllm").types(config, choice, DEFAULT_DEVICE)


@pytest.mark.parametrize(
    ("name", "kv", "tokens"), [("llama-3.1-8b", "fp8", 16), ("deepseek-v3.2", "bfloat16", 64)]
)
def test_gpus_without_the_kernels_are_refused(name: str, kv: str, tokens: int) -> None:
    served, memory = _limits(tokens_per_block=tokens), Memory(gpu_bytes=60 * GIB)
    with pytest.raises(BadInputError, match=r"--gpu: .*has no kernels .*A100"):
        size_for_engine("vllm", _model(name, kv=kv, device=A100), served, memory, A100)


def test_a_gpu_whose_numbers_were_not_compared_is_told() -> None:
    model, memory = _model("llama-3.1-8b"), Memory(gpu_bytes=60 * GIB)
    for device, is_told in ((DEFAULT_DEVICE, False), (A100, True), (B200, True)):
        notes = size_for_engine("vllm", model, _limits(), memory, device).notes
        assert any("compared with vLLM's own for Hopper" in note for note in notes) is is_told


def test_windows_in_some_layers_of_qwen_are_refused() -> None:
    fields = json.loads((MODELS / "qwen3-1.7b.json").read_text()) | {"max_window_layers": 4}
    fields |= {"use_sliding_window": True, "sliding_window": 4096, "layer_types": None}
    model = model_from({key: value for key, value in fields.items() if value is not None})
    with pytest.raises(BadInputError, match="max_window_layers"):
        size_for_engine("vllm", model, _limits(), Memory(gpu_bytes=60 * GIB))


def test_models_of_states_alone_have_no_host_tier() -> None:
    memory = Memory(gpu_bytes=60 * GIB, host_bytes=20 * GIB)
    sizing = size_for_engine("vllm", _model("mamba2-2.7b"), _limits(), memory)
    assert not sizing.host
    assert any("--enable-prefix-caching" in note for note in sizing.notes)
    assert size_for_engine("vllm", _model("nemotron-h-8b"), _limits(), memory).host


def test_no_more_requests_than_tokens_of_a_step_are_taken() -> None:
    rules, model = rules_of("vllm"), _model("llama-3.1-8b")
    for step, batch in ((512, 512), (8192, 1024)):
        own = rules.defaults(model, _limits(max_num_tokens=step), DEFAULT_DEVICE)
        assert own.max_batch_size.value == batch


def test_what_is_not_known_is_refused() -> None:
    model = _model("deepseek-v3.2", kv="fp8", device=B200)
    served, memory = _limits(tokens_per_block=64), Memory(gpu_bytes=60 * GIB)
    with pytest.raises(BadInputError) as refused:
        size_for_engine("vllm", model, served, memory, B200)
    assert refused.value.reason == "UnknownEngineRule"


def test_too_little_memory_is_refused_with_what_would_do() -> None:
    least = _size("gpt-oss-120b").least_bytes
    with pytest.raises(BadInputError, match=f"give --gpu-memory {-(-least >> 20)}Mi"):
        size_for_engine("vllm", _model("gpt-oss-120b"), _limits(), Memory(gpu_bytes=least - 1))
    assert size_for_engine("vllm", _model("gpt-oss-120b"), _limits(), Memory(gpu_bytes=least)).gpu


def test_defaults_are_those_of_the_gpu() -> None:
    rules, model = rules_of("vllm"), _model("llama-3.1-8b")
    small = Device(name="L40S", capability=89, memory_bytes=45 * GIB)
    found = {
        device.name: (own.max_batch_size.value, own.max_num_tokens.value)
        for device in (small, DEFAULT_DEVICE, B200)
        for own in (rules.defaults(model, None, device),)
    }
    assert found == {"L40S": (256, 2048), "H200": (1024, 8192), "B200": (1024, 16384)}
    latent = _model("deepseek-v3", device=B200)
    assert rules.defaults(latent, None, B200).tokens_per_block.value == 32


def test_windows_are_not_stored_as_if_full() -> None:
    sizing = _size("gemma-3-27b", tensor_parallel=4, max_seq_len=8192)
    blocks, notes = blocks_of_request(sizing.groups, 8192)
    assert blocks == 512 + 6 * 64
    assert len(notes) == 1
    assert "window-1024" in notes[0]
    assert blocks_of_request(sizing.groups, 16)[0] == 1  # one block, and no window before it


def test_latents_are_once_in_host_memory() -> None:
    tiers = {tier.way: tier for tier in _size("deepseek-v3", tensor_parallel=8).host}
    assert {way: tier.copies for way, tier in tiers.items()} == {
        "vllm": 1,
        "vllm-offloading": 1,
        "vllm-simple": 8,
    }


@given(data=st.data())
def test_bytes_and_blocks_of_a_region_agree(data: st.DataObject) -> None:
    pool = HostPool(
        way=data.draw(st.sampled_from(WAYS)),
        block_bytes=data.draw(st.integers(512, 64 * MIB)),
        ranks=data.draw(st.integers(1, 64)),
        is_replicated=data.draw(st.booleans()),
        page_bytes=data.draw(st.sampled_from([4096, 2 * MIB, GIB])),
        has_directory=data.draw(st.booleans()),
    )
    blocks = data.draw(st.integers(1, 1 << 20))
    size_bytes = pool.region_bytes(blocks)
    assert size_bytes % pool.page_bytes == 0
    assert pool.blocks(size_bytes) >= blocks > pool.blocks(size_bytes - pool.page_bytes)


@given(
    length=st.integers(1, 1 << 20),
    step=st.integers(1, 1 << 16),
    ranks=st.sampled_from([1, 2, 4, 8]),
    gib=st.integers(141, 4000),  # the longest request takes 140.5, with the most tokens a step
)
def test_the_pool_is_never_larger_than_the_memory_and_serves_the_longest_request(
    length: int, step: int, ranks: int, gib: int
) -> None:
    served = _limits(max_seq_len=length, max_num_tokens=step, tensor_parallel=ranks)
    sizing = size_for_engine("vllm", _GEMMA, served, Memory(gpu_bytes=gib * GIB))
    tier = sizing.gpu
    assert tier is not None
    assert tier.blocks * tier.block_bytes <= gib * GIB < (tier.blocks + 1) * tier.block_bytes
    assert tier.concurrency >= 1
    assert sizing.least_bytes <= gib * GIB
    assert tokens_in_flight(served) == 2 * step
    assert sum(group.layers for group in sizing.groups) == 62


_GEMMA = _model("gemma-3-27b")
