"""Conditions and times as Kubernetes writes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from hostprep.api.codec import JsonObject, json_field


def format_time(seconds: float) -> str:
    """Return seconds since the epoch as 2026-11-21T13:00:00Z."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: object) -> float | None:
    """Return seconds since the epoch; None for anything that is no time."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


ConditionStatus = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Condition(JsonObject):
    """One entry of a `conditions` list. Times are seconds since the epoch, whole ones."""

    type: str = field(metadata=json_field(fallback=""))
    status: ConditionStatus = field(metadata=json_field(fallback="Unknown"))
    reason: str = field(metadata=json_field(fallback=""))
    """CamelCase and stable."""
    message: str = ""
    since_s: float | None = field(
        default=None,
        metadata=json_field(
            key="lastTransitionTime", omit_empty=True, encode=format_time, decode=parse_time
        ),
    )
    """lastTransitionTime; None until it is merged into a list."""
    observed_generation: int | None = field(default=None, metadata=json_field(omit_empty=True))

    def says_the_same_as(self, other: Condition) -> bool:
        """Whether they differ in nothing but the time."""
        return replace(self, since_s=None) == replace(other, since_s=None)


def merged(
    old: Iterable[Condition], new: Iterable[Condition], *, now_s: float
) -> tuple[Condition, ...]:
    """Return the new conditions; one whose status stays keeps the time since when.

    Old types that are not among the new ones go.
    """
    since_s = {(one.type, one.status): one.since_s for one in old if one.since_s is not None}
    return tuple(
        replace(one, since_s=since_s.get((one.type, one.status), float(int(now_s)))) for one in new
    )
