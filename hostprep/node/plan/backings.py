"""The choice of backings: for each placement the first preference that can be had without stalling.

A NUMA node that is short of something falls back alone: 1 GiB pages on the others are worth having.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hostprep.api.placement import Placement
from hostprep.backing import MIB, Backing
from hostprep.node.facts import LedgerEntry
from hostprep.node.plan.actions import PassedOver, Unmet
from hostprep.node.plan.capacity import Budget
from hostprep.node.plan.changes import Changes, compute_changes
from hostprep.node.plan.context import Offer, Question, Refusal, free_all
from hostprep.node.plan.placement import granule_bytes
from hostprep.units import format_bytes

_STEP = 2 * MIB
_MENDED_BY_ASKING = frozenset({"TooSmall", "NoSuchPages", "NeedsRoot", "NotPinned"})
"""Reasons that no waiting mends: the pool, the user or the node's settings must change."""
_REASONS = ("NotEnoughMemory", "Fragmented", "ZoneMovable", "CgroupLimit", "NotPinned")

_Backings = Mapping[Placement, Backing]
_GIGANTIC_SPARE = 1.25
"""1 GiB pages need aligned free runs: a node must have this much more in large blocks."""
_THP_SPARE = 1.05
"""Of what a node needs, so much must lie in blocks of 2 MiB, for others take some meanwhile."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The offer that was taken, if any, and the backings that were passed over for it."""

    offer: Offer | None
    passed_over: tuple[PassedOver, ...]
    reasons: tuple[str, ...]


def choose(question: Question, wanted_bytes: int) -> Choice:
    """Return the first backing in order that can be had, for each placement.

    Where that comes to nothing, one backing for all may still do: what is free of both huge pages
    and ordinary memory is not always where a mixture looks for it.
    """
    mixed = _fall_back_by_node(question, wanted_bytes)
    if mixed.offer is not None or len(question.layout.counts) == 1:
        return mixed
    return _one_for_all(question, wanted_bytes)


def _fall_back_by_node(question: Question, wanted_bytes: int) -> Choice:
    """Begin with the first preference everywhere; who is refused goes on to its next one."""
    order = question.spec.backings
    ranks = dict.fromkeys((placement for placement, _ in question.layout.counts), 0)
    refusals: list[Refusal] = []
    while all(rank < len(order) for rank in ranks.values()):
        candidates = {placement: order[rank] for placement, rank in ranks.items()}
        answer = _consider(question, candidates, wanted_bytes)
        if isinstance(answer, Offer):
            return _chosen(question, answer, refusals)
        refusals.append(answer)
        for placement in _concerned(answer, candidates):
            ranks[placement] += 1
    return _chosen(question, None, refusals)


def _concerned(refusal: Refusal, candidates: _Backings) -> list[Placement]:
    """Return the placements that must do without it; interleaved ones use all nodes."""
    having = [place for place, backing in candidates.items() if backing is refusal.backing]
    there = [place for place in having if place.node in (None, refusal.node_id)]
    return having if refusal.node_id is None else there


def _one_for_all(question: Question, wanted_bytes: int) -> Choice:
    refusals: list[Refusal] = []
    for backing in question.spec.backings:
        answer = _consider_one(question, backing, wanted_bytes)
        if isinstance(answer, Offer):
            return _chosen(question, answer, refusals)
        refusals.append(answer)
    return _chosen(question, None, refusals)


def _chosen(question: Question, offer: Offer | None, refusals: list[Refusal]) -> Choice:
    is_sized = question.spec.sizing is not None
    passed = tuple(
        PassedOver(r.backing, r.why, full_remedy(r, is_sized=is_sized)) for r in refusals
    )
    told = () if offer is not None and not offer.changes.new else passed
    return Choice(offer, told, tuple(refusal.reason for refusal in refusals))


def _consider_one(question: Question, backing: Backing, wanted_bytes: int) -> Offer | Refusal:
    placements = (placement for placement, _ in question.layout.counts)
    return _consider(question, dict.fromkeys(placements, backing), wanted_bytes)


