"""The planning context of one pool, and what comes back before anything new is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import Backing
from hostprep.node.facts import Facts, LedgerEntry, PoolFacts, RegionFacts
from hostprep.node.plan.actions import ReserveHugePages, ReturnHugePages, Shortfall
from hostprep.node.plan.capacity import Budget
from hostprep.node.plan.changes import Changes, PlannedRegion
from hostprep.node.plan.placement import Layout, is_own_mount, pages_per_node


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a backing cannot be had now: on one NUMA node, or on all (`node_id` None)."""

    backing: Backing
    why: str
    remedy: str
    reason: str = "BackingUnavailable"
    node_id: int | None = None
    less_would_do: bool = False
    """Whether asking for less is another remedy; how to do so depends on the pool."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to have the pool: what changes, what it takes, and what is left for other pools."""

    changes: Changes
    budget: Budget
    reserves: tuple[ReserveHugePages, ...] = ()
    returns: tuple[ReturnHugePages, ...] = ()
    notes: tuple[str, ...] = ()
    own_mount: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
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
        """Huge pages that the pool added in this boot; a reboot voids the ledger."""
        if self.pool is None or self.pool.boot_id != self.facts.kernel.boot_id:
            return ()
        return self.pool.taken


def free_all(context: PlanContext, changes: Changes) -> tuple[Budget, tuple[ReturnHugePages, ...]]:
    """Return the budget once removals and returns are done, and the returns.

    Half-made regions that will be resumed count as removed too: the plan asks for the whole.
    """
    gone = [removal.region for removal in changes.removed]
    gone += [planned.resumed for planned in changes.new if planned.resumed is not None]
    budget = free_regions(context, gone, context.budget)
    budget = _own_reservations(context, gone, budget)
    return return_pages(context, changes, budget)


def free_regions(context: PlanContext, regions: Iterable[RegionFacts], budget: Budget) -> Budget:
    """Return the budget with those regions' resident memory back."""
    for region in regions:
        page = region.backing.page_bytes
        for node_id, pages in _pages_back(context, region).items():
            if node_id not in budget.nodes:
                continue
            if region.backing.is_hugetlb:
                budget = budget.with_pages(node_id, page, pages)
            else:
                budget = budget.with_ordinary(node_id, pages * page, block_bytes=page)
        if not region.backing.is_hugetlb and not is_own_mount(region.mount_dir, context.pool):
            budget = budget.charged(root_bytes=-region.resident_bytes)
    return budget


def _pages_back(context: PlanContext, region: RegionFacts) -> dict[int, int]:
    """Return the pages per node that surely come back, rounded down where interleaved."""
    pages = region.resident_bytes // region.backing.page_bytes
    if region.placement.node is not None:
        return {region.placement.node: pages}
    nodes = context.layout.node_ids
    return dict.fromkeys(nodes, pages // len(nodes))


def _own_reservations(context: PlanContext, gone: list[RegionFacts], budget: Budget) -> Budget:
    """Give back what half-made hugetlbfs files have reserved and not yet faulted.

    The kernel keeps a shared mapping's reservation with the inode after its process died; it is
    in HugePages_Rsvd, and it is ours. Never credited beyond pages that we added and do not use:
    a file may have reserved less than its size, and others' reservations stay untouched.
    """
    if context.pool is None:
        return budget
    huge = [region for region in gone if region.backing.is_hugetlb]
    for page in {region.backing.page_bytes for region in huge}:
        open_ends = sum(
            (region.size_bytes - region.resident_bytes) // page
            for region in huge
            if region.backing.page_bytes == page and not region.finished
        )
        used = context.pool.huge_pages(page)
        added = sum(entry.pages for entry in context.taken if entry.page_bytes == page)
        reserved = context.facts.huge(page).reserved
        budget = budget.with_unreserved(page, max(0, min(open_ends, added - used, reserved)))
    return budget


def return_pages(
    context: PlanContext, changes: Changes, budget: Budget
) -> tuple[Budget, tuple[ReturnHugePages, ...]]:
    """Return pages that we added and that neither kept nor new regions need.

    Never more than the ledger has, and never one that is in use or reserved.
    """
    returns: list[ReturnHugePages] = []
    for entry in context.taken:
        if entry.node_id not in budget.nodes:
            continue
        free = budget.nodes[entry.node_id].free_pages.get(entry.page_bytes, 0)
        free = min(free, budget.unreserved_pages.get(entry.page_bytes, 0))
        spare = entry.pages - _needed(context, changes, entry)
        pages = min(spare, free)
        if pages <= 0:
            continue
        step = return_of(context.spec.name, replace(entry, pages=pages))
        returns.append(step)
        budget = budget.with_pages(entry.node_id, entry.page_bytes, -pages)
        budget = budget.with_ordinary(
            entry.node_id, step.expected_bytes, block_bytes=entry.page_bytes
        )
    return budget, tuple(returns)


def return_of(pool: str, entry: LedgerEntry) -> ReturnHugePages:
    """Return the action that gives back the pages of a ledger entry."""
    return ReturnHugePages(
        pool=pool,
        node_id=entry.node_id,
        page_bytes=entry.page_bytes,
        pages=entry.pages,
        expected_bytes=entry.pages * entry.page_bytes,
    )


def _needed(context: PlanContext, changes: Changes, entry: LedgerEntry) -> int:
    """Return the pages of the entry's size that the pool will use on the entry's node."""
    removed = {id(removal.region) for removal in changes.removed}
    resumed = {id(planned.resumed) for planned in changes.new}
    stay: list[RegionFacts | PlannedRegion] = [*changes.new]
    stay += [region for region in context.regions if id(region) not in removed | resumed]
    page, node_ids = entry.page_bytes, context.layout.node_ids
    return sum(
        pages_per_node(found.size_bytes, page, found.placement, node_ids).get(entry.node_id, 0)
        for found in stay
        if found.backing.is_hugetlb and found.backing.page_bytes == page
    )
