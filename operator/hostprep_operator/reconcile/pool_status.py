"""A pool's status in words: counts, and conditions that say what the counts mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hostprep.api.conditions import Condition, ConditionStatus, merged
from hostprep.units import format_quantity
from hostprep_operator.records import PoolRecord

__all__ = ["Tally", "conditions_of", "status_patch_of"]

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What was counted over a pool's nodes."""

    counts: Mapping[str, int]
    ready_bytes: int = 0
    rolling: int = 0
    """Nodes that change now, or wait for their turn to."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of degraded and failed nodes."""
    ruled_by: Counter[str] = field(default_factory=Counter)
    """Pools that mark nodes in another way than this one asks for, with the number of nodes."""


def conditions_of(tally: Tally) -> tuple[Condition, ...]:
    """Return the pool's conditions, without their times."""
    return (_ready(tally), _progressing(tally), _degraded(tally), _conflicted(tally))


def status_patch_of(pool: PoolRecord, tally: Tally, *, now_s: float) -> Mapping[str, Any] | None:
    """Return the merge patch of the status; None where the pool says all of it already."""
    conditions = conditions_of(tally)
    before = pool.conditions
    said = len(before) == len(conditions) and all(
        condition.type in before and before[condition.type].says_the_same_as(condition)
        for condition in conditions
    )
    size = format_quantity(tally.ready_bytes)
    numbers = (pool.observed_generation, pool.counts, pool.ready_size)
    if said and numbers == (pool.generation, tally.counts, size):
        return None
    timed = merged(before.values(), conditions, now_s=now_s)
    return {
        "status": {
            "observedGeneration": pool.generation,
            **tally.counts,
            "readySize": size,
            "conditions": [condition.to_json() for condition in timed],
        }
    }


def _ready(tally: Tally) -> Condition:
    counts = tally.counts
    ready, selected = counts["ready"], counts["selected"]
    if selected == 0:
        return _condition("Ready", "False", "NothingSelected", "No node has the pool's labels.")
    message = f"{ready} of {_nodes(selected)} ready."
    if ready == selected and counts["updated"] == selected:
        return _condition("Ready", "True", "AllReady", message)
    if ready == selected:  # as the pool was: `kubectl wait` after a change must not return yet
        message = f"{ready} of {_nodes(selected)} ready, {counts['updated']} of them up to date."
        return _condition("Ready", "False", "RollingOut", message)
    reason = "SomeFailed" if counts["failed"] else "Preparing"
    return _condition("Ready", "False", reason, message)


def _progressing(tally: Tally) -> Condition:
    counts = tally.counts
    updated, selected = counts["updated"], counts["selected"]
    if tally.rolling:
        message = f"{updated} of {_nodes(selected)} updated; {tally.rolling} to go."
        return _condition("Progressing", "True", "RollingOut", message)
    if counts["preparing"] or updated < selected:
        message = f"{_nodes(counts['preparing'])} being prepared."
        return _condition("Progressing", "True", "Preparing", message)
    return _condition("Progressing", "False", "Settled", "Nothing is being changed.")


def _degraded(tally: Tally) -> Condition:
    degraded, failed = tally.counts["degraded"], tally.counts["failed"]
    if not degraded and not failed:
        return _condition("Degraded", "False", "Sound", "No node reports damage or a failure.")
    reason = "SomeFailed" if failed else "SomeDegraded"
    message = f"{_nodes(degraded + failed)} in trouble: {_listed(tally.reasons)}."
    return _condition("Degraded", "True", reason, message)


def _conflicted(tally: Tally) -> Condition:
    if not tally.ruled_by:
        return _condition("Conflicted", "False", "NoConflict", "No other pool's readiness rules.")
    message = (
        "Nodes are marked as pools of a higher rank say, whose readiness differs: "
        f"{_listed(tally.ruled_by)}. Give them the same readiness, or other nodes."
    )
    return _condition("Conflicted", "True", "OtherPoolRules", message)


def _condition(name: str, status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(type=name, status=status, reason=reason, message=message)


def _nodes(count: int) -> str:
    return f"{count} node" + ("" if count == 1 else "s")


def _listed(counter: Counter[str]) -> str:
    """Return the most frequent first, those of one number by name: the text must not waver."""
    ranked = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(ranked) - _SHOWN} more" if len(ranked) > _SHOWN else ""
    return ", ".join(f"{name} ({_nodes(count)})" for name, count in ranked[:_SHOWN]) + more
