"""Transparent huge pages: the active choice of each knob."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostprep.linux.procfs import parse_bracketed
from hostprep.node.facts import ThpFacts

if TYPE_CHECKING:
    from hostprep.node.observe.host import HostRoot

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
