"""From specs and facts to a plan: pool by pool, each leaving the next what it does not take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.api.reserve import reserve_of
from hostprep.backing import Backing
from hostprep.errors import BadInputError
from hostprep.node.facts import Facts, PoolFacts
from hostprep.node.plan.actions import Action, Plan, PoolPlan, Shortfall, Unmet
from hostprep.node.plan.backings import Choice, choose, unmet
from hostprep.node.plan.capacity import Budget
from hostprep.node.plan.changes import Changes, damage_of
from hostprep.node.plan.estimate import page_table_bytes
from hostprep.node.plan.freeing import free_regions, return_pages
from hostprep.node.plan.placement import Layout, eligible_nodes, lay_out
from hostprep.node.plan.question import Offer, Question
from hostprep.node.plan.steps import present_steps, release_steps
from hostprep.units import format_bytes

__all__ = ["plan"]


@dataclass(frozen=True, slots=True)
class _Outcome:
    pool: PoolPlan
    budget: Budget
    actions: tuple[Action, ...] = ()


def plan(
    specs: Sequence[PoolSpec],
    facts: Facts,
    *,
    shortfalls: Sequence[Shortfall] = (),
) -> Plan:
    """Return what leads from the facts to the specs. Opens no file, reads no clock.

    Pools to be released come first, for their memory serves the others; then higher priorities
    first, then by name. Pools of the facts that no spec names are left alone. `shortfalls`: what
    apply tried in this run and found short; it is passed over.

    Raises BadInputError when two specs have one name.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise BadInputError("two pools have one name", remedy="give each pool a name of its own")
    budget = Budget.of(facts)
    actions: list[Action] = []
    pools: list[PoolPlan] = []
    for spec in sorted(specs, key=_order):
        if spec.state is PoolState.ABSENT:
            outcome = _release(spec, facts, budget)
        else:
            found_short = [short for short in shortfalls if short.pool == spec.name]
            outcome = _provide(spec, facts, budget, found_short)
        actions += outcome.actions
        pools.append(outcome.pool)
        budget = outcome.budget
    return Plan(actions=tuple(actions), pools=tuple(pools))


def _order(spec: PoolSpec) -> tuple[bool, int, str]:
    return spec.state is not PoolState.ABSENT, -spec.priority, spec.name


def _wanted_bytes(spec: PoolSpec, facts: Facts, layout: Layout | Unmet) -> int:
    """Return the pool's size here; of a sized one without a place for its regions, one region's."""
    if spec.size_bytes is not None:
        return spec.size_bytes
    if spec.region_bytes is not None:
        return spec.region_bytes * (layout.region_count if isinstance(layout, Layout) else 1)
    return int(facts.memory.total_bytes * (spec.percent or 0) / 100)


def _provide(
    spec: PoolSpec, facts: Facts, budget: Budget, shortfalls: Sequence[Shortfall]
) -> _Outcome:
    layout = lay_out(spec, facts)
    wanted = _wanted_bytes(spec, facts, layout)
    pool = facts.pool(spec.name)
    if isinstance(layout, Unmet):
        return _Outcome(_unmet_pool(spec.name, wanted, pool, layout), budget)
    question = Question(
        spec=spec,
        facts=facts,
        pool=pool,
        layout=layout,
        budget=budget.keeping(reserve_of(spec.reserve_bytes, facts.memory.total_bytes)),
        shortfalls=shortfalls,
    )
    choice = choose(question, wanted)
    problem = _problem(question, wanted, choice)
    if problem is not None or choice.offer is None:
        problem = problem or unmet(question, wanted, choice)
        outcome = _unmet_pool(spec.name, wanted, pool, problem)
        notes = layout.notes
        return _Outcome(replace(outcome, passed_over=choice.passed_over, notes=notes), budget)
    summary = _summary(question, wanted, choice.offer)
    summary = replace(summary, passed_over=choice.passed_over)
    return _Outcome(summary, choice.offer.budget, present_steps(question, choice.offer))