def _consider(question: Question, candidates: _Backings, wanted_bytes: int) -> Offer | Refusal:
    """Return how the pool comes to `wanted_bytes` with such new regions, or what is in the way."""
    changes = compute_changes(
        question.spec,
        question.layout,
        question.regions,
        wanted_bytes=wanted_bytes,
        backings=candidates,
        base_page_bytes=question.facts.memory.page_bytes,
    )
    refusal = _too_small(question, changes, candidates) or _found_short(question, changes)
    if refusal is not None:
        return refusal
    budget, returns = free_all(question, changes)
    offer = Offer(changes, budget, returns=returns)
    asked = {slot.backing for slot in changes.new}
    for backing in (backing for backing in question.spec.backings if backing in asked):
        take = take_hugetlb if backing.is_hugetlb else take_tmpfs
        answer = take(question, offer, backing)
        if isinstance(answer, Refusal):
            return answer
        offer = answer
    return offer


def _too_small(question: Question, changes: Changes, candidates: _Backings) -> Refusal | None:
    if not changes.too_small:
        return None
    first = changes.too_small[0]
    backing = candidates[first]
    page = granule_bytes(backing, 0, question.facts.memory.page_bytes)
    having = [place for place, candidate in candidates.items() if candidate is backing]
    everywhere = set(having) <= set(changes.too_small)
    there = ", ".join(str(place) for place in (having[:4] if everywhere else [first]))
    return Refusal(
        backing,
        f"what is missing at {there} is less than one page of {format_bytes(page)}",
        "ask for more, for fewer regions, or allow smaller pages",
        "TooSmall",
        None if everywhere else first.node,
    )


def _found_short(question: Question, changes: Changes) -> Refusal | None:
    for short in question.shortfalls:
        for slot in changes.new:
            somewhere = short.node_id is None or slot.placement.node in (None, short.node_id)
            if slot.backing is short.backing and somewhere:
                return Refusal(
                    short.backing,
                    f"tried in this run and found short: {short.why}",
                    "run it again later, or at boot",
                    "FoundShort",
                    short.node_id,
                )
    return None


def unmet(question: Question, wanted_bytes: int, choice: Choice) -> Unmet:
    """Return why no backing will do, and the largest size that one would."""
    best, backing = 0, question.spec.backings[0]
    for candidate in question.spec.backings:
        possible = _largest(question, candidate, wanted_bytes)
        if possible > best:
            best, backing = possible, candidate
    total = question.facts.memory.total_bytes
    too_large = wanted_bytes > total
    never = too_large or _MENDED_BY_ASKING.issuperset(choice.reasons)
    if too_large:
        why = f"{format_bytes(wanted_bytes)} is more than the machine has ({format_bytes(total)})"
    else:
        why = f"{format_bytes(wanted_bytes)} cannot be had: " + "; ".join(
            f"{passed.backing}: {passed.why}" for passed in choice.passed_over
        )
    if best:
        remedy = f"{_ask_for(question, wanted_bytes, best)} or less, which {backing} can give now"
    else:
        remedy = choice.passed_over[0].remedy if choice.passed_over else "ask for less"
    reason = next((r for r in _REASONS if r in choice.reasons), choice.reasons[-1])
    return Unmet(why, best, remedy, "TooLarge" if too_large else reason, never)


def _ask_for(question: Question, wanted_bytes: int, size_bytes: int) -> str:
    """Return how to have no more than a size: in a pool with a sizing, nobody writes bytes."""
    region_bytes = question.spec.region_bytes
    if region_bytes is None:
        return f"ask for {_exact(size_bytes)}"
    share_bytes = size_bytes // (wanted_bytes // region_bytes)
    return f"size the model again (`hostprep size`) with --host-memory {_exact(share_bytes)}"


def _exact(size_bytes: int) -> str:
    """Return a size as it can be written into a pool."""
    return f"{size_bytes // MIB}Mi"


def _largest(question: Question, backing: Backing, wanted_bytes: int) -> int:
    """Return the largest size below `wanted_bytes` that the backing can give, by bisection."""

    def possible(size: int) -> bool:
        return isinstance(_consider_one(question, backing, size), Offer)

    low = next((size for size in _starts(question, backing) if possible(size)), wanted_bytes)
    if low >= wanted_bytes:
        return 0
    low, high = low // _STEP, -(-wanted_bytes // _STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle * _STEP) else (low, middle)
    return low * _STEP


