"""One pool: counts, conditions and events, over the nodes that it selects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hostprep.api.conditions import Condition, ConditionStatus, format_time, merged
from hostprep.api.names import HOST_MEMORY_READY, HOST_MEMORY_RELEASING
from hostprep.api.node_resource import Phase
from hostprep.units import format_quantity
from hostprep_operator.reconcile.changes import (
    EventNote,
    Grants,
    NodeView,
    PoolChanges,
    Settings,
)
from hostprep_operator.reconcile.node_conditions import listed, nodes_of
from hostprep_operator.reconcile.rollout import Member, Turns, beginning, member_of, turns
from hostprep_operator.records import POOL_COUNTS, PoolRecord

_NOT_ALLOWED = "TaintKeyNotAllowed"
_TROUBLE = {Phase.DEGRADED: "degraded", Phase.FAILED: "failed"}
_STATES = ("ready", "preparing", "blocked", "degraded", "failed", "leaving", "releasing")
"""Where a node stands: one of these, or unknown."""
_AGENTS_CONDITION = {"releasing": "Releasing", "blocked": "ResizeBlocked"}
_HELD = ("Paused", "Partitioned", "Blocked")
_WAITING_S = 30.0
_PROGRESSING = ("RollingOut", *_HELD)
"""Reasons of Progressing while a change is not everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counts over a pool's nodes."""

    counts: Mapping[str, int]
    turns: Turns
    ready_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Of degraded and failed nodes."""
    ruled_by: Counter[str] = field(default_factory=Counter)
    """Pools that mark nodes in another way than this one asks for, with the number of nodes."""
    kept_until_s: float | None = None
    """When the first of the grace periods that run ends."""


def reconcile_pool(
    pool: PoolRecord,
    members: Iterable[NodeView],
    *,
    pools: Iterable[PoolRecord],
    grants: Grants,
    settings: Settings,
    now_s: float,
) -> PoolChanges:
    """Return the pool's status, if it changed, and the nodes on which something may begin.

    `members` are the nodes that the pool selects and those with an entry of its name, with what
    tells whether an agent lives there; others are skipped. `pools` are all pools, this one among
    them or not. A pool that is gone has no status any more, and still gives turns to the nodes
    that release its memory.
    """
    known = [member for view in members if (member := member_of(pool, view)) is not None]
    granted = turns(pool, known, grants, now_s=now_s)
    states = {member.name: _state(pool, member, now_s) for member in known}
    counters = _counters_of(known, states, granted, now_s)
    result = PoolChanges(
        grants=granted.grants,
        recheck_at_s=_recheck_at_s(counters, known, now_s),
        counts=counters.counts,
        since_s=_since_s(known, states),
    )
    if pool.gone:
        return result
    selected = [member for member in known if member.selected]
    counters.ruled_by.update(_ruled_by(pool, selected, pools))
    conditions = _conditions_of(pool, counters, refused_key(pool, settings), settings)
    patch = None if pool.deleting else _status_patch(pool, counters, conditions, now_s=now_s)
    events = () if patch is None else _events(pool, counters, conditions)
    return replace(result, status_patch=patch, events=events)


def _recheck_at_s(counters: Counters, members: list[Member], now_s: float) -> float | None:
    """Return when to look again: where something waits, soon, whatever tells of its turn."""
    times = [m.unreachable_at_s for m in members if m.unreachable_at_s is not None]
    if counters.kept_until_s is not None:
        times.append(counters.kept_until_s)
    if counters.turns.waiting.total() > len(counters.turns.grants.nodes):
        times.append(now_s + _WAITING_S)
    return min(times, default=None)


def _counters_of(
    members: list[Member], states: Mapping[str, str], granted: Turns, now_s: float
) -> Counters:
    found = Counter(states.values())
    reasons: Counter[str] = Counter()
    for member in members:
        if member.report is not None and states[member.name] in _TROUBLE.values():
            reasons[member.report.reason or member.report.phase.value] += 1
    selected = [member for member in members if member.selected]
    counts = {
        **{state: found[state] for state in _STATES},
        "updated": sum(member.current for member in selected),
        "selected": len(selected),
        "unavailable": sum(
            m.entry is not None and states[m.name] not in ("ready", "blocked") for m in selected
        ),
        "leased": sum(member.leased for member in members),
    }
    ends_s = [
        m.entry.release_after_s
        for m in members
        if m.leaving and m.entry is not None and m.entry.release_after_s is not None
    ]
    return Counters(
        counts=counts,
        turns=granted,
        ready_bytes=sum(m.report.ready_bytes for m in selected if m.report is not None),
        reasons=reasons,
        kept_until_s=min((end_s for end_s in ends_s if end_s > now_s), default=None),
    )


def _state(pool: PoolRecord, member: Member, now_s: float) -> str:
    """Return the count that the node belongs to; `unknown` is only unavailable.

    Where the grace period is over and no agent lives, a release waits for that, and for no turn.
    """
    if not member.selected:
        due = beginning(member, now_s) == "release" and not pool.rollout.paused
        return "releasing" if not member.leaving or (due and not member.reachable) else "leaving"
    if member.ready:
        if not member.reachable:
            return "unknown"
        return "blocked" if member.blocked else "ready"
    phase = member.report.phase if member.report else Phase.PENDING
    return _TROUBLE.get(phase, "preparing")


def _since_s(members: list[Member], states: Mapping[str, str]) -> dict[str, float]:
    """Return since when the longest in each state is in it, by conditions of the objects.

    So a restarted operator says the same.
    """
    since_s: dict[str, float] = {}
    for member in members:
        state = states[member.name]
        at_s = _state_since_s(member, state)
        if at_s is None:
            continue
        is_unavailable = member.selected and state != "blocked"
        for name in (state, "unavailable") if is_unavailable else (state,):
            since_s[name] = min(since_s.get(name, at_s), at_s)
    return {name: at_s for name, at_s in since_s.items() if name in POOL_COUNTS}


def _state_since_s(member: Member, state: str) -> float | None:
    """Return since when the node is in its state; None where it serves, or nothing tells.

    The node's HostMemoryReleasing holds through the grace period and the wait for a turn, which
    may take days in a large fleet, where all is well: of the release itself the agent tells.
    Where none lives to tell of it, it hangs since the last of what it takes came about.
    """
    if state in _AGENTS_CONDITION:
        since_s = member.agent_since_s.get(_AGENTS_CONDITION[state])
        if since_s is None and state == "releasing" and not member.reachable:
            asked = member.node.conditions.get(HOST_MEMORY_RELEASING)
            due_s = member.entry.release_after_s if member.entry else None
            times = (member.unreachable_since_s, due_s, asked.since_s if asked else None)
            return max((at_s for at_s in times if at_s is not None), default=None)
        return since_s
    kind = HOST_MEMORY_READY if member.selected else HOST_MEMORY_RELEASING
    condition = member.node.conditions.get(kind)
    if condition is None or (member.selected and condition.status == "True"):
        return None
    return condition.since_s


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
    was = reasons.get("Progressing")
    if progressing.reason == "RollingOut" and was not in _PROGRESSING:
        message = f"A change is rolled out: {progressing.message}"
        notes.append(EventNote("Normal", "RolloutStarted", message))
    elif (
        was in _PROGRESSING
        and progressing.reason not in _PROGRESSING
        and counters.counts["selected"]
    ):
        updated, selected = counters.counts["updated"], counters.counts["selected"]
        message = f"{updated} of {selected} nodes are updated."
        notes.append(EventNote("Normal", "RolloutFinished", message))
    if progressing.reason in _HELD and was != progressing.reason:
        notes.append(EventNote("Normal", f"Rollout{progressing.reason}", progressing.message))
    leaving = counters.counts["leaving"]
    if leaving and leaving >= 2 * pool.counts.get("leaving", 0):
        notes.append(EventNote("Warning", "ReleaseScheduled", _leaving(counters)))
    if ready.reason == "NothingSelected" and reasons.get("Ready") != "NothingSelected":
        notes.append(EventNote("Warning", "NothingSelected", ready.message))
    if conflicted.reason == _NOT_ALLOWED and reasons.get("Conflicted") != _NOT_ALLOWED:
        notes.append(EventNote("Warning", _NOT_ALLOWED, conflicted.message))
    failed = counters.counts["failed"]
    if failed > 0 and failed >= 2 * pool.counts.get("failed", 0):
        notes.append(EventNote("Warning", "NodeFailed", degraded.message))
    return tuple(notes)


# --- the status


def _conditions_of(
    pool: PoolRecord, counters: Counters, refused: str, settings: Settings
) -> tuple[Condition, ...]:
    """Return the pool's conditions, without their times."""
    conflicted = _not_allowed(refused, settings) if refused else _conflicted(counters)
    return (_ready(counters), _progressing(pool, counters), _degraded(counters), conflicted)


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
        message = "No node has the pool's labels."
        if counts["leaving"]:
            message = f"{message} {_leaving(counters)}"
        return Condition("Ready", "False", "NothingSelected", message)
    message = f"{ready} of {nodes_of(selected)} ready."
    if ready == selected and counts["updated"] == selected:
        return Condition("Ready", "True", "AllReady", message)
    if ready == selected:  # as the pool was: `kubectl wait` after a change must not return yet
        message = f"{ready} of {nodes_of(selected)} ready, {counts['updated']} of them up to date."
        return Condition("Ready", "False", "RollingOut", message)
    if counts["failed"]:
        return Condition("Ready", "False", "SomeFailed", message)
    if ready + counts["blocked"] == selected:
        message = f"{message[:-1]}, {counts['blocked']} as before: a change waits for leases there."
        return Condition("Ready", "False", "Blocked", message)
    return Condition("Ready", "False", "Preparing", message)


