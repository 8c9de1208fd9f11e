"""What each node can still give, and what comes back before anything new is made.

A running budget over the pools of one plan. Two kinds of memory are kept apart: ordinary free
memory, and free pages of the huge-page pools, which are no longer part of MemAvailable. Values;
every taking returns a new budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.facts import Facts, LedgerEntry, NumaNode, PoolFacts, RegionFacts
from hostprep.node.plan.actions import ReserveHugePages, ReturnHugePages, Shortfall
from hostprep.node.plan.changes import Changes, PlannedRegion
from hostprep.node.plan.folders import is_own_mount
from hostprep.node.plan.placement import Layout, eligible_nodes, pages_per_node

_GIGANTIC_BLOCK = 4 * MIB
"""The buddy allocator's largest block on x86: free runs for 1 GiB pages are made of these."""


@dataclass(frozen=True, slots=True)
class NodeBudget:
    """What one NUMA node can still give, in bytes and in free huge pages."""

    available_bytes: int
    """Ordinary memory, outside ZONE_MOVABLE and CMA, above the low watermarks."""
    contiguous_bytes: int
    """Of that, in free blocks of 2 MiB and more."""
    gigantic_bytes: int
    """Of that, in free blocks of 4 MiB and more."""
    reserve_weight: int
    """Share of the reserve that this node keeps."""
    free_pages: Mapping[int, int]
    """Free huge pages by page size, less surplus ones: those wait for who reserved them."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What the machine can still give."""

    nodes: Mapping[int, NodeBudget]
    unreserved_pages: Mapping[int, int]
    """Free huge pages of the whole machine that are not reserved (mmap without a fault)."""
    hugetlb_limits: Mapping[int, int]
    """Bytes that our own cgroup may still be charged for, by page size, where it is limited."""
    tmpfs_limit_bytes: int | None
    """The same for tmpfs; None where there is no limit or we can leave the cgroup."""
    root_free_bytes: int
    """Free bytes of the file system that holds the root folder."""
    reserve_bytes: int = 0
    """What the machine must keep: the largest reserve of the pools planned so far."""

    @classmethod
    def of(cls, facts: Facts) -> Budget:
        """Return what the machine can give before any pool."""
        eligible = {node.node_id for node in eligible_nodes(facts)}
        raw = {node.node_id: _available_bytes(node) for node in facts.nodes}
        total, cap = sum(raw.values()), max(0, facts.memory.available_bytes)
        nodes = {}
        for node in facts.nodes:
            available, page = raw[node.node_id], facts.memory.page_bytes
            nodes[node.node_id] = NodeBudget(
                available_bytes=available * cap // total if total > cap else available,
                contiguous_bytes=node.contiguous_fixed_bytes(page),
                gigantic_bytes=node.contiguous_fixed_bytes(page, _GIGANTIC_BLOCK),
                reserve_weight=node.total_bytes if node.node_id in eligible else 0,
                free_pages={
                    pool.page_bytes: max(0, pool.free - pool.surplus) for pool in node.huge_pages
                },
            )
        limited = not facts.cgroup.writable
        return cls(
            nodes=nodes,
            unreserved_pages={
                pool.page_bytes: max(0, pool.free - pool.reserved) for pool in facts.huge_pages
            },
            hugetlb_limits=dict(facts.cgroup.hugetlb_limit_bytes) if limited else {},
            tmpfs_limit_bytes=facts.cgroup.memory_limit_bytes if limited else None,
            root_free_bytes=facts.root.free_bytes,
        )

    def spendable_bytes(self, node_id: int) -> int:
        """Return the ordinary memory of a node above its part of the reserve.

        Where other nodes have less left than their parts, no more than what is above the whole.
        """
        node = self.nodes[node_id]
        taking_part = [other for other in self.nodes.values() if other.reserve_weight]
        weights = sum(other.reserve_weight for other in taking_part)
        kept = -(-self.reserve_bytes * node.reserve_weight // weights) if weights else 0
        together = sum(other.available_bytes for other in taking_part) - self.reserve_bytes
        return max(0, min(node.available_bytes - kept, together))

    def keeping(self, reserve_bytes: int) -> Budget:
        """Return it with at least that reserve kept."""
        return replace(self, reserve_bytes=max(self.reserve_bytes, reserve_bytes))

    def _with_node(self, node_id: int, **changes: Any) -> Budget:
        node = replace(self.nodes[node_id], **changes)
        return replace(self, nodes={**self.nodes, node_id: node})

    def with_pages(self, node_id: int, page_bytes: int, pages: int) -> Budget:
        """Return it with so many free huge pages more on a node, or fewer where negative."""
        free = self.nodes[node_id].free_pages
        free = {**free, page_bytes: free.get(page_bytes, 0) + pages}
        return self._with_node(node_id, free_pages=free).with_unreserved(page_bytes, pages)

    def with_unreserved(self, page_bytes: int, pages: int) -> Budget:
        """Return it with so many reserved pages free to be taken: they were reserved by us."""
        unreserved = self.unreserved_pages.get(page_bytes, 0) + pages
        return replace(self, unreserved_pages={**self.unreserved_pages, page_bytes: unreserved})

    def with_ordinary(self, node_id: int, size_bytes: int, *, block_bytes: int) -> Budget:
        """Return it with so much ordinary memory more, which came back in such blocks."""
        node = self.nodes[node_id]
        return self._with_node(
            node_id,
            available_bytes=node.available_bytes + size_bytes,
            contiguous_bytes=node.contiguous_bytes + (size_bytes if block_bytes >= 2 * MIB else 0),
            gigantic_bytes=node.gigantic_bytes + (size_bytes if block_bytes >= GIB else 0),
        )

    def without_blocks(self, node_id: int, size_bytes: int) -> Budget:
        """Return it with so much less ordinary memory on a node, in blocks of 2 MiB or more."""
        node = self.nodes[node_id]
        return self._with_node(
            node_id,
            available_bytes=node.available_bytes - size_bytes,
            contiguous_bytes=max(0, node.contiguous_bytes - size_bytes),
            gigantic_bytes=max(0, node.gigantic_bytes - size_bytes),
        )

    def without_base(self, node_id: int, size_bytes: int) -> Budget:
        """Return it with so much less on a node, taken in single pages: fragments go first."""
        node = self.nodes[node_id]
        left = node.available_bytes - size_bytes
        return self._with_node(
            node_id,
            available_bytes=left,
            contiguous_bytes=max(0, min(node.contiguous_bytes, left)),
            gigantic_bytes=max(0, min(node.gigantic_bytes, left)),
        )

    def charged(self, *, tmpfs_bytes: int = 0, root_bytes: int = 0) -> Budget:
        """Return it with so much charged to our own cgroup, and so much of the root taken."""
        limit = self.tmpfs_limit_bytes
        return replace(
            self,
            tmpfs_limit_bytes=None if limit is None else limit - tmpfs_bytes,
            root_free_bytes=self.root_free_bytes - root_bytes,
        )

    def charged_hugetlb(self, page_bytes: int, size_bytes: int) -> Budget:
        """Return it with so much of huge pages charged to our own cgroup."""
        limits = dict(self.hugetlb_limits)
        if page_bytes in limits:
            limits[page_bytes] -= size_bytes
        return replace(self, hugetlb_limits=limits)


def _available_bytes(node: NumaNode) -> int:
    """Return the ordinary memory of a node that may be pinned, as MemAvailable reckons.

    Free and reclaimable memory above the low watermarks (mm/show_mem.c, si_mem_available), less
    what is free in ZONE_MOVABLE and CMA, from where pinned pages would have to migrate.
    """
    fixed = [zone for zone in node.zones if not zone.is_movable]
    free = node.free_fixed_bytes - sum(zone.low_watermark_bytes for zone in fixed)
    reclaimable = node.reclaimable_bytes
    if node.movable_bytes:
        # The file cache's zone is unknown: count no more of it than the other zones can hold.
        room = sum(zone.managed_bytes - zone.free_bytes for zone in fixed)
        reclaimable = min(reclaimable, max(0, room))
    return max(0, free + reclaimable)


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
        return self.pool.returnable


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
