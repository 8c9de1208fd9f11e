"""Conditions as Kubernetes writes them: a change of status moves lastTransitionTime, no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hostprep.api.times import format_time, parse_time

__all__ = ["Condition", "ConditionStatus", "merged"]

ConditionStatus = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One entry of a `conditions` list. Times are seconds since the epoch, whole ones."""

    type: str
    status: ConditionStatus
    reason: str
    """CamelCase and stable."""
    message: str = ""
    since_s: float | None = None
    """lastTransitionTime; None until it is merged into a list."""
    observed_generation: int | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Condition:
        """Read one entry; what is missing becomes Unknown or empty."""
        status = document.get("status")
        return cls(
            type=str(document.get("type", "")),
            status=status if status in ("True", "False", "Unknown") else "Unknown",
            reason=str(document.get("reason") or ""),
            message=str(document.get("message") or ""),
            since_s=parse_time(document.get("lastTransitionTime")),
            observed_generation=document.get("observedGeneration"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the API server takes it."""
        document: dict[str, Any] = {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
        }
        if self.since_s is not None:
            document["lastTransitionTime"] = format_time(self.since_s)
        if self.observed_generation is not None:
            document["observedGeneration"] = self.observed_generation
        return document

    def says_the_same_as(self, other: Condition) -> bool:
        """Whether writing it again would tell nobody anything."""
        return replace(self, since_s=None) == replace(other, since_s=None)


def merged(
    old: Iterable[Condition], new: Iterable[Condition], *, now_s: float
) -> tuple[Condition, ...]:
    """Return the new conditions; one whose status stays keeps the time since when.

    Old types that are not among the new ones go.
    """
    before = {condition.type: condition for condition in old}
    return tuple(_timed(condition, before.get(condition.type), now_s) for condition in new)


def _timed(condition: Condition, before: Condition | None, now_s: float) -> Condition:
    if before is not None and before.status == condition.status and before.since_s is not None:
        return replace(condition, since_s=before.since_s)
    return replace(condition, since_s=float(int(now_s)))
