"""What an interrupted step may have left half done, made again. The pool holds its lock."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hostprep.slots.claim import Claim
from hostprep.slots.group import READY, SlotGroup
from hostprep.slots.matching import PartialMatches
from hostprep.slots.request import WRITE


def make_again(
    groups: Sequence[SlotGroup],
    claims: Collection[Claim],
    quarantine: Sequence[tuple[SlotGroup, list[int]]],
    partial: PartialMatches | None,
    *,
    rebuild: bool,
) -> None:
    """Count the open claims again; with `rebuild` make all the rest again from what slots hold.

    `quarantine`: slots that are neither free nor used. May itself be left half done, and be called
    again: it takes as long as the pool is large.
    """
    for index, slots in enumerate(groups):
        claimed = [claim.uses[index].slots for claim in claims]
        copied = [claim.partial.slots[index : index + 1] for claim in claims if claim.partial]
        slots.recount([*claimed, *copied])
        if rebuild:
            withheld = [slot for of, held_back in quarantine if of is slots for slot in held_back]
            slots.rebuild(_writing(index, slots, claims), withheld)
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
