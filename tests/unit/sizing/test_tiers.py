"""Memory beyond the floor, divided so that all groups are full at the same time."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import GIB, MIB
from hostprep.errors import BadInputError
from hostprep.sizing.groups import CacheGroup, Limits, floor_of, tier_of_bytes, tier_of_tokens
from hostprep.sizing.size import Memory, size_model
from tests.unit.sizing.models import model

pytestmark = pytest.mark.unit

LIMITS = Limits(max_batch_size=16, max_seq_len=8192, typical_seq_len=2048, max_num_tokens=2048)
HYBRID = (
    CacheGroup(name="full", slot_bytes=65_536),
    CacheGroup(name="window-1024", slot_bytes=327_680, window=1024),
    CacheGroup(name="state", slot_bytes=1 << 20, per_sequence=True),
)


@given(st.integers(0, 64 * GIB))
def test_what_is_given_is_used_and_never_more(spare: int) -> None:
    least = floor_of(HYBRID, LIMITS)
    size_bytes = least.size_bytes + spare
    tier = tier_of_bytes(HYBRID, LIMITS, size_bytes, option="--gpu-memory")
    assert tier.size_bytes <= size_bytes
    for group, floor in zip(tier.groups, least.groups, strict=True):
        assert group.slots >= group.min_slots == floor.slots
    # One usual request more would not fit.
    each = sum(group.per_request * group.group.slot_bytes for group in tier.groups)
    assert size_bytes - tier.size_bytes < each + 3 * 2 * MIB


@given(st.integers(1, 64))
def test_no_group_is_full_before_the_others(gib: int) -> None:
    tier = tier_of_bytes(HYBRID, LIMITS, gib * GIB, option="--gpu-memory")
    above = [group for group in tier.groups if group.slots > group.min_slots]
    served = [Fraction(group.slots, group.per_request) for group in above]
    assert max(served) - min(served) <= 1
    assert tier.limiting.requests == min(group.requests for group in tier.groups)


def test_shares_add_up() -> None:
    tier = tier_of_bytes(HYBRID, LIMITS, 8 * GIB, option="--gpu-memory")
    assert sum(tier.share(group) for group in tier.groups) == pytest.approx(1)


def test_so_many_tokens_are_held() -> None:
    tier = tier_of_tokens(HYBRID, LIMITS, 1_000_000)
    full = tier.groups[0]
    assert full.slots * LIMITS.tokens_per_block >= 1_000_000
    assert tier.limiting.requests >= 1_000_000 // 2048


def test_few_tokens_still_get_the_floor() -> None:
    assert tier_of_tokens(HYBRID, LIMITS, 1) == floor_of(HYBRID, LIMITS)


@pytest.mark.parametrize(
    ("size_bytes", "would_do"),
    [(MIB, "give --gpu-memory 222Mi"), (100 * MIB, "--max-batch-size 5")],
)
def test_too_little_memory_says_what_would_do(size_bytes: int, would_do: str) -> None:
    with pytest.raises(BadInputError, match="wait for ever") as caught:
        tier_of_bytes(HYBRID, LIMITS, size_bytes, option="--gpu-memory")
    assert would_do in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 400))
def test_what_is_said_to_do_does(mib: int) -> None:
    """Follow the advice, whatever it is: it must be true."""
    try:
        tier_of_bytes(HYBRID, LIMITS, mib * MIB, option="--gpu-memory")
    except BadInputError as error:
        words = str(error.remedy).replace(",", "").split()
        more = int(words[words.index("--gpu-memory") + 1].removesuffix("Mi"))
        tier_of_bytes(HYBRID, LIMITS, more * MIB, option="--gpu-memory")
        fewer = LIMITS
        if "--max-batch-size" in words:
            fewer = LIMITS.for_batch(int(words[words.index("--max-batch-size") + 1]))
        if "--max-seq-len" in words:
            fewer = fewer.for_length(int(words[words.index("--max-seq-len") + 1]))
        if fewer is not LIMITS:
            tier_of_bytes(HYBRID, fewer, mib * MIB, option="--gpu-memory")


def test_both_tiers_of_a_model() -> None:
    sizing = size_model(
        model("gemma-3-27b"),
        Limits(max_batch_size=8, max_seq_len=16_384, tensor_parallel=2),
        Memory(gpu_bytes=20 * GIB, host_bytes=100 * GIB),
    )
    assert sizing.smallest.size_bytes < sizing.floor.size_bytes < 20 * GIB
    assert sizing.gpu is not None
    assert sizing.gpu.size_bytes <= 20 * GIB
    assert 99 * GIB < sizing.host.size_bytes <= 100 * GIB
    layout = sizing.layout
    assert layout.size_bytes + layout.directory_bytes == sizing.host.size_bytes
    offsets = [group.offset_bytes for group in sizing.layout.layout.groups]
    assert all(offset % (2 * MIB) == 0 for offset in offsets)
    assert offsets == sorted(offsets)


def test_the_smallest_pool_serves_one_request_and_a_byte_less_does_not() -> None:
    sizing = size_model(model("gpt-oss-120b"), LIMITS, Memory())
    one = LIMITS.for_batch(1)
    size_bytes = sizing.smallest.size_bytes
    assert tier_of_bytes(sizing.groups, one, size_bytes, option="--gpu-memory").groups
    with pytest.raises(BadInputError, match="--max-seq-len"):
        tier_of_bytes(sizing.groups, one, size_bytes - 1, option="--gpu-memory")


def test_host_memory_and_host_tokens_exclude_each_other() -> None:
    with pytest.raises(BadInputError, match="--host-memory and --host-tokens"):
        size_model(model("llama-3.1-8b"), LIMITS, Memory(host_bytes=1, host_tokens=1))
