"""What one step of a pool changes, noted before it does; and what is made again of half a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hostprep.slots.group import READY, SlotGroup
from hostprep.slots.matching import PartialMatches
from hostprep.slots.request import WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.slots.claim import Claim
    from hostprep.slots.line import Ticket

NOTHING = 0
COUNTING = 1
"""Claims are being counted, and nothing else is changed."""
CHANGING = 2
"""Anything is."""


class Step:
    """The pool has it while the step runs, and until it is put right where that was interrupted.

    A step that ended whole is the pool's no more: whatever it noted is of no effect then. Who runs
    it has it still, and gives it back if an exception came between the end and the caller.
    """

    changes = NOTHING
    claims: Sequence[Claim] = ()
    """Those that it opens: nobody has them until it ends."""
    ticket: Ticket | None = None
    """Whose place the claims take; it gets that back with `needs` if they are taken back."""
    needs: Sequence[int] = ()
    closing: tuple[Claim, list[int]] | None = None
    """A claim that is being released, and the totals with it."""


def make_again(
    groups: Sequence[SlotGroup],
    claims: Collection[Claim],
    withheld: Iterable[tuple[SlotGroup, Sequence[int]]],
    partial: PartialMatches | None,
    *,
    rebuild: bool,
) -> None:
    """Count the open claims again; with `rebuild` make all the rest again from what slots hold.

    `withheld`: slots that are neither free nor used. May itself be left half done, and be called
    again: it takes as long as the pool is large.
    """
    for index, slots in enumerate(groups):
        claimed = [claim.uses[index].slots for claim in claims]
        copied = [claim.partial.slots[index : index + 1] for claim in claims if claim.partial]
        slots.recount([*claimed, *copied])
        if rebuild:
            kept_back = [slot for of, those in withheld if of is slots for slot in those]
            slots.rebuild(_writing(index, slots, claims), kept_back)
    if rebuild and partial is not None:
        partial.rebuild()


def _writing(index: int, slots: SlotGroup, claims: Collection[Claim]) -> set[int]:
    """Return the slots that claims are to write still, and have the claims know their blocks."""
    writing = set()
    for claim in claims:
        use = claim.uses[index]
        left = [block for block in use.blocks(WRITE) if slots.state[use.slots[block]] != READY]
        claim.unwritten[index] = left
        writing.update([use.slots[block] for block in left])
    return writing