def _starts(question: Question, backing: Backing) -> tuple[int, ...]:
    """Return sizes that are likely to be had: what is there already, and the least possible."""
    held = sum(region.size_bytes for region in question.regions if region.finished)
    least = max(_STEP, backing.page_bytes) * question.layout.region_count
    return held // _STEP * _STEP, least


def take_hugetlb(question: Question, offer: Offer, backing: Backing) -> Offer | Refusal:
    """Return the offer with the new regions of this backing taken, or why they cannot be."""
    need = offer.changes.pages_per_node(backing, backing.page_bytes, question.layout.node_ids)
    refusal = _hugetlb_rights(question, backing) or _zones(question, need, backing)
    if refusal is not None:
        return refusal
    page, budget = backing.page_bytes, offer.budget
    total = offer.changes.new_bytes(backing)
    limit = budget.hugetlb_limits.get(page)
    if limit is not None and limit < total:
        return Refusal(
            backing,
            f"this process's cgroup may be charged for {format_bytes(max(0, limit))} of "
            f"{page_words(page)}, and {format_bytes(total)} are needed",
            "run it as root outside the container, or where a host-level cgroup can be made",
            "CgroupLimit",
        )
    offer = replace(offer, budget=budget.charged_hugetlb(page, total))
    for node_id, pages in need.items():
        result = _take_pages(offer, node_id, backing, pages)
        if isinstance(result, Refusal):
            return result
        offer = result
    return offer


def _hugetlb_rights(question: Question, backing: Backing) -> Refusal | None:
    if backing.page_bytes not in question.facts.kernel.hugepage_sizes:
        return Refusal(
            backing,
            f"this CPU or kernel has no {page_words(backing.page_bytes)}",
            "choose another backing",
            "NoSuchPages",
        )
    process = question.facts.process
    if process.euid != 0 or not process.can_mount:
        why = "adding huge pages and mounting hugetlbfs need root"
        return Refusal(backing, why, "run it as root", "NeedsRoot")
    return None


def _zones(question: Question, need: Mapping[int, int], backing: Backing) -> Refusal | None:
    # The kernel takes 2 MiB pages from ZONE_MOVABLE where there is one, 1 GiB pages never
    # (htlb_alloc_mask in include/linux/hugetlb.h).
    if backing is Backing.HUGETLB_1GI:
        return None
    return movable_refusal(question, need, backing)


def _take_pages(offer: Offer, node_id: int, backing: Backing, pages: int) -> Offer | Refusal:
    """Take what is free on the node and in the machine's pool, and add the rest."""
    budget, page = offer.budget, backing.page_bytes
    free = budget.nodes[node_id].free_pages.get(page, 0)
    have = max(0, min(pages, free, budget.unreserved_pages.get(page, 0)))
    budget = budget.with_pages(node_id, page, -have)
    missing = pages - have
    if missing == 0:
        return replace(offer, budget=budget)
    refusal, note = _can_grow(budget, node_id, backing, missing)
    if refusal is not None:
        return refusal
    return replace(
        offer,
        budget=budget.without_blocks(node_id, missing * page),
        reserves=(*offer.reserves, LedgerEntry(node_id, page, missing)),
        notes=(*offer.notes, note) if note else offer.notes,
    )


def _can_grow(
    budget: Budget, node_id: int, backing: Backing, pages: int
) -> tuple[Refusal | None, str]:
    """Return why a node's pool cannot grow by so many pages, or what to say if it can."""
    page = backing.page_bytes
    missing = pages * page
    spendable = budget.spendable_bytes(node_id)
    if spendable < missing:
        return short_refusal(backing, node_id, missing, spendable, page_words(page)), ""
    node = budget.nodes[node_id]
    if page > 2 * MIB:
        if node.gigantic_bytes >= missing * _GIGANTIC_SPARE:
            return None, ""
        return _fragmented(backing, node_id, missing, node.gigantic_bytes), ""
    if node.contiguous_bytes >= missing:
        return None, ""
    if node.contiguous_bytes * 2 >= missing:
        return None, (
            f"node {node_id} is fragmented ({format_bytes(node.contiguous_bytes)} of "
            f"{format_bytes(missing)} free in blocks of 2 MiB or more): memory is compacted once"
        )
    return _fragmented(backing, node_id, missing, node.contiguous_bytes), ""


