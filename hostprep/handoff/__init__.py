"""The handoff: the published file that says what memory is there, and its distrustful reader."""

from hostprep.handoff.model import SCHEMA, AttachAdvice, Handoff, Region
from hostprep.handoff.reader import parse_handoff, read_handoff
from hostprep.handoff.verify import check_region, open_region, verify_handoff

__all__ = [
    "SCHEMA",
    "AttachAdvice",
    "Handoff",
    "Region",
    "check_region",
    "open_region",
    "parse_handoff",
    "read_handoff",
    "verify_handoff",
]