def _progressing(pool: PoolRecord, counters: Counters) -> Condition:
    """Return what is going on. It is False while nothing moves, with what that waits for."""
    counts, granted = counters.counts, counters.turns
    selected, preparing = counts["selected"], counts["preparing"] - granted.held["prepare"]
    changing = granted.changing + granted.waiting["change"]
    held, unbegun = granted.held.total(), granted.waiting["prepare"]
    updated = f"{counts['updated']} of {nodes_of(selected)} updated"
    later = f", {unbegun} of them when their turn comes" if unbegun else ""
    rows: tuple[tuple[object, ConditionStatus, str, str], ...] = (
        (
            held and pool.rollout.paused,
            "False",
            "Paused",
            f"Paused: {nodes_of(held)} wait until spec.rollout.paused is false.",
        ),
        (changing, "True", "RollingOut", f"{updated}; {changing} to go."),
        (preparing > 0, "True", "Preparing", f"{nodes_of(preparing)} being prepared{later}."),
        (counts["releasing"], "True", "Releasing", f"{_releasing(counts)}."),
        (counts["leaving"], "True", "Leaving", _leaving(counters)),
        (held, "False", "Partitioned", f"{updated}; {held} lie outside of rollout.partition."),
        (
            counts["blocked"],
            "False",
            "Blocked",
            f"{updated}; on {nodes_of(counts['blocked'])} the change waits for leases.",
        ),
        (counts["updated"] < selected, "True", "Preparing", f"{updated}."),
        (True, "False", "Settled", "Nothing is being changed."),
    )
    return next(
        Condition("Progressing", status, reason, message)
        for holds, status, reason, message in rows
        if holds
    )


def _releasing(counts: Mapping[str, int]) -> str:
    leaving = f", {counts['leaving']} more will" if counts["leaving"] else ""
    return f"{nodes_of(counts['releasing'])} give memory back{leaving}"


def _leaving(counters: Counters) -> str:
    """Return what becomes of memory that is not asked for any more."""
    count, until_s = nodes_of(counters.counts["leaving"]), counters.kept_until_s
    until = (
        "until their turn comes" if until_s is None else f"at least until {format_time(until_s)}"
    )
    return f"{count} no longer selected: memory is kept {until}, then released."


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
    remedy = (
        "Add the key to the chart's admissionPolicy.taintKeys, or have readiness.taintKey name one "
        f"that is allowed: {listed(sorted(settings.taint_keys), 5)}."
        if settings.taint_keys
        else "Have readiness.taintKey name a key with hostprep or host-memory in it."
    )
    message = (
        f"The operator may not write taint {key}: its nodes' taints stay as they are. {remedy}"
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
