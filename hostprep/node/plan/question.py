"""One pool's question to the machine, and the two kinds of answer about backings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostprep.api.placement import Placement
from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import Backing
from hostprep.node.facts import Facts, LedgerEntry, PoolFacts, RegionFacts
from hostprep.node.plan.actions import Shortfall
from hostprep.node.plan.capacity import Budget
from hostprep.node.plan.changes import Changes
from hostprep.node.plan.placement import Layout, pages_per_node

__all__ = ["Offer", "Question", "Refusal"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A backing cannot be had now: on one NUMA node, or (`node_id` None) wherever it was to be."""

    backing: Backing
    why: str
    remedy: str
    reason: str = "BackingUnavailable"
    node_id: int | None = None
    less_would_do: bool = False
    """Whether asking for less is another remedy: how one does that depends on the pool."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The new regions can be had: what changes, what it takes, and what is left for others."""

    changes: Changes
    budget: Budget
    reserves: tuple[LedgerEntry, ...] = ()
    """Huge pages to be added."""
    returns: tuple[LedgerEntry, ...] = ()
    notes: tuple[str, ...] = ()
    own_mount: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One pool: what is asked for, what is there, and what may be taken."""

    spec: PoolSpec
    facts: Facts
    pool: PoolFacts | None
    layout: Layout
    budget: Budget
    shortfalls: Sequence[Shortfall]

    @property
    def regions(self) -> tuple[RegionFacts, ...]:
        """Regions that are there, finished or not."""
        return self.pool.regions if self.pool else ()

    @property
    def taken(self) -> tuple[LedgerEntry, ...]:
        """Huge pages that the pool added in this boot; a reboot voids the record."""
        if self.pool is None or self.pool.boot_id != self.facts.kernel.boot_id:
            return ()
        return self.pool.taken

    def pages(self, size_bytes: int, page_bytes: int, placement: Placement) -> dict[int, int]:
        """Return the pages of a region on each node that this plan reckons with."""
        return pages_per_node(size_bytes, page_bytes, placement, self.layout.node_ids)
