"""From specs and facts to a plan: pool by pool, each leaving the next what it does not take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hostprep.api.pool_spec import PoolSpec, PoolState, reserve_of
from hostprep.backing import Backing
from hostprep.errors import BadInputError
from hostprep.node.facts import Facts, PoolFacts, RegionFacts
from hostprep.node.plan import estimate
from hostprep.node.plan.actions import (
    Action,
    AdoptRegion,
    CreateRegion,
    DropHandoff,
    MakePool,
    MountMemory,
    Plan,
    PoolPlan,
    PublishHandoff,
    RemovePool,
    RemoveRegion,
    ScrubRegion,
    Shortfall,
    Unmet,
    UnmountMemory,
)
from hostprep.node.plan.backings import Choice, choose, pins_with_noswap, takes_large_folios, unmet
from hostprep.node.plan.budget import (
    Budget,
    Candidate,
    PlanContext,
    free_regions,
    return_of,
    return_pages,
)
from hostprep.node.plan.changes import Changes, PlannedRegion, damage_of
from hostprep.node.plan.folders import choose_folders, emptied, folders
from hostprep.node.plan.placement import (
    Layout,
    eligible_nodes,
    lay_out,
    memory_with_cpus,
    right_layouts,
)
from hostprep.units import format_bytes, format_seconds

_PlannedPool = tuple[PoolPlan, tuple[Action, ...], Budget]
"""One pool's outcome, its actions, and the budget that it leaves the next one."""


