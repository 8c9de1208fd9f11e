"""What a pool gives for requests: slots that stay as they are until they are released."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.errors import BadInputError
from hostprep.slots.request import (
    OUTSIDE,
    REUSED,
    SHARED,
    STORED,
    WRITE,
    Counts,
    GroupUse,
    PartialMatch,
    Request,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.slots.pool import SlotPool


class Claim:
    """Slots of one request, none of which is evicted before `release`.

    One thread at a time commits it, takes over for it, or releases it. A claim that is dropped
    without a release keeps its slots for good.
    """

    __slots__ = (
        "_pool",
        "_unwritten",
        "evicted",
        "generation",
        "known",
        "partial",
        "request",
        "reused_tokens",
        "uses",
    )

    def __init__(
        self,
        pool: SlotPool,
        request: Request,
        uses: list[GroupUse],
        *,
        evicted: int,
        reused_tokens: int = 0,
        partial: PartialMatch | None = None,
    ) -> None:
        self._pool = pool
        self.request = request
        self.partial = partial
        """Further tokens to copy, beyond the blocks that are REUSED."""
        self.uses = uses
        """By group, in the layout's order."""
        self.evicted = evicted
        """Blocks of others that made room for this request's."""
        self.reused_tokens = reused_tokens
        """Tokens to load, partial match included."""
        self.generation = 0
        """Of its records in the pool's directory; 0: what it writes is not recorded."""
        self.known: Request | None = None
        """What the request was when it was claimed, where tokens are remembered at its commit: its
        lists are the caller's."""
        self._unwritten: list[list[int]] | None = None

    @property
    def unwritten(self) -> list[list[int]]:
        """By group: blocks still to be committed."""
        if self._unwritten is None:  # not needed while claiming
            self._unwritten = [use.blocks(WRITE) for use in self.uses]
        return self._unwritten

    @property
    def compute_tokens(self) -> int:
        """Tokens left to compute."""
        return self.request.tokens - self.request.computed_tokens - self.reused_tokens

    @property
    def counts(self) -> Counts:
        """What was done for it: from its own blocks, never by differences of sums."""
        return Counts(*self.sums())

    def sums(self) -> tuple[int, ...]:
        """Return the fields of `counts`."""
        uses, request = self.uses, self.request
        kinds = uses[0].kinds if len(uses) == 1 else b"".join([use.kinds for use in uses])
        return (
            1,
            len(kinds),
            kinds.count(REUSED),
            kinds.count(STORED),
            kinds.count(SHARED),
            kinds.count(WRITE),
            kinds.count(OUTSIDE),
            self.evicted,
            request.tokens,
            request.computed_tokens,
            self.reused_tokens,
            self.compute_tokens,
        )

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
