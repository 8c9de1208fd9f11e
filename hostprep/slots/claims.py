"""What a pool hands out for a batch."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.errors import BadInputError
from hostprep.slots.batch import Draft
from hostprep.slots.model import WRITE, Counts, GroupUse, PartialMatch, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.slots.pool import SlotPool

__all__ = ["BatchClaim", "Claim"]


class Claim:
    """Slots of one request, none of which is evicted before `release`.

    One thread at a time commits it, takes over for it, or releases it. A claim that is dropped
    without a release keeps its slots for good.
    """

    def __init__(self, pool: SlotPool, draft: Draft) -> None:
        self._pool = pool
        self.request: Request = draft.request
        self.partial: PartialMatch | None = draft.partial
        """Further tokens to copy, beyond the blocks that are REUSED."""
        self.uses: list[GroupUse] = [
            GroupUse(part.slots, bytes(part.kinds), part.evicted) for part in draft.parts
        ]
        """By group, in the layout's order."""
        self.counts: Counts = draft.counts()
        self._unwritten: list[list[int]] | None = None
        copied = self.partial.slots if self.partial else ()
        self.copied_from = [copied[i : i + 1] for i in range(len(self.uses))]

    @property
    def unwritten(self) -> list[list[int]]:
        """By group: blocks still to be committed."""
        if self._unwritten is None:  # while claiming, nobody asks
            self._unwritten = [use.blocks(WRITE) for use in self.uses]
        return self._unwritten

    @property
    def reused_tokens(self) -> int:
        """Tokens to load, partial match included."""
        return self.counts.reused_tokens

    @property
    def compute_tokens(self) -> int:
        """Tokens left to compute."""
        return self.counts.compute_tokens

    def commit(self, blocks: int | None = None) -> None:
        """See `SlotPool.commit`."""
        self._pool.commit(self, blocks)

    def release(self) -> None:
        """See `SlotPool.release`."""
        self._pool.release(self)

    def __repr__(self) -> str:
        return f"<Claim {self.request.id!r} {self.counts!r}>"


@dataclass(frozen=True)
class BatchClaim:
    """A whole batch's claims, in the order of its requests."""

    claims: tuple[Claim, ...]
    deferred: tuple[Request, ...] = ()
    """Requests beyond the token budget: nothing of theirs is claimed."""

    @property
    def compute_tokens(self) -> int:
        """What the batch has to compute: never more than the budget."""
        return sum(claim.compute_tokens for claim in self.claims)

    def release(self) -> None:
        """Release every claim. Raises BadInputError, once all are, if one was before."""
        released_before: BadInputError | None = None
        for claim in self.claims:
            try:
                claim.release()
            except BadInputError as error:
                released_before = error
        if released_before is not None:
            raise released_before
