"""Many pools brought to what is asked for, one after the other: none holds up the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.backing import Backing
from hostprep.errors import FailedError, HostprepError
from hostprep.node.apply.exclusive import exclusive
from hostprep.node.apply.meter import Meter, Tell
from hostprep.node.apply.service import Node, unmet_error
from hostprep.node.facts import Facts
from hostprep.node.plan import plan
from hostprep.node.plan.actions import (
    Action,
    AdoptRegion,
    CreateRegion,
    Plan,
    PoolPlan,
    ScrubRegion,
    Shortfall,
)

__all__ = ["PoolOutcome", "Reconciler", "work_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOutcome:
    """What became of one pool: its plan, and what stood in the way of carrying it out."""

    plan: PoolPlan
    error: HostprepError | None = None
    steps: tuple[tuple[str, float], ...] = ()
    """Seconds by kind of step; empty where nothing was changed."""
    regions: tuple[str, ...] = ()
    """Names that the plan kept or made; known where something was changed."""
    populated: tuple[tuple[Backing, int], ...] = ()
    """Bytes made resident, by backing; those of a failed attempt too."""


def work_of(wanted: Plan, pool: str) -> tuple[Action, ...]:
    """Return what a plan does for a pool; nothing where all is right already."""
    actions = tuple(action for action in wanted.actions if action.pool == pool)
    return () if all(isinstance(action, AdoptRegion) for action in actions) else actions


def _regions_of(actions: Sequence[Action]) -> tuple[str, ...]:
    held = (action for action in actions if isinstance(action, AdoptRegion | CreateRegion))
    return tuple(sorted({action.region for action in held}))


@dataclass(kw_only=True)
class Reconciler:
    """Carries out what the specs ask for, pool by pool, planning anew for each.

    All specs are planned together, since they share memory by priority; what cannot be met or
    fails is said of its pool alone. Absent pools are released, unless leased.
    """

    node: Node
    specs: Sequence[PoolSpec]
    leave_dirty: Collection[str] = ()
    """Pools whose regions the next claim scrubs: none is scrubbed here."""
    held: Collection[str] = ()
    """Pools that are planned for and left as they are."""
    stop: threading.Event = field(default_factory=threading.Event)
    tell: Tell = lambda _pool, _done, _total: None
    on_pool: Callable[[PoolOutcome], None] = lambda _: None
    wait_timeout_s: float = 2.0
    thorough: bool = False
    """Also look after pools that are right already: clear away what killed runs left in them."""
    scrubbing: set[tuple[str, str]] = field(default_factory=set)
    """(pool, region) being zeroed at this moment, and locked for that by this process."""
    _shortfalls: list[Shortfall] = field(default_factory=list)

    def plan(self, facts: Facts) -> Plan:
        """Return the plan for all pools, less scrubbing what shall stay dirty."""
        wanted = plan(self.specs, facts, shortfalls=self._shortfalls)
        return replace(
            wanted,
            actions=tuple(
                action
                for action in wanted.actions
                if not (isinstance(action, ScrubRegion) and action.pool in self.leave_dirty)
            ),
        )

    def run(self) -> None:
        """Bring every pool that is not held to what is asked for, telling each one's outcome.

        Raises BusyError while another hostprep is at work below the root, Stopped, and
        HostprepError for what concerns all pools.
        """
        with exclusive(self.node.root, wait_timeout_s=self.wait_timeout_s, on_wait=lambda _: None):
            self.node.settle()
            if any(spec.state is PoolState.PRESENT for spec in self.specs):
                # Before the pools: engines of the first one do not wait for the last one.
                self.node.furnish()
            left = [spec.name for spec in self.specs if spec.name not in self.held]
            while left:
                wanted = self.plan(self.node.facts())
                name = next(pool.name for pool in wanted.pools if pool.name in left)
                left.remove(name)
                self.on_pool(self._one(name))
            self.node.clear_if_empty()

    def _one(self, name: str) -> PoolOutcome:
        """Carry out one pool's part, planning again where a backing turns out short."""
        meter = Meter(name, self.tell, self.scrubbing)
        while True:
            facts = self.node.facts()
            wanted = self.plan(facts)
            pool = next(pool for pool in wanted.pools if pool.name == name)
            actions = work_of(wanted, name)
            if not actions and self.thorough:
                actions = tuple(action for action in wanted.actions if action.pool == name)
            if not actions:
                return PoolOutcome(plan=pool, error=self._short(pool), populated=meter.populated)
            meter.expect(actions)
            try:
                part = Plan(actions=actions, pools=(pool,))
                short = self.node.carry_out(part, facts, self.specs, progress=meter, stop=self.stop)
            except HostprepError as error:
                return PoolOutcome(plan=pool, error=error, populated=meter.populated)
            except OSError as error:
                failed = FailedError(f"pool {name}: {error}", reason="SystemError")
                return PoolOutcome(plan=pool, error=failed, populated=meter.populated)
            if short is None:
                return PoolOutcome(
                    plan=pool,
                    steps=meter.steps,
                    regions=_regions_of(actions),
                    populated=meter.populated,
                )
            self._shortfalls.append(short)

    def _short(self, pool: PoolPlan) -> HostprepError | None:
        """Return the failure of a pool that was tried and ran short of everything it may have.

        Only trying shows it: the next plan takes the same pages for free again.
        """
        was_tried = any(short.pool == pool.name for short in self._shortfalls)
        return unmet_error(pool, pool.unmet) if was_tried and pool.unmet else None
