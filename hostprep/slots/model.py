"""What is asked of a pool, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostprep.errors import BusyError

__all__ = [
    "OUTSIDE",
    "REUSED",
    "SHARED",
    "STORED",
    "WRITE",
    "Counts",
    "GroupUse",
    "Missing",
    "PartialMatch",
    "Request",
    "ShortageError",
]

OUTSIDE = 0
"""No slot: outside the group's window, or not to be stored."""
REUSED = 1
"""Its content is in the slot, and the request starts from it: to be loaded."""
STORED = 2
"""Its content is in the slot, and not needed from there: nothing to load or write. It lies behind a
gap or before the window, or the engine has it."""
SHARED = 3
"""Another claim is to write this slot: compute the block as if there were none, and leave it."""
WRITE = 4
"""An empty slot: to be written, then committed."""


@dataclass(frozen=True)
class Request:
    """Tokens that a request needs blocks for: its prompt, or a later part of its sequence."""

    id: str
    tokens: int
    """Length of the sequence up to where blocks are wanted."""
    hashes: Sequence[bytes]
    """One for each full block from `first_block` on. A hash stands for its block and for all
    before it (a chain), and for nothing else: model, adapter and salt belong into it."""
    computed_tokens: int = 0
    """So many from the start the engine has already (on the GPU): not looked for here."""
    prompt_tokens: int | None = None
    """Length of the whole sequence known so far; None where it is `tokens`."""
    first_block: int = 0
    """Blocks before it are not asked for: for what a sequence got since its last claim."""
    reuse_limit_tokens: int | None = None
    """Reuse at most so many; None for all but the last, whose output the engine needs."""
    token_ids: Sequence[int] | None = None
    """From token 0 on; only needed for partial matches."""
    store: bool = True
    """False: claim what can be reused, and no slots for the rest."""


@dataclass(frozen=True)
class Counts:
    """What was done for one request, or for all together. Blocks are counted in every group.

    reused + stored + shared + written + outside == blocks, and
    computed_tokens + reused_tokens + compute_tokens == tokens.
    """

    requests: int = 0
    blocks: int = 0
    reused: int = 0
    stored: int = 0
    shared: int = 0
    written: int = 0
    outside: int = 0
    evicted: int = 0
    """Blocks of others that made room for this request's."""
    tokens: int = 0
    computed_tokens: int = 0
    """What the engine said it had."""
    reused_tokens: int = 0
    """What it can load: whole blocks, and the tokens of a partial match."""
    compute_tokens: int = 0
    """What is left for it to compute: the request's share of the token budget."""

    def plus(self, *others: Counts) -> Counts:
        """Return the sum."""
        rows = [tuple(vars(counts).values()) for counts in (self, *others)]
        return Counts(*map(sum, zip(*rows)))


@dataclass(frozen=True)
class PartialMatch:
    """The first tokens of a block are those of another block: copy them, never write them."""

    block: int
    """Index of the request's block, counted as its hashes are."""
    tokens: int
    """How many from the block's start."""
    slots: tuple[int, ...]
    """The slot to copy from, in each group."""


@dataclass(frozen=True)
class GroupUse:
    """A request's blocks in one group, in the order of its hashes."""

    slots: Sequence[int]
    """-1 for OUTSIDE."""
    kinds: bytes
    """OUTSIDE, REUSED, STORED, SHARED or WRITE."""
    evicted: Sequence[bytes] = ()
    """Hashes of the blocks that made room, where the pool was told to keep them."""

    def blocks(self, kind: int) -> list[int]:
        """Return the indices of the blocks of that kind."""
        first = self.kinds.find(kind)
        if first >= 0 and self.kinds.count(kind) == len(self.kinds) - first:
            return list(range(first, len(self.kinds)))
        return [index for index, found in enumerate(self.kinds) if found == kind]


@dataclass(frozen=True)
class Missing:
    """What one group lacks for a batch."""

    group: str
    needed: int
    """Slots for blocks that nobody has yet."""
    available: int
    """Free, or evictable while the batch's own matches are claimed."""
    slots: int
    """All of the group's."""

    def __str__(self) -> str:
        return (
            f"group {self.group!r} lacks {self.needed - self.available} slots "
            f"({self.needed} needed, {self.available} of {self.slots} not claimed)"
        )


class ShortageError(BusyError):
    """Not every group has the slots that the batch needs: nothing was claimed."""

    default_reason = "SlotsShort"

    def __init__(self, missing: tuple[Missing, ...]) -> None:
        too_large = any(lack.needed > lack.slots for lack in missing)
        super().__init__(
            "; ".join(map(str, missing)),
            remedy="split the batch, or size the pool for it (`hostprep size`)"
            if too_large
            else "release claims, claim a smaller batch, or claim it with store=False",
        )
        self.missing = missing