def plan(
    specs: Sequence[PoolSpec],
    facts: Facts,
    *,
    shortfalls: Sequence[Shortfall] = (),
) -> Plan:
    """Return the actions that lead from the facts to the specs. Opens no file, reads no clock.

    Pools to be released come first, for their memory serves the others; then by priority, then by
    name. Pools without a spec are left alone. `shortfalls` are the backings that apply found short
    in this run: they are passed over. An exception about one pool is its outcome, and nothing else.

    Raises BadInputError when two specs have one name.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise BadInputError("two pools have one name", remedy="give each pool a name of its own")
    budget = Budget.of(facts)
    actions: list[Action] = []
    pools: list[PoolPlan] = []
    for spec in sorted(specs, key=lambda s: (s.state is not PoolState.ABSENT, -s.priority, s.name)):
        found_short = [short for short in shortfalls if short.pool == spec.name]
        try:
            pool, steps, budget = _plan_pool(spec, facts, budget, found_short)
        except Exception as error:  # whatever its facts are: only this pool is not planned
            pool, steps = _as_it_is(spec.name, 0, (), unmet=_cannot_plan(error)), ()
        actions += steps
        pools.append(pool)
    return Plan(actions=tuple(actions), pools=tuple(pools))


def _plan_pool(
    spec: PoolSpec, facts: Facts, budget: Budget, shortfalls: Sequence[Shortfall]
) -> _PlannedPool:
    if spec.state is PoolState.ABSENT:
        return _release(spec, facts, budget)
    return _provide(spec, facts, budget, shortfalls)


def _wanted_bytes(spec: PoolSpec, facts: Facts, layout: Layout | Unmet) -> int:
    """Return the pool's size here; of a sized one without a place for its regions, one region's."""
    if spec.size_bytes is not None:
        return spec.size_bytes
    if spec.region_bytes is not None:
        return spec.region_bytes * (layout.region_count if isinstance(layout, Layout) else 1)
    return _share(spec, memory_with_cpus(facts))


def _share(spec: PoolSpec, total_bytes: int) -> int:
    return int(total_bytes * (spec.percent or 0) / 100)


def _choose_size(context: PlanContext, wanted: int) -> tuple[int, Choice]:
    """Return the pool's size here and the choice of backings for it.

    Earlier versions took a share of the memory of all NUMA nodes, those without CPUs among them.
    A pool that has just that keeps it until the next boot, or until its share changes: an upgrade
    is no reason to take memory away.
    """
    earlier = _share(context.spec, context.facts.memory.total_bytes)
    if context.spec.percent is not None and earlier != wanted and context.regions:
        choice = choose(context, earlier)
        changes = choice.candidate.changes if choice.candidate else None
        if changes and not (changes.new or changes.removed or changes.blocked):
            return earlier, choice
    return wanted, choose(context, wanted)


def _provide(
    spec: PoolSpec, facts: Facts, budget: Budget, shortfalls: Sequence[Shortfall]
) -> _PlannedPool:
    layout = lay_out(spec, facts)
    wanted = _wanted_bytes(spec, facts, layout)
    pool = facts.pool(spec.name)
    if pool is not None and pool.failure:
        return _as_it_is(spec.name, wanted, (), unmet=_cannot_look(pool)), (), budget
    regions = pool.regions if pool else ()
    sound = [region for region in regions if region.finished and damage_of(region) is None]
    if isinstance(layout, Unmet):
        return _as_it_is(spec.name, wanted, sound, unmet=layout), (), budget
    context = PlanContext(
        spec=spec,
        facts=facts,
        pool=pool,
        layout=layout,
        budget=budget.keeping(reserve_of(spec.reserve_bytes, facts.memory.total_bytes)),
        shortfalls=shortfalls,
    )
    wanted, choice = _choose_size(context, wanted)
    problem = _problem(context, wanted, choice)
    candidate, passed_over = choice.candidate, choice.passed_over
    if problem is not None or candidate is None:
        problem = problem or unmet(context, wanted, choice)
        outcome = _as_it_is(
            spec.name, wanted, sound, unmet=problem, passed_over=passed_over, notes=layout.notes
        )
        return outcome, (), budget
    outcome = replace(_summary(context, wanted, candidate), passed_over=passed_over)
    return outcome, _prepare_actions(context, candidate), candidate.budget


def _cannot_look(pool: PoolFacts) -> Unmet:
    """Return why nothing is done to an unobserved pool: a plan would take it for a new one."""
    return Unmet(
        why=f"it cannot be looked at: {pool.failure}",
        possible_bytes=0,
        remedy="see who writes below its folder; other pools are not affected",
        reason="CannotLook",
    )


def _cannot_plan(error: Exception) -> Unmet:
    """Return why nothing is done to a pool whose facts no code expects: a defect of ours."""
    return Unmet(
        why=f"it cannot be planned: {type(error).__name__}: {error}",
        possible_bytes=0,
        remedy="report it with the output of `hostprep status -o json`; other pools go on",
        reason="CannotPlan",
    )


def _problem(context: PlanContext, wanted: int, choice: Choice) -> Unmet | None:
    """Return a problem that no backing solves."""
    makes_regions = choice.candidate is None or bool(choice.candidate.changes.new)
    if makes_regions and not context.facts.kernel.has_populate_write:
        return Unmet(
            why=f"Linux {context.facts.kernel.release} has no MADV_POPULATE_WRITE, which "
            "populating with threads and telling failures needs",
            possible_bytes=0,
            remedy="use Linux 5.14 or newer",
            reason="KernelTooOld",
            never=True,
        )
    if wanted > context.facts.memory.total_bytes:
        failed = choice if choice.candidate is None else Choice(None, (), ("TooLarge",))
        return unmet(context, wanted, failed)
    return None


def _as_it_is(name: str, wanted: int, held: Sequence[RegionFacts], **outcome: Any) -> PoolPlan:
    """Return the outcome for a pool that stays with what it holds."""
    return PoolPlan(
        name=name,
        wanted_bytes=wanted,
        planned_bytes=sum(region.size_bytes for region in held),
        backings=_distinct(region.backing for region in held),
        **outcome,
    )


def _summary(context: PlanContext, wanted: int, candidate: Candidate) -> PoolPlan:
    kept, new = candidate.changes.kept, candidate.changes.new
    held = [(region.size_bytes, region.backing) for region in kept]
    held += [(planned.size_bytes, planned.backing) for planned in new]
    page = context.facts.memory.page_bytes
    planned = sum(size for size, _ in held)
    return PoolPlan(
        name=context.spec.name,
        wanted_bytes=wanted,
        planned_bytes=planned,
        backings=_distinct(it.backing for it in (new or kept)),
        notes=(
            *context.layout.notes,
            *candidate.notes,
            *_notes(context, wanted, planned, candidate),
        ),
        blocked=candidate.changes.blocked,
        page_table_bytes_per_process=sum(estimate.page_table_bytes(s, b, page) for s, b in held),
    )


def _distinct(backings: Iterable[Backing]) -> tuple[Backing, ...]:
    """Return each once, largest pages first."""
    found = set(backings)
    return tuple(backing for backing in Backing if backing in found)


def _notes(context: PlanContext, wanted: int, planned: int, candidate: Candidate) -> Iterable[str]:
    for region in context.regions:
        damage = damage_of(region) if region.finished and region.leased else None
        if damage is not None:
            yield f"{region.name} is damaged ({damage}) and leased: rebuilt after its release"
    if planned < wanted and not candidate.changes.blocked:
        yield (
            f"{format_bytes(wanted - planned)} less than asked for: regions are equal and whole "
            "pages"
        )
    for placement, count in context.layout.counts:
        added = [new.size_bytes for new in candidate.changes.new if new.placement == placement]
        beside = any(kept.placement == placement for kept in candidate.changes.kept)
        if added and beside and context.layout.region_count == len(context.layout.counts):
            yield (
                f"{format_bytes(sum(added))} at {placement} become a region beside the one that is "
                "there, and an engine that takes one region gets one of them; for a single region "
                f"of the whole size `hostprep release {context.spec.name}` first, and prepare again"
            )
        there = sum(region.placement == placement for region in candidate.changes.kept)
        if there > count and not candidate.changes.removed and not candidate.changes.blocked:
            yield f"{there} regions are at {placement} and {count} are asked for: the size is right"


def _release(spec: PoolSpec, facts: Facts, budget: Budget) -> _PlannedPool:
    pool = facts.pool(spec.name)
    nothing = PoolPlan(name=spec.name, wanted_bytes=0, planned_bytes=0)
    if pool is None:
        return nothing, (), budget
    if pool.failure:
        return _as_it_is(spec.name, 0, (), unmet=_cannot_look(pool)), (), budget
    leased = tuple(region.name for region in pool.regions if region.leased)
    if leased and not spec.force:
        held = [region for region in pool.regions if region.finished]
        return _as_it_is(spec.name, 0, held, blocked=leased), (), budget
    return nothing, _release_actions(spec, pool, facts), _freed(spec, facts, pool, budget)


def _freed(spec: PoolSpec, facts: Facts, pool: PoolFacts, budget: Budget) -> Budget:
    """Return the budget after a release; what is leased comes back only when its holder ends."""
    layout = Layout((), eligible_nodes(facts))
    if not layout.nodes:
        return budget
    context = PlanContext(
        spec=spec, facts=facts, pool=pool, layout=layout, budget=budget, shortfalls=()
    )
    free = [region for region in pool.regions if not region.leased]
    budget = free_regions(context, free, budget)
    if any(region.leased for region in pool.regions):
        return budget
    gone = replace(context, pool=replace(pool, regions=()))
    return return_pages(gone, Changes(), budget)[0]


def _prepare_actions(context: PlanContext, candidate: Candidate) -> tuple[Action, ...]:
    """Return the actions that bring the pool to its spec; only adoptions where it is there already.

    Their order keeps every promise of a published handoff.
    """
    spec, pool, changes = context.spec, context.pool, candidate.changes
    mount_dirs = choose_folders(changes, spec.backings, pool)
    empty = emptied(pool, _staying(context, candidate), tuple(mount_dirs.values()))
    actions = _withdraw(context, candidate)
    actions += [_remove(spec, removal.region, removal.why) for removal in changes.removed]
    actions += [UnmountMemory(pool=spec.name, mount_dir=name) for name in empty]
    actions += candidate.returns
    withdrawn = pool is not None and not pool.published
    withdrawn = withdrawn or any(isinstance(a, DropHandoff) for a in actions)
    if changes.new and changes.kept and withdrawn:
        # What stays is sound: it can be claimed while the rest is populated.
        actions.append(PublishHandoff(pool=spec.name))
    if changes.new or _needs_folder(context):
        actions.append(MakePool(pool=spec.name, gid=spec.gid, mode=spec.mode))
    actions += candidate.reserves
    actions += _mounts(context, candidate, mount_dirs)
    actions += [_create(context, planned, mount_dirs[planned.name]) for planned in changes.new]
    actions += [step for region in changes.kept for step in _scrub(context, region)]
    actions += [
        AdoptRegion(pool=spec.name, region=region.name, expected_bytes=region.size_bytes)
        for region in changes.kept
    ]
    published = (pool is not None and pool.published) or not (changes.kept or changes.new)
    published = published and right_layouts(changes.kept, spec.sizing)
    if not published or any(not isinstance(a, AdoptRegion | ScrubRegion) for a in actions):
        actions.append(PublishHandoff(pool=spec.name))
    return tuple(actions)


def _staying(context: PlanContext, candidate: Candidate) -> list[RegionFacts]:
    gone = {removal.region for removal in candidate.changes.removed}
    return [region for region in context.regions if region not in gone]


def _of_other_boot(pool: PoolFacts, facts: Facts) -> bool:
    return pool.boot_id not in (None, facts.kernel.boot_id)


def _needs_folder(context: PlanContext) -> bool:
    pool, spec = context.pool, context.spec
    if pool is None or pool.boot_id != context.facts.kernel.boot_id:
        return True
    return any(
        region.mode != spec.mode or spec.gid not in (None, region.gid)
        for region in pool.regions
        if region.finished
    )


def _withdraw(context: PlanContext, candidate: Candidate) -> list[Action]:
    pool = context.pool
    if pool is None:
        return []
    changing = [r.region.name for r in candidate.changes.removed if r.region.finished]
    if not pool.published:
        changing += [r.name for r in pool.regions if r.finished and r.leased and damage_of(r)]
    if _of_other_boot(pool, context.facts):
        return [_drop_other_boots(pool)]
    if not pool.has_handoff:
        return []
    if changing:
        why = f"{', '.join(sorted(set(changing)))} will not be as promised"
    elif not pool.published:
        # A handoff that stands there promises other files. Were it still there when new files
        # get their names, those would count as replaced by somebody else.
        why = "it does not match the regions"
    else:
        return []
    return [DropHandoff(pool=pool.name, why=why)]


def _drop_other_boots(pool: PoolFacts) -> DropHandoff:
    what = "the handoff" if pool.has_handoff else "what is recorded of the pool"
    return DropHandoff(pool=pool.name, why="it is of another boot", what=what)


def _remove(spec: PoolSpec, region: RegionFacts, why: str) -> RemoveRegion:
    return RemoveRegion(
        pool=spec.name,
        region=region.name,
        mount_dir=region.mount_dir,
        why=why,
        force=spec.force and spec.state is PoolState.ABSENT,
        expected_bytes=region.resident_bytes,
    )


def _mounts(
    context: PlanContext, candidate: Candidate, mount_dirs: Mapping[str, str]
) -> Iterable[MountMemory]:
    for mount_dir in dict.fromkeys(mount_dirs.values()):
        new = [new for new in candidate.changes.new if mount_dirs[new.name] == mount_dir]
        yield _mount(context, candidate, mount_dir, new)


def _mount(
    context: PlanContext, candidate: Candidate, mount_dir: str, new: Sequence[PlannedRegion]
) -> MountMemory:
    kept = [region for region in _staying(context, candidate) if region.finished]
    held = sum(region.size_bytes for region in kept if region.mount_dir == mount_dir)
    backing = new[0].backing
    return MountMemory(
        pool=context.spec.name,
        mount_dir=mount_dir,
        backing=backing,
        size_bytes=held + sum(planned.size_bytes for planned in new),
        noswap=not backing.is_hugetlb and pins_with_noswap(context),
        gid=context.spec.gid,
        large_folios=takes_large_folios(context, backing),
        own_mount=candidate.own_mount,
    )


def _create(context: PlanContext, planned: PlannedRegion, mount_dir: str) -> CreateRegion:
    node = planned.placement.node
    node_ids = context.layout.node_ids if node is None else (node,)
    cpus, threads = estimate.cpus_and_threads(
        planned.placement, context.layout.nodes, context.facts
    )
    threads = min(threads, estimate.pieces(planned.size_bytes, planned.backing))
    there = planned.resumed.resident_bytes if planned.resumed else 0
    missing = max(0, planned.size_bytes - there)
    return CreateRegion(
        pool=context.spec.name,
        region=planned.name,
        mount_dir=mount_dir,
        backing=planned.backing,
        placement=planned.placement,
        size_bytes=planned.size_bytes,
        node_ids=node_ids,
        cpus=cpus,
        threads=threads,
        large_folios=takes_large_folios(context, planned.backing),
        gid=context.spec.gid,
        mode=context.spec.mode,
        expected_bytes=missing,
        expected_s=estimate.populate_s(missing, planned.backing, threads, len(node_ids)),
    )


def _scrub(context: PlanContext, region: RegionFacts) -> tuple[Action, ...]:
    if region.clean or region.leased or not region.scrubbable:
        return ()
    why = ""
    if region.retained:
        most_s = context.spec.max_kept_s
        if most_s is None or region.kept_s is None or region.kept_s < most_s:
            return ()
        why = f"kept for {format_seconds(region.kept_s)}, {format_seconds(most_s)} at most"
    nodes = context.layout.nodes
    _, threads = estimate.cpus_and_threads(region.placement, nodes, context.facts)
    node_count = len(nodes) if region.placement.node is None else 1
    scrub = ScrubRegion(
        pool=context.spec.name,
        region=region.name,
        why=why,
        threads=threads,
        expected_bytes=region.size_bytes,
        expected_s=estimate.scrub_s(region.size_bytes, region.backing, threads, node_count),
    )
    return (scrub,)


def _release_actions(spec: PoolSpec, pool: PoolFacts, facts: Facts) -> tuple[Action, ...]:
    """Return the actions that give everything of a pool back, the folder last."""
    actions: list[Action] = []
    if _of_other_boot(pool, facts):
        actions.append(_drop_other_boots(pool))
    elif pool.has_handoff:
        actions.append(DropHandoff(pool=spec.name, why="the pool is released"))
    actions += [_remove(spec, region, "the pool is released") for region in pool.regions]
    actions += [UnmountMemory(pool=spec.name, mount_dir=name) for name in folders(pool)]
    if pool.boot_id == facts.kernel.boot_id:
        actions += [return_of(spec.name, entry) for entry in pool.returnable if entry.pages > 0]
    return (*actions, RemovePool(pool=spec.name))
