"""The choice of backing: the first of the pool's preferences that can be had without stalling."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.backing import MIB, Backing
from hostprep.plan.actions import PassedOver, Unmet
from hostprep.plan.changes import compute_changes
from hostprep.plan.freeing import free_all
from hostprep.plan.hugetlb import offer_hugetlb
from hostprep.plan.placement import granule_bytes
from hostprep.plan.question import Offer, Question, Refusal
from hostprep.plan.tmpfs import offer_tmpfs
from hostprep.units import format_bytes

__all__ = ["Choice", "choose", "consider", "unmet"]

_STEP = 2 * MIB
_MENDED_BY_ASKING = frozenset({"TooSmall", "NoSuchPages", "NeedsRoot", "NotPinned"})
"""Reasons that no waiting mends: the pool, the user or the node's settings must change."""
_REASONS = ("NotEnoughMemory", "Fragmented", "ZoneMovable", "CgroupLimit", "NotPinned")


@dataclass(frozen=True, slots=True)
class Choice:
    """The backing that was taken, if any, and those that were passed over for it."""

    offer: Offer | None
    passed_over: tuple[PassedOver, ...]
    reasons: tuple[str, ...]


def choose(question: Question, wanted_bytes: int) -> Choice:
    """Return the first backing in order that all new regions can have."""
    passed: list[PassedOver] = []
    reasons: list[str] = []
    for backing in question.spec.backings:
        answer = consider(question, backing, wanted_bytes)
        if isinstance(answer, Offer):
            return Choice(answer, tuple(passed) if answer.changes.new else (), tuple(reasons))
        passed.append(PassedOver(backing, answer.why, answer.remedy))
        reasons.append(answer.reason)
    return Choice(None, tuple(passed), tuple(reasons))


def consider(question: Question, backing: Backing, wanted_bytes: int) -> Offer | Refusal:
    """Return how the pool comes to `wanted_bytes` with new regions of that backing, or why not."""
    changes = compute_changes(
        question.spec,
        question.layout,
        question.regions,
        wanted_bytes=wanted_bytes,
        backing=backing,
        base_page_bytes=question.facts.memory.page_bytes,
    )
    if changes.too_small:
        page = granule_bytes(backing, 0, question.facts.memory.page_bytes)
        return Refusal(
            f"what is missing at {', '.join(changes.too_small[:4])} is less than one page of "
            f"{format_bytes(page)}",
            "ask for more, for fewer regions, or allow smaller pages",
            "TooSmall",
        )
    if not changes.new:
        budget, returns = free_all(question, changes, backing)
        return Offer(backing, changes, budget, returns=returns)
    if backing in question.refused:
        return Refusal(
            f"tried in this run and found short: {question.refused[backing]}",
            "run it again later, or at boot",
            "FoundShort",
        )
    make_offer = offer_hugetlb if backing.is_hugetlb else offer_tmpfs
    return make_offer(question, changes, backing)


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
        remedy = f"ask for {_exact(best)} or less, which {backing} can give now"
    else:
        remedy = choice.passed_over[0].remedy if choice.passed_over else "ask for less"
    reason = next((r for r in _REASONS if r in choice.reasons), choice.reasons[-1])
    return Unmet(why, best, remedy, "TooLarge" if too_large else reason, never)


def _exact(size_bytes: int) -> str:
    """Return a size as it can be written into a pool."""
    return f"{size_bytes // MIB}Mi"


def _largest(question: Question, backing: Backing, wanted_bytes: int) -> int:
    """Return the largest size below `wanted_bytes` that the backing can give, by bisection."""

    def possible(size: int) -> bool:
        return isinstance(consider(question, backing, size), Offer)

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
