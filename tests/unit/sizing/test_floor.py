"""The fewest slots: the seed's case, and both parts of the formula against counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.sizing.groups import CacheGroup, Limits, min_slots, slots_of_request, window_blocks

pytestmark = pytest.mark.unit

# TensorRT-LLM issue 15401: DeepSeek-V4 with a window, all tokens compressed, and a state of 8.
SEED = (
    CacheGroup(name="window-128", slot_bytes=1, window=128),
    CacheGroup(name="full", slot_bytes=1),
    CacheGroup(name="window-8", slot_bytes=1, window=8),
)
SEED_LIMITS = Limits(max_batch_size=64, max_seq_len=137_984, tokens_per_block=256)


def floor(limits: Limits) -> tuple[int, ...]:
    return tuple(min_slots(group, limits) for group in SEED)


def at_the_end(window: int | None) -> int:
    """What was computed before: one request at its last token, blocks behind its window gone."""
    stale = 0 if window is None else (137_983 + 1 - window) // 256
    return -(-137_984 // 256) - stale


def test_the_seeds_case_in_three_rows() -> None:
    before = tuple(at_the_end(group.window) for group in SEED)
    assert before == (1, 539, 1)

    # The seed's proposal: a slot for each of 64 requests. It lacks the second block of each
    # window that lies across two (up to 255 of 256 positions for 128 tokens: often), and what a
    # prompt's chunk needs.
    proposal = tuple(
        max(64, slots) if group.window else slots for group, slots in zip(SEED, before, strict=True)
    )
    assert proposal == (64, 539, 64)

    # Merged in pull request 15588: the worst place of one request's window. One request can
    # always go on; the other 63 wait for it.
    merged = tuple(
        max(slots, window_blocks(group.window, 256) if group.window else 0)
        for group, slots in zip(SEED, before, strict=True)
    )
    assert merged == (2, 539, 2)

    # Ours: the worst place of every request's window, and a step's 8192 tokens of prompts where
    # they need most blocks: 62 chunks of 131 tokens that begin a block more, or 32 of 251.
    assert floor(SEED_LIMITS) == (64 * 2 + 62, 539, 64 * 2 + 32)
    # Without prompts in the step: both blocks of every window, and no more.
    only_decoding = Limits(
        max_batch_size=64, max_seq_len=137_984, tokens_per_block=256, max_num_tokens=64
    )
    assert floor(only_decoding) == (128, 539, 128)


def blocks_of(first: int, last: int, block: int) -> int:
    return last // block - first // block + 1


@given(st.integers(1, 70), st.integers(1, 20), st.integers(1, 40))
def test_a_windows_blocks_are_those_of_its_worst_place(
    window: int, block: int, tokens: int
) -> None:
    worst = max(
        blocks_of(begin - window + 1, begin + tokens - 1, block)
        for begin in range(window, window + 3 * block)
    )
    assert window_blocks(window, block, tokens) == worst


@given(
    window=st.integers(1, 40),
    block=st.integers(1, 12),
    batch=st.integers(1, 4),
    tokens=st.integers(1, 40),
)
def test_chunks_of_a_step_fit_however_they_are_dealt_out(
    window: int, block: int, batch: int, tokens: int
) -> None:
    group = CacheGroup(name="w", slot_bytes=1, window=window)
    limits = Limits(
        max_batch_size=batch,
        max_seq_len=10_000,
        tokens_per_block=block,
        max_num_tokens=max(tokens, batch),
    )
    most = {0: 0}
    for _ in range(batch):  # every request computes 1 token or more, all of them no more than fit
        worst: dict[int, int] = {}
        for used, slots in most.items():
            for n in range(1, limits.max_num_tokens - used + 1):
                worst[used + n] = max(
                    worst.get(used + n, 0), slots + window_blocks(window, block, n)
                )
        most = worst
    assert min_slots(group, limits) == max(most.values())


@given(st.integers(1, 64), st.integers(1, 5000), st.integers(1, 256))
def test_groups_that_keep_everything_hold_the_longest_request_and_one_block_of_each(
    batch: int, longest: int, block: int
) -> None:
    limits = Limits(max_batch_size=batch, max_seq_len=longest, tokens_per_block=block)
    group = CacheGroup(name="full", slot_bytes=1)
    assert min_slots(group, limits) == max(-(-longest // block), batch)


def test_a_state_is_one_for_each_sequence() -> None:
    limits = Limits(max_batch_size=8, max_seq_len=4096, beam_width=4)
    assert min_slots(CacheGroup(name="state", slot_bytes=1, per_sequence=True), limits) == 32


def test_beams_and_drafts_need_more() -> None:
    plain = Limits(max_batch_size=8, max_seq_len=4096, max_num_tokens=8)
    group = CacheGroup(name="w", slot_bytes=1, window=33)
    assert min_slots(group, plain) == 8 * 2
    beams = Limits(max_batch_size=8, max_seq_len=4096, max_num_tokens=8, beam_width=4)
    assert min_slots(group, beams) == 8 * 4 * 2
    drafts = Limits(max_batch_size=8, max_seq_len=4096, max_num_tokens=8, speculative_tokens=1)
    assert min_slots(group, drafts) == 8 * 3


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 64), st.integers(1, 9000))
def test_no_request_needs_more_than_all_of_its_blocks(
    window: int, longest: int, batch: int, tokens: int
) -> None:
    limits = Limits(
        max_batch_size=batch, max_seq_len=longest, tokens_per_block=16, max_num_tokens=tokens
    )
    group = CacheGroup(name="w", slot_bytes=1, window=window)
    assert min_slots(group, limits) <= batch * -(-longest // 16)
    assert slots_of_request(group, limits, longest) <= -(-longest // 16)
