"""What one step of a pool changes, noted before it does: for who puts right what is half done."""

from __future__ import annotations

from collections.abc import Sequence

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
