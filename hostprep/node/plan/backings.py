"""The choice of backings: for each placement the first preference that can be had without stalling.

A NUMA node that is short of something falls back alone: 1 GiB pages on the others are worth having.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hostprep.api.pool_spec import Placement
from hostprep.backing import MIB, Backing
from hostprep.node.facts import WITHOUT_ROOT
from hostprep.node.plan.actions import PassedOver, ReserveHugePages, Unmet
from hostprep.node.plan.budget import Budget, Candidate, PlanContext, Rejection, free_all
from hostprep.node.plan.changes import Changes, compute_changes
from hostprep.node.plan.estimate import reserve_s
from hostprep.node.plan.placement import granule_bytes
from hostprep.units import format_bytes

_STEP = 2 * MIB
_PERMANENT_REASONS = frozenset({"TooSmall", "NoSuchPages", "NeedsRoot", "NotPinned"})
"""Waiting does not help: the pool, the user or the node's settings must change."""
_REASONS = ("NotEnoughMemory", "Fragmented", "ZoneMovable", "CgroupLimit", "NotPinned")

_GIGANTIC_SPARE = 1.25
"""1 GiB pages need aligned free runs: a node must have this much more in large blocks."""
_THP_SPARE = 1.05
"""Of what a node needs, so much must lie in blocks of 2 MiB, for others take some meanwhile."""
_NO_FIGHT = "nothing is fought with faults"
_DEFER = "echo defer > /sys/kernel/mm/transparent_hugepage/defrag"
_STALLS = (
    "page faults may compact memory here, and stall for as long as that takes "
    "(transparent_hugepage/defrag is always)"
)
_AT_BOOT = "prepare at boot (hostprep boot), before memory is used"
_WITHOUT_ROOT = (
    "without the right to mount, regions lie on the tmpfs of --root; as root there would be huge "
    "pages, noswap and mounts of the pool's own"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate that was taken, if any, and the backings that were passed over for it."""

    candidate: Candidate | None
    passed_over: tuple[PassedOver, ...]
    reasons: tuple[str, ...]


def choose(context: PlanContext, wanted_bytes: int) -> Choice:
    """Return the first backing in order that can be had, for each placement.

    Where that comes to nothing, one backing for all may still do: what is free of both huge pages
    and ordinary memory is not always where a mixture looks for it.
    """
    mixed = _choose(context, wanted_bytes, mixed=True)
    if mixed.candidate is not None or len(context.layout.counts) == 1:
        return mixed
    return _choose(context, wanted_bytes, mixed=False)


def _choose(context: PlanContext, wanted_bytes: int, *, mixed: bool) -> Choice:
    """Begin with the first preference everywhere; where it is rejected, the next one is tried.

    With `mixed` only the placements that cannot have a backing go on to the next one.
    """
    order = _order(context)
    ranks = dict.fromkeys((placement for placement, _ in context.layout.counts), 0)
    rejections: list[Rejection] = []
    while all(rank < len(order) for rank in ranks.values()):
        assignment = {placement: order[rank] for placement, rank in ranks.items()}
        answer = _evaluate(context, assignment, wanted_bytes)
        if isinstance(answer, Candidate):
            return _choice(context, answer, rejections)
        rejections.append(answer)
        for placement in _rejected_placements(answer, assignment) if mixed else ranks:
            ranks[placement] += 1
    return _choice(context, None, rejections)


def thp_faults_stall(context: PlanContext) -> bool:
    """Return whether faults of a tmpfs with huge=always may compact or reclaim memory.

    Such a fault allocates as an anonymous one does (mm/shmem.c, shmem_get_folio_gfp, by
    vma_thp_gfp_mask in mm/huge_memory.c): directly with `always`. `madvise` and `defer+madvise`
    do so only where the mapping has MADV_HUGEPAGE, which populating does not set.
    """
    return context.facts.thp.defrag == "always"


def _order(context: PlanContext) -> tuple[Backing, ...]:
    """Return the backings in the order in which they are tried: THP last where its faults stall."""
    asked = context.spec.backings
    if Backing.THP not in asked or not thp_faults_stall(context):
        return asked
    return (*(backing for backing in asked if backing is not Backing.THP), Backing.THP)


def _put_back(context: PlanContext, candidate: Candidate | None) -> tuple[PassedOver, ...]:
    """Return THP as passed over where a less preferred backing was taken because its faults stall.

    Empty where THP was taken all the same, for want of another, or came last anyway.
    """
    asked = context.spec.backings
    if candidate is None or _order(context) == asked:
        return ()
    taken = {planned.backing for planned in candidate.changes.new}
    after = set(asked[asked.index(Backing.THP) + 1 :])
    if Backing.THP in taken or not taken & after:
        return ()
    return (PassedOver(Backing.THP, _STALLS, _DEFER),)


def _rejected_placements(
    rejection: Rejection, assignment: Mapping[Placement, Backing]
) -> list[Placement]:
    """Return the placements that cannot have the backing; interleaved ones use all nodes."""
    having = [place for place, backing in assignment.items() if backing is rejection.backing]
    there = [place for place in having if place.node in (None, rejection.node_id)]
    return having if rejection.node_id is None else there


def _choice(
    context: PlanContext, candidate: Candidate | None, rejections: list[Rejection]
) -> Choice:
    # No user writes the bytes of a pool that was sized for a model.
    ask = "ask for less" if context.spec.sizing is None else "size the model for less"
    passed_over = tuple(
        PassedOver(r.backing, r.why, f"{ask}, {r.remedy}" if r.less_would_do else r.remedy)
        for r in rejections
    )
    passed_over += _put_back(context, candidate)
    if candidate is not None and not candidate.changes.new:
        passed_over = ()
    return Choice(candidate, passed_over, tuple(rejection.reason for rejection in rejections))


def _evaluate(
    context: PlanContext, assignment: Mapping[Placement, Backing], wanted_bytes: int
) -> Candidate | Rejection:
    """Return how the pool reaches `wanted_bytes` with such new regions, or what prevents it."""
    changes = compute_changes(
        context.spec,
        context.layout,
        context.regions,
        wanted_bytes=wanted_bytes,
        backings=assignment,
        base_page_bytes=context.facts.memory.page_bytes,
    )
    rejection = _too_small(context, changes, assignment) or _found_short(context, changes)
    if rejection is not None:
        return rejection
    budget, returns = free_all(context, changes)
    answer: Candidate | Rejection = Candidate(changes, budget, returns=returns)
    asked = {planned.backing for planned in changes.new}
    for backing in (backing for backing in context.spec.backings if backing in asked):
        if isinstance(answer, Rejection):
            break
        take = _take_hugetlb if backing.is_hugetlb else _take_tmpfs
        answer = take(context, answer, backing)
    return answer


def _too_small(
    context: PlanContext, changes: Changes, assignment: Mapping[Placement, Backing]
) -> Rejection | None:
    if not changes.too_small:
        return None
    first = changes.too_small[0]
    backing = assignment[first]
    page = granule_bytes(backing, 0, context.facts.memory.page_bytes)
    having = [place for place, chosen in assignment.items() if chosen is backing]
    everywhere = set(having) <= set(changes.too_small)
    there = ", ".join(str(place) for place in (having[:4] if everywhere else [first]))
    why = f"what is missing at {there} is less than one page of {format_bytes(page)}"
    remedy = "ask for more, for fewer regions, or allow smaller pages"
    stuck = [region for region in context.regions if region.name in changes.blocked]
    if stuck:  # they go, and make room, as soon as their holders end
        names = ", ".join(region.name for region in stuck[:4]) + (", ..." if stuck[4:] else "")
        size = format_bytes(sum(region.size_bytes for region in stuck))
        why += f", for {names} of the pool's former shape, with {size}, cannot go while leased"
        remedy = "end what holds the pool's regions (`hostprep status` names it), or ask for more"
    return Rejection(
        backing,
        why,
        remedy,
        "TooSmall",
        None if everywhere else first.node,
    )


def _found_short(context: PlanContext, changes: Changes) -> Rejection | None:
    for short in context.shortfalls:
        for planned in changes.new:
            somewhere = short.node_id is None or planned.placement.node in (None, short.node_id)
            if planned.backing is short.backing and somewhere:
                return Rejection(
                    short.backing,
                    f"tried in this run and found short: {short.why}",
                    "run it again later, or at boot",
                    "FoundShort",
                    short.node_id,
                )
    return None


def unmet(context: PlanContext, wanted_bytes: int, choice: Choice) -> Unmet:
    """Return why no backing will do, and the largest size that one would."""
    best, backing = 0, context.spec.backings[0]
    for tried in context.spec.backings:
        possible = _largest(context, tried, wanted_bytes)
        if possible > best:
            best, backing = possible, tried
    total = context.facts.memory.total_bytes
    too_large = wanted_bytes > total
    never = too_large or _PERMANENT_REASONS.issuperset(choice.reasons)
    if too_large:
        why = f"{format_bytes(wanted_bytes)} is more than the machine has ({format_bytes(total)})"
    else:
        why = f"{format_bytes(wanted_bytes)} cannot be had: " + "; ".join(
            f"{passed.backing}: {passed.why}" for passed in choice.passed_over
        )
    if not context.facts.process.can_mount and not context.facts.root.writable:
        # Whatever size is asked for, even the one that root prepared there.
        remedy = "ask for less" if too_large else WITHOUT_ROOT
    elif best:
        remedy = f"{_ask_for(context, wanted_bytes, best)} or less, which {backing} can give now"
    else:
        remedy = choice.passed_over[0].remedy if choice.passed_over else "ask for less"
        remedy = "ask for less" if too_large else remedy
    reason = next((r for r in _REASONS if r in choice.reasons), choice.reasons[-1])
    return Unmet(why, best, remedy, "TooLarge" if too_large else reason, never)


def _ask_for(context: PlanContext, wanted_bytes: int, size_bytes: int) -> str:
    """Return how to ask for no more than a size; a pool with a sizing has no size to write."""
    region_bytes = context.spec.region_bytes
    if region_bytes is None:
        return f"ask for {size_bytes // MIB}Mi"
    share_bytes = size_bytes // (wanted_bytes // region_bytes)
    sizing = context.spec.sizing
    if sizing is not None and sizing.integration:  # all ranks of an engine share what it claims
        share_bytes *= sizing.regions_per_engine or 1
        return (
            "size the model again (`hostprep size`) so that --host-memory, times the ranks of an "
            f"engine, is {share_bytes // MIB}Mi"
        )
    return f"size the model again (`hostprep size`) with --host-memory {share_bytes // MIB}Mi"


def _largest(context: PlanContext, backing: Backing, wanted_bytes: int) -> int:
    """Return the largest size below `wanted_bytes` that the backing can give, by bisection."""
    assignment = {placement: backing for placement, _ in context.layout.counts}

    def possible(size: int) -> bool:
        return isinstance(_evaluate(context, assignment, size), Candidate)

    # Likely to be possible: what is there already, and the smallest size of all.
    held = sum(region.size_bytes for region in context.regions if region.finished)
    least = max(_STEP, backing.page_bytes) * context.layout.region_count
    starts = (held // _STEP * _STEP, least)
    low = next((size for size in starts if possible(size)), wanted_bytes)
    if low >= wanted_bytes:
        return 0
    low, high = low // _STEP, -(-wanted_bytes // _STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle * _STEP) else (low, middle)
    return low * _STEP


def _take_hugetlb(
    context: PlanContext, candidate: Candidate, backing: Backing
) -> Candidate | Rejection:
    """Return the candidate with the new regions of this backing taken, or why they cannot be."""
    need = candidate.changes.pages_per_node(backing, backing.page_bytes, context.layout.node_ids)
    rejection = _hugetlb_rights(context, backing)
    if rejection is None and backing is Backing.HUGETLB_2MI:
        # From ZONE_MOVABLE the kernel takes 2 MiB pages first, 1 GiB pages never
        # (htlb_alloc_mask in include/linux/hugetlb.h).
        rejection = _movable_rejection(context, need, backing)
    if rejection is not None:
        return rejection
    page, budget = backing.page_bytes, candidate.budget
    total = candidate.changes.new_bytes(backing)
    limit = budget.hugetlb_limits.get(page)
    if limit is not None and limit < total:
        return Rejection(
            backing,
            f"this process's cgroup may be charged for {format_bytes(max(0, limit))} of "
            f"{_page_words(page)}, and {format_bytes(total)} are needed",
            "run it as root outside the container, or where a host-level cgroup can be made",
            "CgroupLimit",
        )
    candidate = replace(candidate, budget=budget.charged_hugetlb(page, total))
    for node_id, pages in need.items():
        result = _take_pages(context, candidate, node_id, backing, pages)
        if isinstance(result, Rejection):
            return result
        candidate = result
    return candidate


def _hugetlb_rights(context: PlanContext, backing: Backing) -> Rejection | None:
    if backing.page_bytes not in context.facts.kernel.hugepage_sizes:
        return Rejection(
            backing,
            f"this CPU or kernel has no {_page_words(backing.page_bytes)}",
            "choose another backing",
            "NoSuchPages",
        )
    process = context.facts.process
    if process.euid != 0 or not process.can_mount:
        why = "adding huge pages and mounting hugetlbfs need root"
        return Rejection(backing, why, "run it as root", "NeedsRoot")
    return None


def _take_pages(
    context: PlanContext, candidate: Candidate, node_id: int, backing: Backing, pages: int
) -> Candidate | Rejection:
    """Take what is free on the node and in the machine's pool, and add the rest."""
    budget, page = candidate.budget, backing.page_bytes
    free = budget.nodes[node_id].free_pages.get(page, 0)
    have = max(0, min(pages, free, budget.unreserved_pages.get(page, 0)))
    budget = budget.with_pages(node_id, page, -have)
    missing = pages - have
    if missing == 0:
        return replace(candidate, budget=budget)
    notes = _can_grow(budget, node_id, backing, missing * page)
    if isinstance(notes, Rejection):
        return notes
    reserve = ReserveHugePages(
        pool=context.spec.name,
        node_id=node_id,
        page_bytes=page,
        pages=missing,
        expected_bytes=missing * page,
        expected_s=reserve_s(missing * page),
    )
    return replace(
        candidate,
        budget=budget.without_blocks(node_id, missing * page),
        reserves=(*candidate.reserves, reserve),
        notes=(*candidate.notes, *notes),
    )


def _can_grow(
    budget: Budget, node_id: int, backing: Backing, missing_bytes: int
) -> Rejection | tuple[str, ...]:
    """Return why a node's pool cannot grow by so much, or what to say if it can."""
    spendable = budget.spendable_bytes(node_id)
    if spendable < missing_bytes:
        words = _page_words(backing.page_bytes)
        return _short_rejection(backing, node_id, missing_bytes, spendable, words)
    missing = format_bytes(missing_bytes)
    if backing is Backing.HUGETLB_1GI:
        found, wanted = budget.nodes[node_id].gigantic_bytes, int(missing_bytes * _GIGANTIC_SPARE)
        why = (
            f"node {node_id} is too fragmented for {_page_words(backing.page_bytes)}: "
            f"{format_bytes(found)} free in blocks of 4 MiB, "
            f"{format_bytes(wanted)} wanted to add {missing}"
        )
    else:
        found, wanted = budget.nodes[node_id].contiguous_bytes, missing_bytes
        there = f"{format_bytes(found)} of {missing} free in blocks of 2 MiB or more"
        if wanted // 2 <= found < wanted:
            return (f"node {node_id} is fragmented ({there}): memory is compacted once",)
        why = f"node {node_id} is fragmented: only {there}; {_NO_FIGHT}"
    return () if found >= wanted else Rejection(backing, why, _AT_BOOT, "Fragmented", node_id)


def _take_tmpfs(
    context: PlanContext, candidate: Candidate, backing: Backing
) -> Candidate | Rejection:
    """Return the candidate with the new regions of this backing taken, or why they cannot be."""
    page = backing.page_bytes if backing is Backing.THP else context.facts.memory.page_bytes
    pages = candidate.changes.pages_per_node(backing, page, context.layout.node_ids)
    total = candidate.changes.new_bytes(backing)
    rejection = (
        _pinning(context, backing)
        or _tmpfs_rights(context, backing)
        or _movable_rejection(context, pages, backing)
        or _tmpfs_room(context, candidate.budget, total, backing)
    )
    if rejection is not None:
        return rejection
    budget = candidate.budget
    for node_id, count in pages.items():
        rejection = _tmpfs_on_node(budget, node_id, count * page, backing)
        if rejection is not None:
            return rejection
        take = budget.without_blocks if backing is Backing.THP else budget.without_base
        budget = take(node_id, count * page)
    own_mount = context.facts.process.can_mount
    notes = candidate.notes if own_mount else (*candidate.notes, _WITHOUT_ROOT)
    if backing is Backing.THP and thp_faults_stall(context):
        notes = (*notes, f"{_STALLS}; no other backing could be had: {_DEFER}")
    return replace(
        candidate,
        budget=budget.charged(tmpfs_bytes=total, root_bytes=0 if own_mount else total),
        notes=notes,
        own_mount=own_mount,
    )


def takes_large_folios(context: PlanContext, backing: Backing) -> bool:
    """Return whether base-page regions can be allocated in larger folios without any stall.

    Since Linux 6.14 fallocate on a tmpfs that is mounted for it takes folios of whatever order
    is free, with no compaction unless defrag says always: fewer of them to allocate, to zero one
    by one and to map. Fragmented memory costs it nothing but the gain.
    """
    facts = context.facts
    return (
        backing is Backing.BASE
        and facts.process.can_mount
        and facts.kernel.has_tmpfs_large_folios
        and facts.thp.shmem_enabled not in ("", "unknown", "deny")
        and not thp_faults_stall(context)
    )


def pins_with_noswap(context: PlanContext) -> bool:
    """Return whether a tmpfs mount gets the option noswap."""
    return context.facts.kernel.has_tmpfs_noswap and context.facts.process.can_mount


def _pinning(context: PlanContext, backing: Backing) -> Rejection | None:
    if pins_with_noswap(context) or context.facts.memory.swap_total_bytes == 0:
        return None
    if context.facts.kernel.has_tmpfs_noswap:
        return Rejection(
            backing,
            "swap is on, and tmpfs cannot be kept out of it without the right to mount",
            "run it as root, or turn swap off (swapoff -a)",
            "NotPinned",
        )
    return Rejection(
        backing,
        "swap is on, and this kernel's tmpfs has no noswap (Linux 6.4)",
        "turn swap off (swapoff -a), use HugeTLB2Mi, or a newer kernel",
        "NotPinned",
    )


def _tmpfs_rights(context: PlanContext, backing: Backing) -> Rejection | None:
    process, root, thp = context.facts.process, context.facts.root, context.facts.thp
    if backing is Backing.THP:
        if not process.can_mount:
            why = "a tmpfs with huge=always must be mounted"
            return Rejection(backing, why, "run it as root", "NeedsRoot")
        if not thp.shmem_enabled or thp.shmem_enabled == "deny":
            state = "denies" if thp.shmem_enabled else "has no"
            return Rejection(
                backing,
                f"this kernel {state} transparent huge pages for tmpfs",
                "write never to /sys/kernel/mm/transparent_hugepage/shmem_enabled"
                if thp.shmem_enabled
                else "choose another backing",
                "NoSuchPages",
            )
    elif not process.can_mount and (root.fs_type != "tmpfs" or not root.writable):
        state = "is not writable" if root.fs_type == "tmpfs" else f"is {root.fs_type}, not tmpfs"
        return Rejection(
            backing,
            f"mounts need root, and {root.path} {state}",
            "run it as root, or give --root a folder of your own below /dev/shm",
            "NeedsRoot",
        )
    return None


def _tmpfs_room(
    context: PlanContext, budget: Budget, total: int, backing: Backing
) -> Rejection | None:
    """Return that the root's tmpfs is too small, or that our own cgroup's limit is."""
    if not context.facts.process.can_mount and budget.root_free_bytes < total:
        return Rejection(
            backing,
            f"{context.facts.root.path} has {format_bytes(max(0, budget.root_free_bytes))} free "
            f"of the {format_bytes(total)} needed",
            "give --root another tmpfs, or run it as root",
            "NotEnoughMemory",
            less_would_do=True,
        )
    limit = budget.tmpfs_limit_bytes
    if limit is not None and limit < total:
        return Rejection(
            backing,
            f"this process's cgroup is limited to {format_bytes(max(0, limit))} of memory, and "
            f"{format_bytes(total)} are needed",
            "or run it where a host-level cgroup can be made",
            "NotEnoughMemory",
            less_would_do=True,
        )
    return None


def _tmpfs_on_node(budget: Budget, node_id: int, size: int, backing: Backing) -> Rejection | None:
    spendable = budget.spendable_bytes(node_id)
    if spendable < size:
        return _short_rejection(backing, node_id, size, spendable, "a tmpfs")
    contiguous = budget.nodes[node_id].contiguous_bytes
    if backing is Backing.THP and contiguous < size * _THP_SPARE:
        return Rejection(
            backing,
            f"node {node_id} is fragmented: only {format_bytes(contiguous)} free in blocks of "
            f"2 MiB or more, {format_bytes(int(size * _THP_SPARE))} wanted; {_NO_FIGHT}",
            _AT_BOOT,
            "Fragmented",
            node_id,
        )
    return None


def _page_words(page_bytes: int) -> str:
    """Return `pages of 2 MiB`."""
    return f"pages of {format_bytes(page_bytes)}"


def _short_rejection(
    backing: Backing, node_id: int, needed: int, available: int, what: str
) -> Rejection:
    """Return that a node has too little memory."""
    return Rejection(
        backing,
        f"node {node_id} can give {format_bytes(available)} of the {format_bytes(needed)} "
        f"needed in {what}",
        "lower the reserve, or free memory",
        "NotEnoughMemory",
        node_id,
        less_would_do=True,
    )


def _movable_rejection(
    context: PlanContext, node_ids: Iterable[int], backing: Backing
) -> Rejection | None:
    """Return that a node has a ZONE_MOVABLE, from which the kernel would take these pages first.

    Every long-term pin then migrates them (GFP_HIGHUSER_MOVABLE; mm/gup.c,
    collect_longterm_unpinnable_folios).
    """
    for node_id in node_ids:
        node = context.facts.node(node_id)
        if node is not None and node.movable_bytes:
            return Rejection(
                backing,
                f"node {node_id} has {format_bytes(node.movable_bytes)} of ZONE_MOVABLE, from "
                "where such pages come first, and registering would migrate them",
                "boot without movablecore, or online memory as online_kernel; "
                "HugeTLB1Gi pages are not taken from there",
                "ZoneMovable",
                node_id,
            )
    return None
