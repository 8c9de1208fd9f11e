"""From what is asked for and what was found to a HostMemoryNode's status. Pure: no clock read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hostprep.agent.desired import Desire, Instruction, key_of
from hostprep.agent.messages import Look, Outcome, Progress, RegionLook
from hostprep.agent.phases import Case, Verdict, judge
from hostprep.api.conditions import Condition, merged
from hostprep.api.node_resource import (
    HugePageStatus,
    NodeStatus,
    Phase,
    PoolEntry,
    PoolStatus,
    RegionStatus,
    Step,
)
from hostprep.node.boot import BootUnit
from hostprep.units import format_bytes

__all__ = ["View", "node_status"]

_MAX_SUMMARY_POOLS = 3
_MAX_MESSAGE = 2000
_NUMBER = re.compile(r"\d[\d.,]*")
_WORST_FIRST = (
    Phase.FAILED,
    Phase.DEGRADED,
    Phase.PENDING,
    Phase.PREPARING,
    Phase.RESIZING,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the agent knows at one moment."""

    desire: Desire
    instruction: Instruction
    look: Look
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """By pool; one with another key than the entry's answers another wording."""
    progress: Mapping[str, Progress] = field(default_factory=dict)
    boot: BootUnit = field(default_factory=BootUnit)
    agent_version: str = ""


def node_status(view: View, previous: NodeStatus, *, now_s: float) -> NodeStatus:
    """Return the whole status. What `previous` says of another boot counts for nothing."""
    same_boot = previous.boot_id == view.look.boot_id
    pools: list[PoolStatus] = []
    for entry in view.desire.entries:
        before = previous.pool(entry.name) if same_boot else None
        status = _pool_status(view, entry, before, now_s)
        if status is not None:
            pools.append(status)
    present = {entry.name for entry in view.desire.entries if not entry.absent}
    return NodeStatus(
        observed_generation=view.desire.generation,
        boot_id=view.look.boot_id,
        agent_version=view.agent_version,
        summary=_summary(pools),
        pools=tuple(pools),
        huge_pages=tuple(
            HugePageStatus(page_bytes=size.page_bytes, total=size.total, held=size.held)
            for size in view.look.huge_pages
        ),
        conditions=merged(
            previous.conditions,
            (*_conditions(pools, present), *_boot_unit(view.boot)),
            now_s=now_s,
        ),
    )


def _pool_status(
    view: View, entry: PoolEntry, before: PoolStatus | None, now_s: float
) -> PoolStatus | None:
    outcome = view.outcomes.get(entry.name)
    case = Case(
        entry=entry,
        look=view.look.pool(entry.name),
        outcome=outcome if outcome is not None and outcome.key == key_of(entry) else None,
        refused=view.instruction.refused.get(entry.name),
        withheld=entry.name in view.instruction.withheld,
        boot_failure=dict(view.boot.failures).get(entry.name, ""),
        previous=before,
    )
    verdict = judge(case)
    return None if verdict is None else _filled(view, case, verdict, now_s)


def _filled(view: View, case: Case, verdict: Verdict, now_s: float) -> PoolStatus:
    before, outcome, look = case.previous, case.outcome, case.look
    answers_this = before is not None and before.generation == case.entry.generation
    regions = tuple(_region(region) for region in _by_name(case.regions))
    wanted_bytes = before.wanted_bytes if before is not None and answers_this else 0
    return PoolStatus(
        name=case.entry.name,
        uid=case.entry.uid,
        generation=case.entry.generation,
        phase=verdict.phase,
        reason=verdict.reason,
        message=_message(verdict, case, regions)[:_MAX_MESSAGE],
        backing=_backing(case),
        wanted_bytes=outcome.wanted_bytes if outcome else wanted_bytes,
        ready_bytes=case.sound_bytes,
        progress_percent=_percent(view, case, verdict),
        regions_leased=sum(region.state == "Leased" for region in case.regions),
        blocked=outcome.blocked if outcome else (),
        handoff_generation=look.generation if look else 0,
        ready_since_s=_ready_since(verdict, before, now_s),
        steps=_steps(outcome, before),
        regions=regions,
    )


def _message(verdict: Verdict, case: Case, regions: tuple[RegionStatus, ...]) -> str:
    """Return what to say; the words of before where only numbers in them have moved.

    Free memory is part of many sentences and never stands still: it is no news.
    """
    before = case.previous
    if before is None or (before.phase, before.reason, before.generation) != (
        verdict.phase,
        verdict.reason,
        case.entry.generation,
    ):
        return verdict.message
    unchanged = verdict.phase is Phase.READY and before.regions == regions
    same_words = _NUMBER.sub("#", before.message) == _NUMBER.sub("#", verdict.message)
    return before.message if unchanged or same_words else verdict.message