def _fragmented(backing: Backing, node_id: int, missing: int, contiguous: int) -> Refusal:
    if backing.page_bytes > 2 * MIB:
        why = (
            f"node {node_id} is too fragmented for {page_words(backing.page_bytes)}: "
            f"{format_bytes(contiguous)} free in blocks of 4 MiB, "
            f"{format_bytes(int(missing * _GIGANTIC_SPARE))} wanted to add {format_bytes(missing)}"
        )
    else:
        why = (
            f"node {node_id} is fragmented: only {format_bytes(contiguous)} of "
            f"{format_bytes(missing)} free in blocks of 2 MiB or more; "
            "nothing is fought with faults"
        )
    remedy = "prepare at boot (hostprep boot), before memory is used"
    return Refusal(backing, why, remedy, "Fragmented", node_id)


def take_tmpfs(question: Question, offer: Offer, backing: Backing) -> Offer | Refusal:
    """Return the offer with the new regions of this backing taken, or why they cannot be."""
    page = _tmpfs_page_bytes(question, backing)
    pages = offer.changes.pages_per_node(backing, page, question.layout.node_ids)
    total = offer.changes.new_bytes(backing)
    refusal = (
        _pinning(question, backing)
        or _tmpfs_rights(question, backing)
        or movable_refusal(question, pages, backing)
        or _tmpfs_room(question, offer.budget, total, backing)
    )
    if refusal is not None:
        return refusal
    budget = offer.budget
    for node_id, count in pages.items():
        refusal = _tmpfs_on_node(budget, node_id, count * page, backing)
        if refusal is not None:
            return refusal
        take = budget.without_blocks if backing is Backing.THP else budget.without_base
        budget = take(node_id, count * page)
    own_mount = question.facts.process.can_mount
    return replace(
        offer,
        budget=budget.charged(tmpfs_bytes=total, root_bytes=0 if own_mount else total),
        notes=offer.notes if own_mount else (*offer.notes, _WITHOUT_ROOT),
        own_mount=own_mount,
    )


_WITHOUT_ROOT = (
    "without the right to mount, the root's own tmpfs is used; as root there would be huge pages, "
    "noswap and mounts of the pool's own"
)


def takes_large_folios(question: Question, backing: Backing) -> bool:
    """Tell whether base-page regions can be allocated in larger folios without any stall.

    Since Linux 6.14 fallocate on a tmpfs that is mounted for it takes folios of whatever order
    is free, with no compaction unless defrag says always: fewer of them to allocate, to zero one
    by one and to map. Fragmented memory costs it nothing but the gain.
    """
    facts = question.facts
    return (
        backing is Backing.BASE
        and facts.process.can_mount
        and facts.kernel.has_tmpfs_large_folios
        and facts.thp.shmem_enabled not in ("", "unknown", "deny")
        and facts.thp.defrag != "always"
    )


def pins_with_noswap(question: Question) -> bool:
    """Return whether a tmpfs mount gets the option noswap."""
    return question.facts.kernel.has_tmpfs_noswap and question.facts.process.can_mount


def _tmpfs_page_bytes(question: Question, backing: Backing) -> int:
    return backing.page_bytes if backing is Backing.THP else question.facts.memory.page_bytes


def _pinning(question: Question, backing: Backing) -> Refusal | None:
    if pins_with_noswap(question) or question.facts.memory.swap_total_bytes == 0:
        return None
    if question.facts.kernel.has_tmpfs_noswap:
        return Refusal(
            backing,
            "swap is on, and tmpfs cannot be kept out of it without the right to mount",
            "run it as root, or turn swap off (swapoff -a)",
            "NotPinned",
        )
    return Refusal(
        backing,
        "swap is on, and this kernel's tmpfs has no noswap (Linux 6.4)",
        "turn swap off (swapoff -a), use HugeTLB2Mi, or a newer kernel",
        "NotPinned",
    )


