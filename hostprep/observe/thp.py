"""Transparent huge pages: the active choice of each knob."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostprep.facts import ThpFacts
from hostprep.observe.parse import parse_bracketed

if TYPE_CHECKING:
    from hostprep.observe.host import HostRoot

__all__ = ["observe_thp"]


def observe_thp(host: HostRoot) -> ThpFacts:
    """Return the knobs; `unknown` for one that this kernel does not have."""
    enabled, defrag, shmem = (
        parse_bracketed(host.read_text(f"/sys/kernel/mm/transparent_hugepage/{knob}") or "")
        for knob in ("enabled", "defrag", "shmem_enabled")
    )
    return ThpFacts(
        enabled=enabled or "unknown",
        defrag=defrag or "unknown",
        shmem_enabled=shmem or "unknown",
    )