def _backing(case: Case) -> str:
    kinds = {region.backing: None for region in case.regions if region.sound}
    if kinds:
        return ", ".join(kinds)
    return case.outcome.backing if case.outcome else ""


def _percent(view: View, case: Case, verdict: Verdict) -> int | None:
    if case.outcome is None or not case.outcome.pending or verdict.phase is Phase.FAILED:
        return None
    progress = view.progress.get(case.entry.name)
    if progress is None or progress.total_bytes <= 0:
        return 0
    return max(0, min(100, 100 * progress.done_bytes // progress.total_bytes))


def _ready_since(verdict: Verdict, before: PoolStatus | None, now_s: float) -> float | None:
    if verdict.phase is not Phase.READY:
        return None
    if before is not None and before.phase is Phase.READY and before.ready_since_s is not None:
        return before.ready_since_s
    return float(int(now_s))


def _steps(outcome: Outcome | None, before: PoolStatus | None) -> tuple[Step, ...]:
    if outcome is not None and outcome.steps:
        return tuple(Step(name, seconds) for name, seconds in outcome.steps)
    return before.steps if before is not None else ()


def _by_name(regions: Iterable[RegionLook]) -> list[RegionLook]:
    """Return each name once: a half-made region may have a finished namesake."""
    chosen: dict[str, RegionLook] = {}
    for region in regions:
        if region.name not in chosen or chosen[region.name].state == "Unfinished":
            chosen[region.name] = region
    return list(chosen.values())


def _region(region: RegionLook) -> RegionStatus:
    return RegionStatus(
        name=region.name,
        size_bytes=region.size_bytes,
        backing=region.backing,
        placement=region.placement,
        state=region.state,
        message=region.message[:_MAX_MESSAGE],
    )


def _summary(pools: Iterable[PoolStatus]) -> str:
    parts = [_summary_of(pool) for pool in pools]
    if len(parts) > _MAX_SUMMARY_POOLS:
        more = len(parts) - _MAX_SUMMARY_POOLS
        parts = [*parts[:_MAX_SUMMARY_POOLS], f"{more} more"]
    return " · ".join(parts) or "nothing is asked for"


def _summary_of(pool: PoolStatus) -> str:
    if pool.phase is Phase.READY:
        return f"{pool.name} {format_bytes(pool.ready_bytes)} {pool.backing} ready"
    words = f"{pool.name} {pool.phase.value.lower()}"
    if pool.progress_percent is not None:
        return f"{words} {pool.progress_percent} %"
    return words if pool.reason == pool.phase.value else f"{words} ({pool.reason})"


def _conditions(pools: Iterable[PoolStatus], present: set[str]) -> tuple[Condition, ...]:
    pools = tuple(pools)
    waiting = [pool for pool in pools if pool.blocked]
    damaged = [
        f"{pool.name}/{region.name}"
        for pool in pools
        for region in pool.regions
        if region.state == "Damaged"
    ]
    return (
        _ready([pool for pool in pools if pool.name in present]),
        Condition(
            type="ResizeBlocked",
            status="True" if waiting else "False",
            reason="Leased" if waiting else "NothingWaits",
            message="; ".join(
                f"{pool.name} waits for {', '.join(pool.blocked)}" for pool in waiting
            ),
        ),
        Condition(
            type="Damaged",
            status="True" if damaged else "False",
            reason="RegionsDamaged" if damaged else "AllSound",
            message=", ".join(damaged)[:_MAX_MESSAGE],
        ),
    )


def _ready(pools: list[PoolStatus]) -> Condition:
    off = [pool for pool in pools if pool.phase is not Phase.READY]
    if not off:
        said = f"{len(pools)} of {len(pools)} pools are ready" if pools else "no pool is asked for"
        return Condition(type="Ready", status="True", reason="Ready", message=said)
    order = {phase: rank for rank, phase in enumerate(_WORST_FIRST)}
    worst = min(off, key=lambda pool: order.get(pool.phase, len(order)))
    common = worst.phase in (Phase.PREPARING, Phase.RESIZING, Phase.DEGRADED)
    return Condition(
        type="Ready",
        status="False",
        reason=worst.phase.value if common else worst.reason,
        message="; ".join(f"{pool.name}: {pool.message}" for pool in off)[:_MAX_MESSAGE],
    )


def _boot_unit(boot: BootUnit) -> Iterator[Condition]:
    """Yield how the node's next boot will go, where a pool has something done then."""
    if boot.failures:
        said = "; ".join(f"{pool}: {why}" for pool, why in boot.failures)
        yield Condition(
            type="BootUnit",
            status="False",
            reason="BootUnitNotInstalled",
            message=said[:_MAX_MESSAGE],
        )
    elif boot.pools:
        yield Condition(
            type="BootUnit",
            status="True",
            reason="Installed",
            message=f"reserves pages before kubelet at the next boot: {', '.join(boot.pools)}",
        )
