"""From the desired state and what was found to a HostMemoryNode's status. Pure: no clock is read.

Each pool gets a phase, with a reason for machines and a message that names the next step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import hostprep
from hostprep.agent.desired import DesiredState, Instruction, entry_key
from hostprep.agent.kept import Key
from hostprep.agent.messages import (
    Failure,
    KeptObservation,
    Observation,
    PoolObservation,
    PoolResult,
    Progress,
    RegionObservation,
)
from hostprep.api.conditions import Condition, ConditionStatus, merged
from hostprep.api.node_resource import (
    MAX_FIELD,
    MAX_REFUSED,
    GivenUp,
    KeptStatus,
    NodeStatus,
    Phase,
    PoolEntry,
    PoolStatus,
    RegionStatus,
    Step,
)
from hostprep.client.untrusted import printable
from hostprep.node.boot import BootUnit
from hostprep.units import format_bytes

_MAX_SUMMARY_POOLS = 3
_MAX_MESSAGE = 2000
_LAST_S = 253402300799
"""The end of year 9999."""
_NUMBER = re.compile(r"\d[\d.,]*")
_SERVING = (Phase.READY, Phase.BLOCKED)
_STEADY = (*_SERVING, Phase.DEGRADED)
_WORST_FIRST = (
    Phase.FAILED,
    Phase.DEGRADED,
    Phase.PENDING,
    Phase.PREPARING,
    Phase.RESIZING,
    Phase.RELEASING,
    Phase.BLOCKED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What the agent knows at one moment."""

    desired: DesiredState
    instruction: Instruction
    observation: Observation
    results: Mapping[str, PoolResult] = field(default_factory=dict)
    """By pool; one with another key than the entry's answers another version of it."""
    progress: Mapping[str, Progress] = field(default_factory=dict)
    boot: BootUnit = field(default_factory=BootUnit)
    given_up: Mapping[Key, GivenUp] = field(default_factory=dict)
    """What regions gave up last, as far as this agent saw it."""


def node_status(node: NodeContext, previous: NodeStatus, *, now_s: float) -> NodeStatus:
    """Return the whole status. A `previous` of another boot counts for nothing."""
    same_boot = previous.boot_id == node.observation.boot_id
    pools: list[PoolStatus] = []
    for entry in node.desired.entries:
        before = previous.pool(entry.name) if same_boot else None
        status = _pool_status(node, entry, before, now_s)
        if status is not None:
            pools.append(status)
    present = {entry.name for entry in node.desired.entries if not entry.absent}
    return NodeStatus(
        observed_generation=node.desired.generation,
        boot_id=node.observation.boot_id,
        agent_version=hostprep.__version__,
        summary=_summary(pools),
        pools=tuple(pools),
        huge_pages=node.observation.huge_pages,
        conditions=merged(
            previous.conditions,
            _conditions(pools, present, node.boot),
            now_s=now_s,
        ),
    )


def _pool_status(
    node: NodeContext, entry: PoolEntry, before: PoolStatus | None, now_s: float
) -> PoolStatus | None:
    result = node.results.get(entry.name)
    if result is not None and result.key != entry_key(entry):
        result = None
    observation = node.observation.pool(entry.name)
    context = PoolContext(
        entry=entry,
        observation=observation,
        result=result,
        refused=node.instruction.refused.get(entry.name),
        withheld=entry.name in node.instruction.withheld,
        boot_failure=dict(node.boot.failures).get(entry.name, ""),
        previous=before,
    )
    regions = tuple(_region_statuses(observation, before, node.given_up)) if observation else ()
    leased = sum(region.state == "Leased" for region in context.regions)
    if before is not None and context.serves_as_before:
        # Of the former version: what the new one takes is not planned yet, and nothing begun.
        return replace(before, regions_leased=leased, regions=regions)
    derived = derive_phase(context)
    if derived is None:
        return None
    wanted_bytes = 0
    if before is not None and before.generation == entry.generation:
        wanted_bytes = before.wanted_bytes
    steps = before.steps if before else ()
    if result and result.steps:
        steps = tuple(Step(name, seconds) for name, seconds in result.steps)
    backings = {region.backing: None for region in context.regions if region.sound}
    return PoolStatus(
        name=entry.name,
        uid=entry.uid,
        generation=entry.generation,
        phase=derived.phase,
        reason=derived.reason,
        message=_text(_message(derived, context, regions)),
        backing=", ".join(backings) or (result.backing if result else ""),
        wanted_bytes=result.wanted_bytes if result else wanted_bytes,
        ready_bytes=context.sound_bytes,
        progress_percent=_percent(result, derived, node.progress.get(entry.name)),
        regions_leased=leased,
        blocked=result.blocked if result else (),
        handoff_generation=observation.generation if observation else 0,
        ready_since_s=_ready_since(derived, before, now_s),
        steps=steps,
        regions=regions,
    )


