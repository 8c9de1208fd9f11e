"""One pool: counts, conditions and events, over the nodes that it selects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hostprep.api.conditions import Condition, merged
from hostprep.api.node_resource import Phase
from hostprep.units import format_quantity
from hostprep_operator.reconcile.assign import usable
from hostprep_operator.reconcile.changes import EventNote, PoolChanges, Settings
from hostprep_operator.reconcile.node_conditions import listed, nodes_of
from hostprep_operator.reconcile.rollout import Member, grant, member_of, waits
from hostprep_operator.records import HostMemoryNodeRecord, NodeRecord, PoolRecord

_NOT_ALLOWED = "TaintKeyNotAllowed"
_TROUBLE = {Phase.DEGRADED: "degraded", Phase.FAILED: "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counts over a pool's nodes."""

    counts: Mapping[str, int]
    ready_bytes: int = 0
    rolling: int = 0
    """Nodes that change now, or wait for their turn to."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of degraded and failed nodes."""
    ruled_by: Counter[str] = field(default_factory=Counter)
    """Pools that mark nodes in another way than this one asks for, with the number of nodes."""


def reconcile_pool(
    pool: PoolRecord,
    members: Iterable[tuple[NodeRecord, HostMemoryNodeRecord | None]],
    *,
    pools: Iterable[PoolRecord],
    grants: frozenset[str],
    settings: Settings,
    now_s: float,
) -> PoolChanges:
    """Return the pool's status, if it changed, and the nodes that may change now.

    `members` are the nodes that the pool selects and those with an entry of its name; others
    are skipped. `pools` are all pools, this one among them or not.
    """
    selected: list[Member] = []
    releasing = 0
    for node, hmn in members:
        if node.deleting:
            continue
        if pool.selects(node.labels):
            selected.append(member_of(pool, node, hmn))
        elif _is_releasing(pool, node, hmn):
            releasing += 1
    granted = grant(pool, selected, grants)
    counters = _counters_of(selected, granted, releasing)
    counters.ruled_by.update(_ruled_by(pool, selected, pools))
    conditions = _conditions_of(counters, refused_key(pool, settings), settings)
    patch = None if pool.deleting else _status_patch(pool, counters, conditions, now_s=now_s)
    return PoolChanges(
        status_patch=patch,
        grants=granted,
        events=() if patch is None else _events(pool, counters, conditions),
        counts=counters.counts,
    )


def _is_releasing(pool: PoolRecord, node: NodeRecord, hmn: HostMemoryNodeRecord | None) -> bool:
    hmn = usable(node, hmn)
    entry = hmn.entry(pool.name) if hmn else None
    return entry is not None and entry.absent


def _counters_of(selected: list[Member], granted: frozenset[str], releasing: int) -> Counters:
    states: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    ready_bytes = 0
    for member in selected:
        state = _state(member)
        states[state] += 1
        if member.report is not None:
            ready_bytes += member.report.ready_bytes
            if state in _TROUBLE.values():
                reasons[member.report.reason or member.report.phase.value] += 1
    counts = {
        **{state: states[state] for state in ("ready", "preparing", "degraded", "failed")},
        "updated": sum(member.current for member in selected),
        "selected": len(selected),
        "releasing": releasing,
        "unavailable": len(selected) - states["ready"],
    }
    rolling = sum(member.name in granted or waits(member) for member in selected)
    return Counters(counts=counts, ready_bytes=ready_bytes, rolling=rolling, reasons=reasons)


def _state(member: Member) -> str:
    """Return the count that the node belongs to; `unknown` is only unavailable."""
    if member.ready:
        return "ready" if member.known else "unknown"
    phase = member.report.phase if member.report else Phase.PENDING
    return _TROUBLE.get(phase, "preparing")


def _ruled_by(pool: PoolRecord, members: list[Member], pools: Iterable[PoolRecord]) -> Counter[str]:
    """Return which pools rule nodes of this one in another way; rarely reads the nodes."""
    ruled: Counter[str] = Counter()
    above = sorted(
        (p for p in pools if p.readiness.required and p.rank < pool.rank), key=lambda p: p.rank
    )
    policy = pool.readiness.policy
    if not pool.readiness.required or all(p.readiness.policy == policy for p in above):
        return ruled
    for member in members:
        ruling = next((p for p in above if p.selects(member.node.labels)), None)
        if ruling is not None and ruling.readiness.policy != policy:
            ruled[ruling.name] += 1
    return ruled


