"""The fewest slots of each group with which no scheduler waits for ever.

The third seed of this project: TensorRT-LLM issue 15401, where groups with a window were sized
by one request at the end of its sequence, got a single slot, and nothing moved any more.
"""

from __future__ import annotations

from hostprep.sizing.groups import CacheGroup
from hostprep.sizing.limits import Limits

__all__ = ["min_slots", "slots_of_request", "window_blocks"]


def window_blocks(window: int, tokens_per_block: int, tokens: int = 1) -> int:
    """Return the most blocks that computing so many adjacent tokens looks at.

    They and the window - 1 before them are window - 1 + tokens in a row; n tokens in a row lie in
    at most ceil((n - 1) / tokens_per_block) + 1 blocks. With one token and a window that fits in a
    block it is 2 and not 1, as often as it lies across two of them: what TensorRT-LLM's pull
    request 15588 found.
    """
    return -(-(window + tokens - 2) // tokens_per_block) + 1


def slots_of_request(group: CacheGroup, limits: Limits, tokens: int) -> int:
    """Return the slots that a request with so many tokens holds while it decodes."""
    if group.per_sequence:
        return limits.beam_width
    whole = -(-(tokens + limits.speculative_tokens) // limits.tokens_per_block)
    if group.window is None:
        return whole * limits.beam_width
    drafted = 1 + limits.speculative_tokens
    live = window_blocks(group.window, limits.tokens_per_block, drafted)
    return min(whole, live) * limits.beam_width


def min_slots(group: CacheGroup, limits: Limits) -> int:
    """Return the fewest slots of a group that serve `max_batch_size` requests.

    States: one for each sequence. Groups that keep all tokens: the longest request must fit, and
    every request have one block. Groups with a window: every sequence's window wherever it lies,
    and what a step's `max_num_tokens` of prompts need besides, for blocks that leave the window
    are freed after the step, and not within it.
    """
    if group.per_sequence:
        return limits.sequences
    longest = slots_of_request(group, limits, limits.max_seq_len)
    if group.window is None:
        return max(longest, limits.sequences)
    return limits.sequences * (longest // limits.beam_width) + _chunk_slots(group.window, limits)


def _chunk_slots(window: int, limits: Limits) -> int:
    """Return the slots that a step's prompt tokens can add to those of decoding requests.

    A request whose chunk has 1 + e tokens looks at window_blocks(1 + e) blocks: the first block
    more comes with the tokens that are left in its last block, each further one with a whole block
    of tokens. A step's tokens go where they need most blocks: first to as many requests as there
    are, then on. No request has more blocks than the longest one.
    """
    block = limits.tokens_per_block
    decoding = window_blocks(window, block, 1 + limits.speculative_tokens)
    whole = -(-(limits.max_seq_len + limits.speculative_tokens) // block)
    room = max(0, whole - decoding)
    if room == 0:
        return 0
    free = max(0, limits.max_num_tokens - limits.max_batch_size)
    span = window - 1 + limits.speculative_tokens
    first = -span % block + 1
    begun = min(limits.max_batch_size, free // first)
    further = (free - begun * first) // block
    return min(begun + further, limits.max_batch_size * room)
