"""The slots of a region: who may use which, decided for a whole batch at once.

For connectors of any engine; standard library only. See docs/slots.md.
"""

from hostprep.layout import ATTENTION, RECURRENT, Group, Layout
from hostprep.slots.claim import BatchClaim, Claim
from hostprep.slots.directory import Directory
from hostprep.slots.line import Ticket
from hostprep.slots.pool import GroupUsage, SlotPool
from hostprep.slots.region import over
from hostprep.slots.request import (
    OUTSIDE,
    REUSED,
    SHARED,
    STORED,
    WRITE,
    Counts,
    GroupUse,
    Missing,
    OverBudgetError,
    PartialMatch,
    Request,
    ShortageError,
)

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
    "Directory",
    "Group",
    "GroupUsage",
    "GroupUse",
    "Layout",
    "Missing",
    "OverBudgetError",
    "PartialMatch",
    "Request",
    "ShortageError",
    "SlotPool",
    "Ticket",
    "over",
]
