"""Whether regions can be had in pages of hugetlbfs, and how many must be added where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hostprep.backing import MIB, Backing
from hostprep.node.facts import LedgerEntry
from hostprep.node.plan.capacity import Budget
from hostprep.node.plan.question import Offer, Question, Refusal
from hostprep.node.plan.words import movable_refusal, page_words, short_refusal
from hostprep.units import format_bytes

__all__ = ["take_hugetlb"]

_GIGANTIC_SPARE = 1.25
"""1 GiB pages need aligned free runs: a node must have this much more in large blocks."""


def take_hugetlb(question: Question, offer: Offer, backing: Backing) -> Offer | Refusal:
    """Return the offer with the new regions of this backing taken, or why they cannot be."""
    need = offer.changes.pages_per_node(backing, backing.page_bytes, question.layout.node_ids)
    refusal = _rights(question, backing) or _zones(question, need, backing)
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
        result = _take(offer, node_id, backing, pages)
        if isinstance(result, Refusal):
            return result
        offer = result
    return offer


def _rights(question: Question, backing: Backing) -> Refusal | None:
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


def _take(offer: Offer, node_id: int, backing: Backing, pages: int) -> Offer | Refusal:
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
