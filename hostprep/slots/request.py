"""A pool's requests and answers, and which requests it refuses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from hostprep.errors import BadInputError, BusyError

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


@dataclass  # not frozen: that costs half a microsecond a field
class Request:
    """Tokens that a request needs blocks for: its prompt, or a later part of its sequence."""

    id: str
    tokens: int
    """Length of the sequence up to where blocks are wanted."""
    hashes: Sequence[bytes]
    """One for each full block from `first_block` on. A hash stands for its block and for all
    before it (a chain), and for nothing else: model, adapter and salt belong into it."""
    computed_tokens: int = 0
    """Tokens from the start that the engine has already (on the GPU): not looked up here."""
    prompt_tokens: int | None = None
    """Length of the whole sequence known so far; None where it is `tokens`."""
    first_block: int = 0
    """Blocks before it are not requested: for what a sequence got since its last claim."""
    reuse_limit_tokens: int | None = None
    """Reuse at most so many; None for all but the last, whose output the engine needs."""
    token_ids: Sequence[int] | None = None
    """From token 0 on; only needed for partial matches."""
    store: bool = True
    """False: claim what can be reused, and no slots for the rest."""
    keep: bool = True
    """False: what it writes is not recorded in the pool's directory, and ends with the process."""


@dataclass(frozen=True)
class Counts:
    """Counts of one request, or of all together. Blocks are counted in every group.

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
    """What the engine had, by its request."""
    reused_tokens: int = 0
    """What it can load: whole blocks, and the tokens of a partial match."""
    compute_tokens: int = 0
    """What is left for it to compute: the request's share of the token budget."""

    def plus(self, other: Counts) -> Counts:
        """Return the sum."""
        return Counts(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class PartialMatch:
    """The first tokens of a block are those of another block: copy them, never write them."""

    block: int
    """Index of the request's block, counted as its hashes are."""
    tokens: int
    """How many from the block's start."""
    slots: tuple[int, ...]
    """The slot to copy from, in each group."""


@dataclass
class GroupUse:
    """A request's blocks in one group, in the order of its hashes."""

    slots: Sequence[int]
    """-1 for OUTSIDE."""
    kinds: bytes
    """OUTSIDE, REUSED, STORED, SHARED or WRITE."""
    evicted: Sequence[bytes] = ()
    """Hashes of the blocks that made room, where the pool keeps them."""

    def blocks(self, kind: int) -> list[int]:
        """Return the indices of the blocks of that kind."""
        first = self.kinds.find(kind)
        if first < 0:
            return []
        if self.kinds.count(kind) == len(self.kinds) - first:
            return list(range(first, len(self.kinds)))
        return [index for index, found in enumerate(self.kinds) if found == kind]


@dataclass(frozen=True)
class Missing:
    """What one group lacks for a batch."""

    group: str
    needed: int
    """Slots for blocks that are not cached yet."""
    available: int
    """Free, or evictable while the batch's own matches are claimed."""
    slots: int
    """All of the group's."""
    reserved: int = 0
    """Of those that are available: for claims that came before and wait in line."""

    def __str__(self) -> str:
        waiting = f", {self.reserved} of them for claims that wait in line" if self.reserved else ""
        return (
            f"group {self.group!r} lacks {self.needed - self.available + self.reserved} slots "
            f"({self.needed} needed, {self.available} of {self.slots} not claimed{waiting})"
        )


class ShortageError(BusyError):
    """Not every group has the slots that the batch needs: nothing was claimed."""

    default_reason = "SlotsShort"

    def __init__(self, missing: tuple[Missing, ...]) -> None:
        if any(lack.needed > lack.slots for lack in missing):
            remedy = "split the batch, or size the pool for it (`hostprep size`)"
        elif any(lack.reserved for lack in missing):
            remedy = "wait in line (line_up), or go ahead of it where slots are held (ahead=True)"
        else:
            remedy = "release claims, claim a smaller batch, or claim it with store=False"
        super().__init__("; ".join(map(str, missing)), remedy=remedy)
        self.missing = missing


class OverBudgetError(BadInputError):
    """The first request of a batch needs more tokens than any budget has: nothing was claimed.

    Deferred, it would be the first one again, and all others would wait behind it for ever.
    """

    default_reason = "OverBudget"

    def __init__(self, request: Request, compute_tokens: int, token_budget: int) -> None:
        super().__init__(
            f"request {request.id!r} has {compute_tokens} tokens to compute, and the token budget "
            f"is {token_budget}",
            remedy="claim it in chunks, or raise the budget; where token_budget is what a step has "
            "left, give the whole of it as largest_budget",
        )
        self.request = request
        self.compute_tokens = compute_tokens
        self.token_budget = token_budget


def check_request(
    request: Request, tokens_per_block: int, hash_bytes: int, *, whole: bool, partial: bool
) -> None:
    """Raise BadInputError, naming the request and the field. `whole`: states are kept."""
    if not isinstance(request, Request):
        raise BadInputError(f"{request!r:.80} is no Request: a batch is made of those")
    who = f"request {request.id!r}"
    for name, number in (
        ("tokens", request.tokens),
        ("computed_tokens", request.computed_tokens),
        ("first_block", request.first_block),
        ("reuse_limit_tokens", request.reuse_limit_tokens or 0),
        ("prompt_tokens", request.prompt_tokens or 0),
    ):
        if type(number) is not int or number < 0:
            raise BadInputError(f"{who}: {name} is {number!r}: a whole number, 0 or more")
    if request.computed_tokens > request.tokens:
        raise BadInputError(
            f"{who}: computed_tokens is {request.computed_tokens}, more than its "
            f"{request.tokens} tokens"
        )
    if request.first_block * tokens_per_block > request.computed_tokens:
        raise BadInputError(
            f"{who}: first_block is {request.first_block}, beyond the {request.computed_tokens} "
            "computed_tokens: no request asks for the blocks between them"
        )
    _check_hashes(request, who, tokens_per_block, hash_bytes)
    if request.token_ids is not None:
        _check_token_ids(request.token_ids, request.tokens, who, read=partial)
    if whole and request.prompt_tokens not in (None, request.tokens):
        raise BadInputError(
            f"{who}: a chunk of {request.tokens} of {request.prompt_tokens} tokens, and there is "
            "a recurrent group: a state is kept for the end of the prompt only",
            reason="RecurrentStateInChunks",
            remedy="claim the whole prompt at once (tokens equal to prompt_tokens)",
        )


def _check_hashes(request: Request, who: str, tokens_per_block: int, hash_bytes: int) -> None:
    hashes = request.hashes
    if not isinstance(hashes, (list, tuple)) and not _is_sequence(hashes):
        # It may be read once only, and a request that is deferred or refused is claimed again.
        raise BadInputError(f"{who}: hashes is a {type(hashes).__name__}: a list or a tuple")
    wanted = request.tokens // tokens_per_block - request.first_block
    if len(hashes) != max(0, wanted):
        raise BadInputError(
            f"{who}: {len(hashes)} hashes for {max(0, wanted)} full blocks "
            f"({request.tokens} tokens, {tokens_per_block} a block, from block "
            f"{request.first_block})"
        )
    problem = problem_of(hashes, hash_bytes)
    if problem:
        raise BadInputError(f"{who}: {problem}")


def _is_sequence(hashes: object) -> bool:
    return isinstance(hashes, Sequence) and not isinstance(hashes, (str, bytes))


def problem_of(hashes: Sequence[bytes], hash_bytes: int) -> str:
    """Return what is wrong with hashes; empty for nothing."""
    if set(map(type, hashes)) - {bytes}:
        return "hashes are bytes"
    lengths = set(map(len, hashes)) - {hash_bytes}
    if lengths:
        return f"a hash of {min(lengths)} bytes: this pool's have {hash_bytes} (hash_bytes)"
    return ""


def _check_token_ids(ids: Sequence[int], tokens: int, who: str, *, read: bool) -> None:
    """`read`: the pool will, when blocks are written: too late to refuse them."""
    try:
        count, _ = len(ids), ids[:0]
    except TypeError:
        raise BadInputError(
            f"{who}: token_ids is a {type(ids).__name__}: a list, a tuple or an array"
        ) from None
    if count < tokens:
        raise BadInputError(f"{who}: token_ids has {count} of {tokens} tokens")
    if read:
        try:
            array("I", ids)
        except (TypeError, OverflowError, ValueError) as error:
            raise BadInputError(
                f"{who}: token_ids are whole numbers from 0 to 2**32 - 1 ({error})"
            ) from None
