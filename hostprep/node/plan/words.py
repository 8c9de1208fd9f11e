"""Sentences that several parts of the planner say."""

from __future__ import annotations

from collections.abc import Iterable

from hostprep.backing import Backing
from hostprep.node.plan.question import Question, Refusal
from hostprep.units import format_bytes

__all__ = ["full_remedy", "movable_refusal", "page_words", "short_refusal"]


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
