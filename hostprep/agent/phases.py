"""Where one pool stands: its phase, with a reason for machines and the next step for people."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.agent.messages import Failure, Outcome, PoolLook, RegionLook
from hostprep.api.node_resource import Phase, PoolEntry, PoolStatus
from hostprep.units import format_bytes

__all__ = ["Case", "Verdict", "judge"]

_STEADY = (Phase.READY, Phase.DEGRADED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A phase, and why."""

    phase: Phase
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything that is known of one entry."""

    entry: PoolEntry
    look: PoolLook | None
    outcome: Outcome | None
    """Of this very wording of the entry."""
    refused: Failure | None = None
    withheld: bool = False
    boot_failure: str = ""
    """Why the node's boot unit does not do for the pool what it should."""
    previous: PoolStatus | None = None
    """What was said last, in this boot."""

    @property
    def regions(self) -> tuple[RegionLook, ...]:
        """Regions that are there, or were promised."""
        return self.look.regions if self.look else ()

    @property
    def damaged(self) -> tuple[RegionLook, ...]:
        """Regions that may not be handed out."""
        return tuple(region for region in self.regions if region.state == "Damaged")

    @property
    def sound_bytes(self) -> int:
        """What engines can claim or have."""
        return sum(region.size_bytes for region in self.regions if region.sound)

    @property
    def is_unanswered(self) -> bool:
        """Whether the worker has yet to answer this wording: it may still be at other work."""
        return self.outcome is None and self.refused is None and not self.withheld

    @property
    def was_ready_for_this(self) -> bool:
        """Whether the very same was there before: then what is missing was lost."""
        before = self.previous
        same = before is not None and (before.uid, before.generation) == (
            self.entry.uid,
            self.entry.generation,
        )
        return same and before is not None and before.phase in _STEADY


def judge(case: Case) -> Verdict | None:
    """Return where the pool stands; None for one that was asked to be absent, and is."""
    return _judge_absent(case) if case.entry.absent else _judge_present(case)


def _judge_present(case: Case) -> Verdict:
    if case.refused is not None:
        return Verdict(Phase.FAILED, case.refused.reason, case.refused.message)
    if case.look is not None and case.look.failure:
        return Verdict(Phase.DEGRADED, "CannotLook", f"its folder {case.look.failure}")
    outcome = case.outcome
    failure = (outcome.error or outcome.unmet) if outcome else None
    if failure is not None:
        return _stuck(case, failure)
    if outcome is None or outcome.pending:
        return _still_ready(case) or _underway(case)
    return _blocked(case, outcome) if outcome.blocked else _settled(case, outcome)


def _judge_absent(case: Case) -> Verdict | None:
    if case.look is None and not case.is_unanswered:
        if case.boot_failure:  # or the next boot would reserve pages for nobody
            return Verdict(Phase.RELEASING, "BootUnitNotRemoved", case.boot_failure)
        return None
    if case.withheld:
        return Verdict(
            Phase.RELEASING,
            "Withheld",
            "nothing is released before the API server confirms it: it cannot be reached",
        )
    outcome = case.outcome
    if outcome is not None and outcome.blocked:
        return Verdict(
            Phase.RELEASING,
            "Leased",
            f"waits for the release of {_holders(case, outcome.blocked)}; end its users",
        )
    if outcome is not None and outcome.error is not None:
        return Verdict(Phase.RELEASING, outcome.error.reason, outcome.error.message)
    return Verdict(Phase.RELEASING, "Releasing", "the memory is being given back")


def _still_ready(case: Case) -> Verdict | None:
    """Ready as before while an agent that started anew has yet to plan, if all of it is there."""
    before, pool = case.previous, case.look
    if before is None or not case.was_ready_for_this or before.phase is not Phase.READY:
        return None
    if pool is None or not pool.published or not all(region.sound for region in pool.regions):
        return None
    if case.sound_bytes < before.ready_bytes:
        return None
    return Verdict(Phase.READY, before.reason, before.message)


def _underway(case: Case) -> Verdict:
    """Work is under way, or not begun."""
    if case.damaged or case.was_ready_for_this:
        lost = _damage(case) or "some of its memory is not published"
        return Verdict(Phase.DEGRADED, "Repairing", f"{lost}; being made anew")
    wanted = format_bytes(case.outcome.wanted_bytes) if case.outcome else "what is asked for"
    if case.sound_bytes:
        has = format_bytes(case.sound_bytes)
        return Verdict(Phase.RESIZING, "Resizing", f"has {has} ready, on the way to {wanted}")
    if case.outcome is None:
        return Verdict(Phase.PENDING, "Pending", "waits for its turn")
    kind = f" in {case.outcome.backing} pages" if case.outcome.backing else ""
    return Verdict(Phase.PREPARING, "Preparing", f"populating {wanted}{kind}")


def _stuck(case: Case, failure: Failure) -> Verdict:
    if failure.waits:
        return Verdict(_underway(case).phase, failure.reason, failure.message)
    if case.damaged:
        why = f"{_damage(case)}; {failure.message}"
        return Verdict(Phase.DEGRADED, _damage_reason(failure), why)
    return Verdict(Phase.FAILED, failure.reason, failure.message)


def _damage_reason(failure: Failure) -> str:
    """Name the damage where the failure is but its consequence: nothing sound to publish."""
    return "Damaged" if failure.reason == "NothingToPublish" else failure.reason


def _blocked(case: Case, outcome: Outcome) -> Verdict:
    holders = _holders(case, outcome.blocked)
    if case.damaged:
        return Verdict(
            Phase.DEGRADED,
            "Damaged",
            f"{_damage(case)}; made anew after the release of {holders}: end its users",
        )
    return Verdict(
        Phase.RESIZING,
        "ResizeBlocked",
        f"waits for the release of {holders} to change it: end its users",
    )


def _settled(case: Case, outcome: Outcome) -> Verdict:
    """Nothing is left to do: ready, unless the last look says otherwise."""
    pool = case.look
    if pool is None or not pool.published or not all(region.sound for region in pool.regions):
        return _underway(case)
    if case.sound_bytes < outcome.planned_bytes:
        # The handoff names what was there at its writing: what was lost before is not in it.
        return Verdict(Phase.DEGRADED, "Repairing", _short(case, outcome))
    count = len(pool.regions)
    regions = "1 region" if count == 1 else f"{count} regions"
    said = f"{format_bytes(case.sound_bytes)} in {regions} of {outcome.backing} pages"
    return Verdict(Phase.READY, "Ready", "; ".join((said, *outcome.notes)))


def _short(case: Case, outcome: Outcome) -> str:
    there = {region.name for region in case.regions if region.sound}
    lost = ", ".join(name for name in outcome.regions if name not in there)
    has, planned = format_bytes(case.sound_bytes), format_bytes(outcome.planned_bytes)
    who = f"{lost} was lost during the work" if lost else "some of its memory was lost"
    return f"{who}: {has} of {planned} are published; being made anew"


def _damage(case: Case) -> str:
    return ", ".join(f"{region.name} {region.message}" for region in case.damaged)


def _holders(case: Case, names: tuple[str, ...]) -> str:
    by_name = {region.name: region.holder for region in case.regions}
    return ", ".join(
        f"{name} ({by_name[name]})" if by_name.get(name) else name for name in sorted(names)
    )