def _message(derived: DerivedPhase, context: PoolContext, regions: tuple[RegionStatus, ...]) -> str:
    """Return the message; the previous one where only numbers in it have changed.

    Free memory is part of many messages and always changes: that is no news.
    """
    before = context.previous
    if before is None or (before.phase, before.reason, before.generation) != (
        derived.phase,
        derived.reason,
        context.entry.generation,
    ):
        return derived.message
    unchanged = derived.phase is Phase.READY and before.regions == regions
    same_text = _NUMBER.sub("#", before.message) == _NUMBER.sub("#", derived.message)
    return before.message if unchanged or same_text else derived.message


def _percent(
    result: PoolResult | None, derived: DerivedPhase, progress: Progress | None
) -> int | None:
    if result is None or not result.pending or derived.phase is Phase.FAILED:
        return None
    if progress is None or progress.total_bytes <= 0:
        return 0
    return max(0, min(100, 100 * progress.done_bytes // progress.total_bytes))


def _ready_since(derived: DerivedPhase, before: PoolStatus | None, now_s: float) -> float | None:
    if derived.phase not in _SERVING:
        return None
    if before is not None and before.phase in _SERVING and before.ready_since_s is not None:
        return before.ready_since_s
    return float(int(now_s))


def _region_statuses(
    pool: PoolObservation, before: PoolStatus | None, given_up: Mapping[Key, GivenUp]
) -> Iterator[RegionStatus]:
    if pool.failure:
        # As they were last seen: what they keep, and gave up, would be news again otherwise.
        yield from before.regions if before else ()
        return
    kept = {one.region: one for one in pool.kept}
    # What an earlier agent saw stays.
    earlier = {one.name: one.given_up for one in before.regions} if before else {}
    for region in pool.named_regions:
        found = kept.get(region.name)
        yield RegionStatus(
            name=region.name,
            size_bytes=region.size_bytes,
            backing=region.backing,
            placement=region.placement,
            state=region.state,
            message=_text(region.message),
            kept=_kept_status(found) if found is not None else None,
            given_up=given_up.get((pool.name, region.name), earlier.get(region.name)),
        )


def _kept_status(kept: KeptObservation) -> KeptStatus:
    return KeptStatus(
        name=kept.name,
        since_s=_time(kept.since_s),
        reported_s=_time(kept.reported_s),
        recovered_blocks=kept.recovered_blocks if kept.reported_s else None,
        refused=tuple(_text(name)[:MAX_FIELD] for name in sorted(kept.refused)[:MAX_REFUSED]),
    )


def _time(seconds: float) -> float | None:
    """Return a time of an engine's in whole seconds; None for 0 and for one of no calendar."""
    return float(int(seconds)) if 0 < seconds < _LAST_S else None


def _summary(pools: Iterable[PoolStatus]) -> str:
    parts = [_pool_summary(pool) for pool in pools]
    if len(parts) > _MAX_SUMMARY_POOLS:
        more = len(parts) - _MAX_SUMMARY_POOLS
        parts = [*parts[:_MAX_SUMMARY_POOLS], f"{more} more"]
    return " · ".join(parts) or "nothing is asked for"


def _pool_summary(pool: PoolStatus) -> str:
    if pool.phase is Phase.READY:
        kept = sum(region.size_bytes for region in pool.regions if region.state == "Retained")
        ready = f"{pool.name} {format_bytes(pool.ready_bytes)} {pool.backing} ready"
        return f"{ready}, {format_bytes(kept)} of it kept" if kept else ready
    words = f"{pool.name} {pool.phase.value.lower()}"
    if pool.progress_percent is not None:
        return f"{words} {pool.progress_percent} %"
    return words if pool.reason == pool.phase.value else f"{words} ({pool.reason})"


def _conditions(pools: list[PoolStatus], present: set[str], boot: BootUnit) -> Iterator[Condition]:
    waiting = [f"{p.name} waits for {', '.join(p.blocked)}" for p in pools if p.blocked]
    damaged = [
        f"{pool.name}/{region.name}"
        for pool in pools
        for region in pool.regions
        if region.state == "Damaged"
    ]
    releasing = [pool for pool in pools if pool.name not in present]
    yield _ready([pool for pool in pools if pool.name in present])
    yield _condition(
        "ResizeBlocked", bool(waiting), "Leased" if waiting else "NothingWaits", "; ".join(waiting)
    )
    yield _condition(
        "Damaged", bool(damaged), "RegionsDamaged" if damaged else "AllSound", ", ".join(damaged)
    )
    if releasing:
        reason = next((pool.reason for pool in releasing if pool.reason == "Leased"), "Releasing")
        said = "; ".join(f"{pool.name}: {pool.message}" for pool in releasing)
        yield _condition("Releasing", True, reason, said)
    if boot.failures:
        said = "; ".join(f"{pool}: {why}" for pool, why in boot.failures)
        yield _condition("BootUnit", False, "BootUnitNotInstalled", said)
    elif boot.pools:
        said = f"reserves pages before kubelet at the next boot: {', '.join(boot.pools)}"
        yield _condition("BootUnit", True, "Installed", said)


def _ready(pools: list[PoolStatus]) -> Condition:
    off = [pool for pool in pools if pool.phase not in _SERVING]
    if not off:
        said = f"{len(pools)} of {len(pools)} pools are ready" if pools else "no pool is asked for"
        blocked = [pool.name for pool in pools if pool.phase is Phase.BLOCKED]
        if blocked:
            said = f"{said}; a change of {', '.join(blocked)} waits for leases"
        return _condition("Ready", True, "Ready", said)
    worst = min(off, key=lambda pool: _WORST_FIRST.index(pool.phase))
    common = worst.phase in (Phase.PREPARING, Phase.RESIZING, Phase.DEGRADED)
    reason = worst.phase.value if common else worst.reason
    return _condition("Ready", False, reason, "; ".join(f"{p.name}: {p.message}" for p in off))


def _condition(name: str, holds: bool, reason: str, message: str) -> Condition:
    status: ConditionStatus = "True" if holds else "False"
    return Condition(type=name, status=status, reason=reason, message=_text(message))


def _text(message: str) -> str:
    """Return a message as the API server takes it, whatever an engine wrote into parts of it."""
    return printable(message)[:_MAX_MESSAGE]


# --- a pool's phase


@dataclass(frozen=True, slots=True)
class DerivedPhase:
    """A phase, and why."""

    phase: Phase
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolContext:
    """Everything that is known of one entry."""

    entry: PoolEntry
    observation: PoolObservation | None
    result: PoolResult | None
    """Of this very version of the entry."""
    refused: Failure | None = None
    withheld: bool = False
    boot_failure: str = ""
    """Why the node's boot unit does not do what the pool asks for."""
    previous: PoolStatus | None = None
    """What was reported last, in this boot."""

    @property
    def regions(self) -> tuple[RegionObservation, ...]:
        """Regions that exist, or were published."""
        return self.observation.regions if self.observation else ()

    @property
    def damaged(self) -> tuple[RegionObservation, ...]:
        """Regions that may not be handed out."""
        return tuple(region for region in self.regions if region.state == "Damaged")

    @property
    def sound_bytes(self) -> int:
        """What engines can claim or have claimed."""
        return sum(region.size_bytes for region in self.regions if region.sound)

    @property
    def is_unanswered(self) -> bool:
        """Whether the worker has yet to answer for this version: it may be at other work."""
        return self.result is None and self.refused is None and not self.withheld

    @property
    def is_whole(self) -> bool:
        """Whether every region is sound, and published."""
        pool = self.observation
        return pool is not None and pool.published and all(r.sound for r in pool.regions)

    @property
    def serves_as_before(self) -> bool:
        """Whether a former version of the entry serves while this one is not planned yet."""
        before, entry = self.previous, self.entry
        return (
            before is not None
            and before.phase in _SERVING
            and (before.uid, before.generation) != (entry.uid, entry.generation)
            and not entry.absent
            and self.is_unanswered
            and self.is_whole
            and self.sound_bytes >= before.ready_bytes
        )

    @property
    def was_ready_for_this(self) -> bool:
        """Whether the very same pool was ready before: then what is missing was lost."""
        before, entry = self.previous, self.entry
        return (
            before is not None
            and before.phase in _STEADY
            and (before.uid, before.generation) == (entry.uid, entry.generation)
        )


def derive_phase(context: PoolContext) -> DerivedPhase | None:
    """Return the pool's phase; None for one that is to be absent, and is."""
    if context.entry.absent:
        return _derive_absent(context)
    if context.refused is not None:
        return DerivedPhase(Phase.FAILED, context.refused.reason, context.refused.message)
    if context.observation is not None and context.observation.failure:
        return DerivedPhase(
            Phase.DEGRADED, "CannotLook", f"its folder {context.observation.failure}"
        )
    result = context.result
    failure = (result.error or result.unmet) if result else None
    if failure is not None:
        return _stuck(context, failure)
    if result is None or result.pending:
        return _still_ready(context) or _underway(context)
    return _blocked(context, result) if result.blocked else _settled(context, result)


def _derive_absent(context: PoolContext) -> DerivedPhase | None:
    if context.observation is None and not context.is_unanswered:
        if context.boot_failure:  # or the next boot would reserve pages for no pool
            return DerivedPhase(Phase.RELEASING, "BootUnitNotRemoved", context.boot_failure)
        return None
    if context.withheld:
        return DerivedPhase(
            Phase.RELEASING,
            "Withheld",
            "nothing is released before the API server confirms it: it cannot be reached",
        )
    result = context.result
    if result is not None and result.blocked:
        return DerivedPhase(
            Phase.RELEASING,
            "Leased",
            f"waits for the release of {_holders(context, result.blocked)}; end its users",
        )
    if result is not None and result.error is not None:
        return DerivedPhase(Phase.RELEASING, result.error.reason, result.error.message)
    return DerivedPhase(Phase.RELEASING, "Releasing", "the memory is being given back")


def _still_ready(context: PoolContext) -> DerivedPhase | None:
    """Return the state as before while a restarted agent has yet to plan, if all is there."""
    before = context.previous
    if before is None or not context.was_ready_for_this or before.phase not in _SERVING:
        return None
    if not context.is_whole or context.sound_bytes < before.ready_bytes:
        return None
    return DerivedPhase(before.phase, before.reason, before.message)


def _underway(context: PoolContext) -> DerivedPhase:
    """Work is under way, or not begun."""
    if context.damaged or context.was_ready_for_this:
        lost = _damage(context) or "some of its memory is not published"
        return DerivedPhase(Phase.DEGRADED, "Repairing", f"{lost}; being rebuilt")
    wanted = format_bytes(context.result.wanted_bytes) if context.result else "what is asked for"
    if context.sound_bytes:
        has = format_bytes(context.sound_bytes)
        return DerivedPhase(Phase.RESIZING, "Resizing", f"has {has} ready, on the way to {wanted}")
    if context.result is None:
        return DerivedPhase(Phase.PENDING, "Pending", "waits for its turn")
    kind = f" in {context.result.backing} pages" if context.result.backing else ""
    return DerivedPhase(Phase.PREPARING, "Preparing", f"populating {wanted}{kind}")


def _stuck(context: PoolContext, failure: Failure) -> DerivedPhase:
    if failure.waits:
        return DerivedPhase(_underway(context).phase, failure.reason, failure.message)
    if context.damaged:
        why = f"{_damage(context)}; {failure.message}"
        # Nothing sound to publish only follows from the damage: the damage is the reason.
        reason = "Damaged" if failure.reason == "NothingToPublish" else failure.reason
        return DerivedPhase(Phase.DEGRADED, reason, why)
    return DerivedPhase(Phase.FAILED, failure.reason, failure.message)


def _blocked(context: PoolContext, result: PoolResult) -> DerivedPhase:
    holders = _holders(context, result.blocked)
    if context.damaged:
        return DerivedPhase(
            Phase.DEGRADED,
            "Damaged",
            f"{_damage(context)}; rebuilt after the release of {holders}: end its users",
        )
    serves = context.is_whole and context.sound_bytes > 0
    return DerivedPhase(
        Phase.BLOCKED if serves else Phase.RESIZING,
        "ResizeBlocked",
        f"waits for the release of {holders} to change it: end its users",
    )


def _settled(context: PoolContext, result: PoolResult) -> DerivedPhase:
    """Nothing is left to do: ready, unless the last observation says otherwise."""
    if not context.is_whole:
        return _underway(context)
    if context.sound_bytes < result.planned_bytes:
        # The handoff names what existed when it was written: what was lost before is not in it.
        return DerivedPhase(Phase.DEGRADED, "Repairing", _short(context, result))
    count = len(context.regions)
    regions = "1 region" if count == 1 else f"{count} regions"
    said = f"{format_bytes(context.sound_bytes)} in {regions} of {result.backing} pages"
    return DerivedPhase(Phase.READY, "Ready", "; ".join((said, *result.notes)))


def _short(context: PoolContext, result: PoolResult) -> str:
    there = {region.name for region in context.regions if region.sound}
    lost = ", ".join(name for name in result.regions if name not in there)
    has, planned = format_bytes(context.sound_bytes), format_bytes(result.planned_bytes)
    who = f"{lost} was lost during the work" if lost else "some of its memory was lost"
    return f"{who}: {has} of {planned} are published; being rebuilt"


def _damage(context: PoolContext) -> str:
    return ", ".join(f"{region.name} {region.message}" for region in context.damaged)


def _holders(context: PoolContext, names: tuple[str, ...]) -> str:
    by_name = {region.name: region.holder for region in context.regions}
    return ", ".join(
        f"{name} ({by_name[name]})" if by_name.get(name) else name for name in sorted(names)
    )