def _events(
    pool: PoolRecord, counters: Counters, conditions: tuple[Condition, ...]
) -> tuple[EventNote, ...]:
    """Return the events for what changed since the pool's current status."""
    ready, progressing, degraded, conflicted = conditions
    reasons = {name: condition.reason for name, condition in pool.conditions.items()}
    notes: list[EventNote] = []
    was_rolling = reasons.get("Progressing") == "RollingOut"
    if progressing.reason == "RollingOut" and not was_rolling:
        message = f"A change is rolled out: {progressing.message}"
        notes.append(EventNote("Normal", "RolloutStarted", message))
    elif was_rolling and progressing.reason != "RollingOut":
        updated, selected = counters.counts["updated"], counters.counts["selected"]
        message = f"{updated} of {selected} nodes are updated."
        notes.append(EventNote("Normal", "RolloutFinished", message))
    if ready.reason == "NothingSelected" and reasons.get("Ready") != "NothingSelected":
        notes.append(EventNote("Warning", "NothingSelected", ready.message))
    if conflicted.reason == _NOT_ALLOWED and reasons.get("Conflicted") != _NOT_ALLOWED:
        notes.append(EventNote("Warning", _NOT_ALLOWED, conflicted.message))
    failed = counters.counts["failed"]
    if failed > 0 and failed >= 2 * pool.counts.get("failed", 0):
        notes.append(EventNote("Warning", "NodeFailed", degraded.message))
    return tuple(notes)


# --- the status


def _conditions_of(counters: Counters, refused: str, settings: Settings) -> tuple[Condition, ...]:
    """Return the pool's conditions, without their times."""
    conflicted = _not_allowed(refused, settings) if refused else _conflicted(counters)
    return (_ready(counters), _progressing(counters), _degraded(counters), conflicted)


def _status_patch(
    pool: PoolRecord, counters: Counters, conditions: tuple[Condition, ...], *, now_s: float
) -> Mapping[str, Any] | None:
    """Return the merge patch of the status; None where the pool says all of it already."""
    before = pool.conditions
    unchanged = len(before) == len(conditions) and all(
        condition.type in before and before[condition.type].says_the_same_as(condition)
        for condition in conditions
    )
    size = format_quantity(counters.ready_bytes)
    numbers = (pool.observed_generation, pool.counts, pool.ready_size)
    if unchanged and numbers == (pool.generation, counters.counts, size):
        return None
    timed = merged(before.values(), conditions, now_s=now_s)
    return {
        "status": {
            "observedGeneration": pool.generation,
            **counters.counts,
            "readySize": size,
            "conditions": [condition.to_json() for condition in timed],
        }
    }


def _ready(counters: Counters) -> Condition:
    counts = counters.counts
    ready, selected = counts["ready"], counts["selected"]
    if selected == 0:
        return Condition("Ready", "False", "NothingSelected", "No node has the pool's labels.")
    message = f"{ready} of {nodes_of(selected)} ready."
    if ready == selected and counts["updated"] == selected:
        return Condition("Ready", "True", "AllReady", message)
    if ready == selected:  # as the pool was: `kubectl wait` after a change must not return yet
        message = f"{ready} of {nodes_of(selected)} ready, {counts['updated']} of them up to date."
        return Condition("Ready", "False", "RollingOut", message)
    reason = "SomeFailed" if counts["failed"] else "Preparing"
    return Condition("Ready", "False", reason, message)


def _progressing(counters: Counters) -> Condition:
    counts = counters.counts
    updated, selected = counts["updated"], counts["selected"]
    if counters.rolling:
        message = f"{updated} of {nodes_of(selected)} updated; {counters.rolling} to go."
        return Condition("Progressing", "True", "RollingOut", message)
    if counts["preparing"] or updated < selected:
        message = f"{nodes_of(counts['preparing'])} being prepared."
        return Condition("Progressing", "True", "Preparing", message)
    return Condition("Progressing", "False", "Settled", "Nothing is being changed.")


def _degraded(counters: Counters) -> Condition:
    degraded, failed = counters.counts["degraded"], counters.counts["failed"]
    if not degraded and not failed:
        return Condition("Degraded", "False", "Sound", "No node reports damage or a failure.")
    reason = "SomeFailed" if failed else "SomeDegraded"
    message = f"{nodes_of(degraded + failed)} in trouble: {_listed(counters.reasons)}."
    return Condition("Degraded", "True", reason, message)


def refused_key(pool: PoolRecord, settings: Settings) -> str:
    """Return the key of the pool's taint where it may not be written; empty where it may."""
    readiness = pool.readiness
    if not readiness.required or settings.may_write_taint(readiness.taint):
        return ""
    return readiness.taint or ""


def _not_allowed(key: str, settings: Settings) -> Condition:
    allowed = listed(sorted(settings.taint_keys or ()), 5)
    message = (
        f"The operator may not write taint {key}: its nodes' taints stay as they are. Add the key "
        "to admissionPolicy.taintKeys of the chart, or have readiness.taintKey name one that is "
        f"allowed: {allowed}."
    )
    return Condition("Conflicted", "True", _NOT_ALLOWED, message)


def _conflicted(counters: Counters) -> Condition:
    if not counters.ruled_by:
        return Condition("Conflicted", "False", "NoConflict", "No other pool's readiness rules.")
    message = (
        "Nodes are marked as pools of a higher rank say, whose readiness differs: "
        f"{_listed(counters.ruled_by)}. Give them the same readiness, or other nodes."
    )
    return Condition("Conflicted", "True", "OtherPoolRules", message)


def _listed(counter: Counter[str]) -> str:
    """Return the most frequent first, those of one number by name: the text must not waver."""
    ranked = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    return listed([f"{name} ({nodes_of(count)})" for name, count in ranked], 5)