def _tmpfs_rights(question: Question, backing: Backing) -> Refusal | None:
    process, root, thp = question.facts.process, question.facts.root, question.facts.thp
    if backing is Backing.THP:
        if not process.can_mount:
            why = "a tmpfs with huge=always must be mounted"
            return Refusal(backing, why, "run it as root", "NeedsRoot")
        if not thp.shmem_enabled or thp.shmem_enabled == "deny":
            state = "denies" if thp.shmem_enabled else "has no"
            return Refusal(
                backing,
                f"this kernel {state} transparent huge pages for tmpfs",
                "write never to /sys/kernel/mm/transparent_hugepage/shmem_enabled"
                if thp.shmem_enabled
                else "choose another backing",
                "NoSuchPages",
            )
    elif not process.can_mount and (root.fs_type != "tmpfs" or not root.writable):
        state = "is not writable" if root.fs_type == "tmpfs" else f"is {root.fs_type}, not tmpfs"
        return Refusal(
            backing,
            f"mounts need root, and {root.path} {state}",
            "run it as root, or give --root a folder of your own below /dev/shm",
            "NeedsRoot",
        )
    return None


def _tmpfs_room(question: Question, budget: Budget, total: int, backing: Backing) -> Refusal | None:
    """Return that the root's tmpfs is too small, or that our own cgroup's limit is."""
    if not question.facts.process.can_mount and budget.root_free_bytes < total:
        return Refusal(
            backing,
            f"{question.facts.root.path} has {format_bytes(max(0, budget.root_free_bytes))} free "
            f"of the {format_bytes(total)} needed",
            "give --root another tmpfs, or run it as root",
            "NotEnoughMemory",
            less_would_do=True,
        )
    limit = budget.tmpfs_limit_bytes
    if limit is not None and limit < total:
        return Refusal(
            backing,
            f"this process's cgroup is limited to {format_bytes(max(0, limit))} of memory, and "
            f"{format_bytes(total)} are needed",
            "or run it where a host-level cgroup can be made",
            "NotEnoughMemory",
            less_would_do=True,
        )
    return None


def _tmpfs_on_node(budget: Budget, node_id: int, size: int, backing: Backing) -> Refusal | None:
    spendable = budget.spendable_bytes(node_id)
    if spendable < size:
        return short_refusal(backing, node_id, size, spendable, "a tmpfs")
    contiguous = budget.nodes[node_id].contiguous_bytes
    if backing is Backing.THP and contiguous < size * _THP_SPARE:
        return Refusal(
            backing,
            f"node {node_id} is fragmented: only {format_bytes(contiguous)} free in blocks of "
            f"2 MiB or more, {format_bytes(int(size * _THP_SPARE))} wanted; "
            "nothing is fought with faults",
            "prepare at boot (hostprep boot), before memory is used",
            "Fragmented",
            node_id,
        )
    return None


def page_words(page_bytes: int) -> str:
    """Return `pages of 2 MiB`."""
    return f"pages of {format_bytes(page_bytes)}"


def short_refusal(
    backing: Backing, node_id: int, needed: int, available: int, what: str
) -> Refusal:
    """Return that a node has too little memory."""
    return Refusal(
        backing,
        f"node {node_id} can give {format_bytes(available)} of the {format_bytes(needed)} "
        f"needed in {what}",
        "lower the reserve, or free memory",
        "NotEnoughMemory",
        node_id,
        less_would_do=True,
    )


def full_remedy(refusal: Refusal, *, is_sized: bool) -> str:
    """Return all that would help; nobody writes the bytes of a pool that was sized for a model."""
    if not refusal.less_would_do:
        return refusal.remedy
    return f"{'size the model for less' if is_sized else 'ask for less'}, {refusal.remedy}"


def movable_refusal(
    question: Question, node_ids: Iterable[int], backing: Backing
) -> Refusal | None:
    """Return that a node has a ZONE_MOVABLE, from which the kernel would take these pages first.

    Every long-term pin then migrates them (GFP_HIGHUSER_MOVABLE; mm/gup.c,
    collect_longterm_unpinnable_folios).
    """
    for node_id in node_ids:
        node = question.facts.node(node_id)
        if node is not None and node.movable_bytes:
            return Refusal(
                backing,
                f"node {node_id} has {format_bytes(node.movable_bytes)} of ZONE_MOVABLE, from "
                "where such pages come first, and registering would migrate them",
                "boot without movablecore, or online memory as online_kernel; "
                "HugeTLB1Gi pages are not taken from there",
                "ZoneMovable",
                node_id,
            )
    return None
