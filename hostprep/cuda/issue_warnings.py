"""Known faults of this machine, told once, before they are met."""

from __future__ import annotations

from hostprep.cuda.known_issues import Fault
from hostprep.cuda.local_issues import faults_here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.handoff import Region

__all__ = ["warn_once"]

_told: set[str] = set()


def warn_once(
    size_bytes: int, chunk_bytes: int | None = None, region: Region | None = None
) -> tuple[Fault, ...]:
    """Log a warning of each fault that stalls or fails, once in a process; return those logged."""
    told = tuple(
        fault
        for fault in faults_here(size_bytes, chunk_bytes, region)
        if fault.severity != "info" and fault.name not in _told
    )
    if told:
        import logging

        for fault in told:
            _told.add(fault.name)
            logging.getLogger("hostprep.register").warning("%s; %s", fault.what, fault.remedy)
    return told
