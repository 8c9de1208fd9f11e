"""TensorRT-LLM's rules: its two cache managers, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostprep.errors import BadInputError
from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import AUTO, TypeChoice
from hostprep.sizing.engines.rules import DEFAULT_DEVICE, EngineSizing
from hostprep.sizing.engines.trtllm import (
    PoolGroup,
    TrtLlmRules,
    floors_of,
    granularity,
    shares_of,
    slots_of_quota,
)
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import Limits
from hostprep.sizing.size import Memory
from tests.unit.sizing.models import MODELS

pytestmark = pytest.mark.unit

RULES = TrtLlmRules()
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def size(
    name: str,
    *,
    kv: str = AUTO,
    memory: Memory | None = None,
    fields: dict[str, Any] | None = None,
    **changes: Any,
) -> EngineSizing:
    document = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8")) | (fields or {})
    config = load_config(json.dumps(document).encode(), source=f"{name}.json")
    choice = RULES.types(config, TypeChoice(kv=kv), DEFAULT_DEVICE)
    model = read_model(config, name=name, choice=choice)
    values = {"max_batch_size": 4, "max_seq_len": 4096, "tokens_per_block": 32} | changes
    return RULES.size(model, Limits(**values), memory or Memory(), DEFAULT_DEVICE)


def test_the_older_manager_has_whole_blocks_of_one_pool() -> None:
    block_bytes = 32 * 32 * 2 * 8 * 128 * 2
    memory = Memory(gpu_bytes=1000 * block_bytes - 1, host_bytes=50 * block_bytes)
    found = size("llama-3.1-8b", memory=memory)
    assert found.block_bytes == block_bytes
    assert found.gpu is not None
    assert found.gpu.blocks == 999
    assert found.gpu.tokens == 999 * 32
    assert found.gpu.concurrency == 999 / 128
    assert "tokens per block=32, primary blocks=999" in found.gpu.log_lines
    assert found.host[0].blocks == 50


def test_it_keeps_windows_as_if_they_were_full() -> None:
    found = size("gemma-2-9b")
    assert [(group.name, group.layers) for group in found.groups] == [("full", 42)]
    assert "keeps all tokens" in " ".join(found.notes)


def test_the_newer_manager_has_pools_of_whole_grains() -> None:
    block_bytes = 32 * 61 * 576 * 2
    found = size("deepseek-v3", memory=Memory(gpu_bytes=64 * GIB, host_bytes=10 * block_bytes))
    assert found.gpu is not None
    assert found.gpu.blocks == 64 * GIB // block_bytes
    # Host pools are whole 2 MiB: ten blocks of 2.1 MiB have 11 of them.
    assert found.host[0].blocks == (11 * 2 * MIB) // block_bytes == 10


def test_its_grain_grows_with_the_memory() -> None:
    assert granularity(GIB) == 2 * MIB
    assert granularity(2 * GIB) == 4 * MIB
    assert granularity(5 * GIB) == 8 * MIB
    assert granularity(60 * GIB) == 32 * MIB
    assert granularity(500 * GIB) == 32 * MIB


def test_windows_with_equal_slots_share_their_pools() -> None:
    found = size("gpt-oss-120b", memory=Memory(gpu_bytes=40 * GIB))
    (group,) = found.groups
    assert (group.name, group.layers, group.padded_layers) == ("full and window", 36, 18)
    assert found.gpu is not None
    # 128 blocks of a request of 4096 tokens, and those of its window.
    assert group.blocks_per_request == 128 + 4
    slot_bytes = 18 * 2 * 8 * 64 * 2 * 32
    assert found.gpu.blocks == 40 * GIB // slot_bytes


def test_a_block_of_a_shared_pool_is_one_groups_and_all_of_them_fit() -> None:
    found = size("gpt-oss-120b", memory=Memory(gpu_bytes=64 * GIB))
    assert found.gpu is not None
    assert found.gpu.block_bytes == found.block_bytes == 18 * 32 * 2 * 8 * 64 * 2
    assert 0 <= 64 * GIB - found.gpu.blocks * found.gpu.block_bytes < 64 * MIB
    assert found.gpu.tokens == int(found.gpu.concurrency * 4096)


def test_others_divide_memory_as_one_request_of_2048_tokens_does() -> None:
    groups = (
        PoolGroup(windows=(None,), layers=1, slot_bytes=(MIB,)),
        PoolGroup(windows=(1024,), layers=1, slot_bytes=(MIB,)),
    )
    grain = 2 * MIB
    # 2049 tokens are 65 blocks; (2049 - 1024) // 32 = 32 of them have left the window.
    shares = shares_of(groups, 32, grain)
    assert shares == (66 * MIB, 34 * MIB)
    assert slots_of_quota(groups, 1000 * MIB, shares, (33, 33), grain) == (660, 340)


def test_a_windowed_pool_has_one_requests_window_at_least_as_issue_15401_found() -> None:
    # 137,984 tokens in blocks of 256: 539 where all are kept, one where 128 or 8 are.
    history = 137_983
    windows = (128, None, 8)
    groups = [PoolGroup(windows=(window,), layers=1, slot_bytes=(2 * MIB,)) for window in windows]
    assert [group.blocks_of(history + 1, history, 256) for group in groups] == [1, 539, 1]
    assert floors_of(groups, 256) == (2, 2, 2)
    shares = shares_of(groups, 256, 2 * MIB, history=history)
    assert shares == (2 * MIB, 1078 * MIB, 2 * MIB)
    slots = slots_of_quota(groups, 543 * 2 * MIB, shares, (2, 2, 2), 2 * MIB)
    assert slots == (2, 539, 2)


def test_a_window_at_its_worst_place_lies_across_one_block_more() -> None:
    groups = [PoolGroup(windows=(window,), layers=1, slot_bytes=(1,)) for window in (1, 32, 1024)]
    assert floors_of(groups, 32) == (1, 2, 33)
    shared = [PoolGroup(windows=(None, 128), layers=2, slot_bytes=(1,))]
    assert floors_of(shared, 32) == (5 + 5,)


def test_latents_of_sparse_attention_are_bfloat16_or_plain_fp8() -> None:
    index_bytes = 128 + 4
    tokens = 32 * 61
    assert size("deepseek-v3.2").block_bytes == tokens * (576 * 2 + index_bytes)
    assert size("deepseek-v3.2", kv="fp8").block_bytes == tokens * (576 + index_bytes)


def test_auto_is_what_modelopt_says_and_others_are_refused() -> None:
    plain = size("llama-3.1-8b").block_bytes
    modelopt = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}
    assert size("llama-3.1-8b", fields=modelopt).block_bytes == plain // 2
    scheme = {"type": "float", "num_bits": 8, "dynamic": False}
    other = {
        "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    }
    with pytest.raises(BadInputError, match="--kv-dtype fp8"):
        size("llama-3.1-8b", fields=other)


def test_the_first_pipeline_stages_have_a_layer_more() -> None:
    found = size("deepseek-v3", pipeline_parallel=4)
    (group,) = found.groups
    assert (group.layers, group.padded_layers) == (61, 16)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3"])
def test_a_request_of_the_longest_kind_fits_into_the_least_and_into_no_less(name: str) -> None:
    least = size(name).least_bytes
    found = size(name, memory=Memory(gpu_bytes=least)).gpu
    assert found is not None
    assert found.concurrency >= 1
    with pytest.raises(BadInputError, match="--gpu-memory"):
        size(name, memory=Memory(gpu_bytes=least - MIB))


def test_host_pools_are_divided_as_the_gpus_are() -> None:
    with pytest.raises(BadInputError, match="--host-memory"):
        size("gemma-3-27b", memory=Memory(host_bytes=100 * GIB))
    found = size("gemma-3-27b", memory=Memory(gpu_bytes=40 * GIB, host_bytes=80 * GIB))
    assert found.gpu is not None
    assert found.host[0].blocks / found.gpu.blocks == pytest.approx(2, rel=0.01)


def test_tokens_that_the_host_is_to_keep_are_kept() -> None:
    for name in ("llama-3.1-8b", "gpt-oss-120b", "deepseek-v3"):
        found = size(name, memory=Memory(host_tokens=100_000))
        assert found.host[0].blocks >= 100_000 / 32


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("deepseek-v4-flash", {"tokens_per_block": 256}, "deepseek_v4"),
        ("qwen3-next-80b-a3b", {}, "qwen3_next"),
        ("gemma-4-31b", {}, "gemma4"),
        ("llama-3.1-8b", {"speculative_tokens": 2}, "--speculative-tokens"),
        ("qwen3-1.7b", {"beam_width": 2}, "--beam-width"),
        ("llama-3.1-8b", {"kv": "int8"}, "--kv-dtype"),
        ("llama-3.1-8b", {"pipeline_parallel": 33}, "--pp"),
        ("deepseek-v3", {"memory": Memory(gpu_bytes=MIB)}, "--gpu-memory"),
        ("deepseek-v3", {"memory": Memory(host_bytes=MIB)}, "--host-memory"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInputError, match=said):
        size(name, **changes)


_GROUPS = st.lists(
    st.builds(
        lambda window, sizes: PoolGroup(windows=(window,), layers=1, slot_bytes=tuple(sizes)),
        st.none() | st.integers(1, 4096),
        st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=200)
@given(groups=_GROUPS, quota_bytes=st.integers(128 * MIB, 64 * GIB))
def test_pools_never_take_more_than_their_quota_in_grains(
    groups: list[PoolGroup], quota_bytes: int
) -> None:
    grain = granularity(quota_bytes)
    shares = shares_of(groups, 32, grain)
    floors = floors_of(groups, 32)
    try:
        slots = slots_of_quota(groups, quota_bytes, shares, floors, grain)
    except BadInputError:
        assert sum(-(-floor * size // grain) for floor, size in _pools(groups, floors)) > (
            quota_bytes // grain
        )
        return
    grains = sum(-(-count * size // grain) for count, size in _pools(groups, slots))
    assert grains <= -(-quota_bytes // grain)
    assert all(count >= floor for count, floor in zip(slots, floors, strict=True))


def _pools(groups: list[PoolGroup], counts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    for group, count in zip(groups, counts, strict=True):
        for size_bytes in group.slot_bytes:
            yield count, size_bytes
