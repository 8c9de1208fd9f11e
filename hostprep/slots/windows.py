"""Which blocks a group needs: all, those in its window, or the state at the end."""

from __future__ import annotations

from hostprep.layout import RECURRENT, Group

__all__ = ["needed_from", "stored_range"]


def needed_from(group: Group, tokens_per_block: int, blocks: int) -> int:
    """Return the first block that the group needs to go on after so many full blocks.

    The token at position p attends to the window's last tokens, its own included: to p - w + 1
    and later. A recurrent group needs the state after the last block only.
    """
    if group.kind == RECURRENT:
        return max(0, blocks - 1)
    if group.window_tokens is None:
        return 0
    return max(0, blocks * tokens_per_block - group.window_tokens + 1) // tokens_per_block


def stored_range(group: Group, tokens_per_block: int, blocks: int, tokens: int) -> tuple[int, int]:
    """Return the blocks, first and end, that are worth keeping for whoever comes again.

    Of a window: what is needed after the last block, and one more to the left, since a prompt
    that ends on a block's edge is resumed a block earlier (its last token has to be computed):
    ceil((window - 1) / tokens_per_block) + 1 blocks, the floor in `hostprep size`. Of a state:
    the last one before the last token.
    """
    if group.kind == RECURRENT:
        end = (tokens - 1) // tokens_per_block
        return max(0, end - 1), end
    return needed_from(group, tokens_per_block, max(0, blocks - 1)), blocks