def _problem(question: Question, wanted: int, choice: Choice) -> Unmet | None:
    """Return what stands in the way whatever the backing."""
    makes_regions = choice.offer is None or bool(choice.offer.changes.new)
    if makes_regions and not question.facts.kernel.has_populate_write:
        return Unmet(
            why=f"Linux {question.facts.kernel.release} has no MADV_POPULATE_WRITE, which "
            "populating with threads and telling failures needs",
            possible_bytes=0,
            remedy="use Linux 5.14 or newer",
            reason="KernelTooOld",
            never=True,
        )
    if wanted > question.facts.memory.total_bytes:
        failed = choice if choice.offer is None else Choice(None, (), ("TooLarge",))
        return unmet(question, wanted, failed)
    return None


def _unmet_pool(name: str, wanted: int, pool: PoolFacts | None, problem: Unmet) -> PoolPlan:
    regions = pool.regions if pool else ()
    held = [region for region in regions if region.finished and damage_of(region) is None]
    return PoolPlan(
        name=name,
        wanted_bytes=wanted,
        planned_bytes=sum(region.size_bytes for region in held),
        backings=_distinct(region.backing for region in held),
        unmet=problem,
    )


def _summary(question: Question, wanted: int, offer: Offer) -> PoolPlan:
    kept, new = offer.changes.kept, offer.changes.new
    held = [(region.size_bytes, region.backing) for region in kept]
    held += [(slot.size_bytes, slot.backing) for slot in new]
    page = question.facts.memory.page_bytes
    planned = sum(size for size, _ in held)
    return PoolPlan(
        name=question.spec.name,
        wanted_bytes=wanted,
        planned_bytes=planned,
        backings=_distinct(it.backing for it in (new or kept)),
        notes=(*question.layout.notes, *offer.notes, *_notes(question, wanted, planned, offer)),
        blocked=offer.changes.blocked,
        page_table_bytes_per_process=sum(page_table_bytes(s, b, page) for s, b in held),
    )


def _distinct(backings: Iterable[Backing]) -> tuple[Backing, ...]:
    """Return each once, largest pages first."""
    return tuple(sorted(set(backings), key=lambda backing: -backing.page_bytes))


def _notes(question: Question, wanted: int, planned: int, offer: Offer) -> Iterable[str]:
    for region in question.regions:
        damage = damage_of(region) if region.finished and region.leased else None
        if damage is not None:
            yield f"{region.name} is damaged ({damage}) and leased: made anew after its release"
    if planned < wanted and not offer.changes.blocked:
        yield (
            f"{format_bytes(wanted - planned)} less than asked for: regions are equal and whole "
            "pages"
        )
    for placement, count in question.layout.counts:
        there = sum(region.placement == placement for region in offer.changes.kept)
        if there > count and not offer.changes.removed and not offer.changes.blocked:
            yield f"{there} regions are at {placement} and {count} are asked for: the size is right"


def _release(spec: PoolSpec, facts: Facts, budget: Budget) -> _Outcome:
    pool = facts.pool(spec.name)
    nothing = PoolPlan(name=spec.name, wanted_bytes=0, planned_bytes=0)
    if pool is None:
        return _Outcome(nothing, budget)
    leased = tuple(region.name for region in pool.regions if region.leased)
    if leased and not spec.force:
        held = [region for region in pool.regions if region.finished]
        kept = replace(
            nothing,
            planned_bytes=sum(region.size_bytes for region in held),
            backings=_distinct(region.backing for region in held),
            blocked=leased,
        )
        return _Outcome(kept, budget)
    return _Outcome(nothing, _freed(spec, facts, pool, budget), release_steps(spec, pool, facts))


def _freed(spec: PoolSpec, facts: Facts, pool: PoolFacts, budget: Budget) -> Budget:
    """Return the budget after a release; what is leased comes back only when its holder ends."""
    layout = Layout((), eligible_nodes(facts))
    if not layout.nodes:
        return budget
    question = Question(
        spec=spec, facts=facts, pool=pool, layout=layout, budget=budget, shortfalls=()
    )
    free = [region for region in pool.regions if not region.leased]
    budget = free_regions(question, free, budget)
    if any(region.leased for region in pool.regions):
        return budget
    gone = replace(question, pool=replace(pool, regions=()))
    return return_pages(gone, Changes(), budget)[0]
