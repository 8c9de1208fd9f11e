"""A batch's first phase: claim what matches. The pool holds its lock around both phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hostprep.slots.group import SlotGroup
from hostprep.slots.index import Keys
from hostprep.slots.matching import Part, match
from hostprep.slots.model import (
    OUTSIDE,
    REUSED,
    SHARED,
    STORED,
    WRITE,
    Counts,
    Missing,
    PartialMatch,
    Request,
    ShortageError,
)
from hostprep.slots.partial import PartialMatches

__all__ = ["Draft", "check_shortage", "claim_matches"]


class Draft:
    """One request while its batch is being claimed."""

    def __init__(
        self,
        request: Request,
        keys: Keys,
        parts: Sequence[Part],
        reused_tokens: int,
        partial: PartialMatch | None,
        *,
        is_whole: bool,
    ) -> None:
        self.request = request
        self.parts = parts
        self.reused_tokens = reused_tokens
        self.partial = partial
        self.is_whole = is_whole
        """Whether it holds its blocks from the sequence's first on: none of them can go before."""
        self.wanted = [_missing(keys, part.missing) for part in parts]
        """By group: the keys of the blocks that have no slot."""
        self.evicted = 0

    @property
    def compute_tokens(self) -> int:
        """Tokens that are neither reused nor computed already."""
        return self.request.tokens - self.request.computed_tokens - self.reused_tokens

    def counts(self) -> Counts:
        """Return what the request was given: from its own blocks, never by differences of sums."""
        count = {
            kind: sum(part.kinds.count(kind) for part in self.parts)
            for kind in (OUTSIDE, REUSED, STORED, SHARED, WRITE)
        }
        return Counts(
            requests=1,
            blocks=len(self.request.hashes) * len(self.parts),
            reused=count[REUSED],
            stored=count[STORED],
            shared=count[SHARED],
            written=count[WRITE],
            outside=count[OUTSIDE],
            evicted=self.evicted,
            tokens=self.request.tokens,
            computed_tokens=self.request.computed_tokens,
            reused_tokens=self.reused_tokens,
            compute_tokens=self.compute_tokens,
        )


def _missing(keys: Keys, blocks: Sequence[int]) -> Keys:
    return (
        keys.part(blocks.start, blocks.stop) if isinstance(blocks, range) else keys.chosen(blocks)
    )


def claim_matches(
    groups: Sequence[SlotGroup],
    tokens_per_block: int,
    requests: Sequence[Request],
    *,
    partial: PartialMatches | None,
    token_budget: int | None,
    check: Callable[[Request], None],
) -> tuple[list[Draft], list[set[bytes]]]:
    """First phase: claim what every request matches. Nothing is allocated, nothing evicted.

    Returns the requests that the budget admits, and the keys that they lack together in each
    group. `check` looks at every request: just before it is looked up, since its keys lie in the
    processor's caches then.
    """
    lacking: list[set[bytes]] = [set() for _ in groups]
    drafts: list[Draft] = []
    budget = token_budget
    try:
        for number, request in enumerate(requests):
            check(request)
            draft = _draft(groups, tokens_per_block, request, partial)
            if budget is not None:
                if draft.compute_tokens > budget:
                    for deferred in requests[number + 1 :]:
                        check(deferred)
                    break
                budget -= draft.compute_tokens
            drafts.append(draft)
            for index, (group, part) in enumerate(zip(groups, draft.parts)):
                part.first = group.claim(_held(draft, index))
                lacking[index].update(draft.wanted[index].keys)
    except BaseException:
        _give_up(groups, drafts)
        raise
    return drafts, lacking


def _draft(
    groups: Sequence[SlotGroup],
    tokens_per_block: int,
    request: Request,
    partial: PartialMatches | None,
) -> Draft:
    keys = Keys(request.hashes, groups[0].index.key_bytes)
    end, parts = match(groups, tokens_per_block, request, keys)
    found = partial.match(request, end) if partial is not None else None
    behind = (request.first_block + end) * tokens_per_block
    reused_tokens = max(0, behind - request.computed_tokens) + (found.tokens if found else 0)
    first = 0 if request.store else request.computed_tokens // tokens_per_block
    return Draft(
        request, keys, parts, reused_tokens, found, is_whole=not request.first_block + first
    )


def _held(draft: Draft, group: int) -> Sequence[int]:
    present = draft.parts[group].present
    return present if draft.partial is None else [*present, draft.partial.slots[group]]


def _give_up(groups: Sequence[SlotGroup], drafts: Sequence[Draft]) -> None:
    """Take the first phase back: it only counted, so the order of eviction is as it was."""
    for draft in drafts:
        for index, group in enumerate(groups):
            group.unclaim(_held(draft, index))


def check_shortage(
    groups: Sequence[SlotGroup], drafts: Sequence[Draft], lacking: Sequence[set[bytes]]
) -> None:
    """Raise ShortageError, with the first phase taken back, if a group lacks slots for the second.

    What the first phase claimed is not available; a block that several requests lack counts once.
    """
    missing = []
    for index, (group, keys) in enumerate(zip(groups, lacking)):
        available = group.available - sum(len(draft.parts[index].first) for draft in drafts)
        if len(keys) > available:
            missing.append(Missing(group.group.name, len(keys), available, group.group.slots))
    if missing:
        _give_up(groups, drafts)
        raise ShortageError(tuple(missing))
