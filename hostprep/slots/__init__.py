"""The slots of a region: who may use which, decided for a whole batch at once.

For connectors of any engine; standard library only. See docs/slots.md.
"""

from hostprep.layout import ATTENTION, RECURRENT, Group, Layout
from hostprep.slots.claims import BatchClaim, Claim
from hostprep.slots.lease import over
from hostprep.slots.model import (
    OUTSIDE,
    REUSED,
    SHARED,
    STORED,
    WRITE,
    Counts,
    GroupUse,
    Missing,
    PartialMatch,
    Request,
    ShortageError,
)
from hostprep.slots.pool import GroupUsage, SlotPool

__all__ = [
    "ATTENTION",
    "OUTSIDE",
    "RECURRENT",
    "REUSED",
    "SHARED",
    "STORED",
    "WRITE",
    "BatchClaim",
    "Claim",
    "Counts",
    "Group",
    "GroupUsage",
    "GroupUse",
    "Layout",
    "Missing",
    "PartialMatch",
    "Request",
    "ShortageError",
    "SlotPool",
    "over",
]
