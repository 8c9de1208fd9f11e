"""The choice of backings: for each placement the first preference that can be had without stalling.

A NUMA node that is short of something falls back alone: 1 GiB pages on the others are worth having.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hostprep.api.placement import Placement
from hostprep.backing import MIB, Backing
from hostprep.node.plan.actions import PassedOver, Unmet
from hostprep.node.plan.changes import Changes, compute_changes
from hostprep.node.plan.freeing import free_all
from hostprep.node.plan.hugetlb import take_hugetlb
from hostprep.node.plan.placement import granule_bytes
from hostprep.node.plan.question import Offer, Question, Refusal
from hostprep.node.plan.tmpfs import take_tmpfs
from hostprep.node.plan.words import full_remedy
from hostprep.units import format_bytes

__all__ = ["Choice", "choose", "unmet"]

_STEP = 2 * MIB
_MENDED_BY_ASKING = frozenset({"TooSmall", "NoSuchPages", "NeedsRoot", "NotPinned"})
"""Reasons that no waiting mends: the pool, the user or the node's settings must change."""
_REASONS = ("NotEnoughMemory", "Fragmented", "ZoneMovable", "CgroupLimit", "NotPinned")

_Backings = Mapping[Placement, Backing]


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
