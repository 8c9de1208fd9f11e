"""What holds of every plan, on machines and pools made up by hypothesis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.api.pool_spec import PoolSpec, PoolState, RegionLayout
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.facts import CgroupFacts, Facts, HugePages, LedgerEntry, NumaNode, RegionFacts
from hostprep.node.plan import plan
from hostprep.node.plan.actions import (
    AdoptRegion,
    CreateRegion,
    Plan,
    RemoveRegion,
    ReserveHugePages,
    ReturnHugePages,
    UnmountMemory,
)
from tests.support.node_facts import machine, numa_node, pool, region, reserved_bytes
from tests.unit.node.plan.node_after import carried_out

pytestmark = pytest.mark.unit

TWO_MI = 2 * MIB


@st.composite
def nodes(draw: st.DrawFn, node_id: int) -> NumaNode:
    size = draw(st.sampled_from([64, 32, 8])) * GIB
    free = size // 256 * draw(st.sampled_from([250, 190, 128, 33, 0]))
    free -= draw(st.integers(0, 99)) * MIB if free else 0
    pages = draw(st.integers(0, 4096))
    unused = draw(st.integers(0, pages))
    return numa_node(
        node_id,
        size=size,
        free=free,
        contiguous=draw(st.sampled_from([free, free, free // 2, free // 4, 0])),
        cpus=draw(st.sampled_from([None] * 7 + [()])),
        huge=(HugePages(TWO_MI, pages, unused, draw(st.integers(0, pages - unused))),),
        movable=draw(st.sampled_from([0] * 11 + [size // 2])),
        cma=draw(st.sampled_from([0, 0, 64 * MIB])) if free > GIB else 0,
    )


@st.composite
def machines(draw: st.DrawFn) -> Facts:
    found = [draw(nodes(node_id)) for node_id in range(draw(st.integers(1, 4)))]
    unused = sum(node.huge(TWO_MI).free for node in found)
    free = sum(node.free_bytes for node in found)
    writable = draw(st.booleans())
    return machine(
        *found,
        reserved={TWO_MI: draw(st.integers(0, unused))},
        available=draw(st.sampled_from([free, free // 2])),
        euid=draw(st.sampled_from([0] * 7 + [1000])),
        can_mount=draw(st.sampled_from([True] * 7 + [False])),
        swap=draw(st.sampled_from([0, 0, GIB])),
        kernel=draw(st.sampled_from([(6, 18), (6, 1)])),
        gpus=draw(
            st.lists(
                st.sampled_from([0, 1, None, 7]),
                min_size=draw(st.sampled_from([1, 1, 1, 0])),
                max_size=4,
            )
        ),
        cgroup=CgroupFacts(2, "/x", None if writable else 16 * GIB, writable=writable),
        hugepage_sizes=draw(st.sampled_from([(TWO_MI,), (TWO_MI, GIB)])),
    )


def sizes() -> st.SearchStrategy[int]:
    whole = st.sampled_from([8 * GIB, 3 * GIB, 16 * GIB, 700 * MIB, 40 * GIB])
    return st.one_of(whole, whole.map(lambda size: size + 4097), st.integers(1, 48 * GIB))


@st.composite
def specs(draw: st.DrawFn, name: str = "kv") -> PoolSpec:
    layout = draw(st.sampled_from(RegionLayout))
    sized = draw(st.booleans())
    backings = draw(st.lists(st.sampled_from(Backing), min_size=1, unique=True))
    return PoolSpec(
        name=name,
        size_bytes=draw(sizes()) if sized else None,
        percent=None if sized else draw(st.sampled_from([10, 33.3, 50, 0.001, 90, 100])),
        priority=draw(st.integers(-2, 2)),
        backings=tuple(backings),
        layout=layout,
        region_count=draw(st.integers(1, 9)) if layout is RegionLayout.COUNT else None,
        reserve_bytes=draw(st.sampled_from([0, 0, GIB, 20 * GIB])),
    )


def pairs() -> st.SearchStrategy[list[PoolSpec]]:
    return st.tuples(specs("kv"), specs("spare")).map(list)


def created(made: Plan, name: str) -> list[CreateRegion]:
    return [a for a in made.actions if isinstance(a, CreateRegion) and a.pool == name]


@given(facts=machines(), wanted=pairs())
def test_no_plan_takes_more_than_a_node_has(facts: Facts, wanted: list[PoolSpec]) -> None:
    # carried_out asserts that no node and no huge-page pool goes below zero.
    after = carried_out(facts, plan(wanted, facts))
    for node in after.nodes:
        assert node.free_bytes >= 0


@given(facts=machines(), wanted=pairs())
def test_the_reserve_of_a_pool_that_is_planned_stays_free(
    facts: Facts, wanted: list[PoolSpec]
) -> None:
    made = plan(wanted, facts)
    after = carried_out(facts, made)
    if after.memory.available_bytes == facts.memory.available_bytes:
        return
    grown = {p.name for p in made.pools if p.unmet is None and created(made, p.name)}
    ordinary = {spec.name: spec.reserve_bytes or 0 for spec in wanted if spec.name in grown}
    taking = [
        a.pool
        for a in made.actions
        if isinstance(a, ReserveHugePages)
        or (isinstance(a, CreateRegion) and not a.backing.is_hugetlb)
    ]
    for name in taking:
        assert after.memory.available_bytes >= ordinary[name]


@given(facts=machines(), wanted=pairs())
def test_pages_that_others_reserved_are_never_taken(facts: Facts, wanted: list[PoolSpec]) -> None:
    after = carried_out(facts, plan(wanted, facts)).huge(TWO_MI)
    assert after.free >= facts.huge(TWO_MI).reserved


@given(facts=machines(), wanted=pairs())
def test_a_fulfilled_plan_leads_to_one_that_changes_nothing(
    facts: Facts, wanted: list[PoolSpec]
) -> None:
    first = plan(wanted, facts)
    met = [s for s, p in zip(_by_plan(wanted, first), first.pools, strict=True) if not p.unmet]
    again = plan(met, carried_out(facts, first))
    assert all(isinstance(action, AdoptRegion) for action in again.actions)
    assert [p.unmet for p in again.pools] == [None] * len(met)
    planned = {p.name: p.planned_bytes for p in first.pools}
    assert {p.name: p.planned_bytes for p in again.pools} == {s.name: planned[s.name] for s in met}


def _by_plan(wanted: list[PoolSpec], made: Plan) -> list[PoolSpec]:
    return [next(s for s in wanted if s.name == p.name) for p in made.pools]


@given(facts=machines(), wanted=pairs())
def test_the_regions_sum_up_to_the_planned_bytes(facts: Facts, wanted: list[PoolSpec]) -> None:
    made = plan(wanted, facts)
    for outcome in made.pools:
        regions = created(made, outcome.name)
        if outcome.unmet is None:
            assert sum(a.size_bytes for a in regions) == outcome.planned_bytes
            assert outcome.planned_bytes <= outcome.wanted_bytes
        else:
            assert not [a for a in made.actions if a.pool == outcome.name]


@given(facts=machines(), wanted=specs())
def test_preferred_backings_are_tried_in_order_and_each_refusal_is_told(
    facts: Facts, wanted: PoolSpec
) -> None:
    made = plan([wanted], facts)
    outcome = made.pools[0]
    told = [passed.backing for passed in outcome.passed_over]
    for action in created(made, wanted.name):
        rank = wanted.backings.index(action.backing)
        assert set(wanted.backings[:rank]) <= set(told)
    if outcome.unmet is None:
        last = max(wanted.backings.index(backing) for backing in outcome.backings)
        assert set(told) <= set(wanted.backings[: last + 1])
    assert all(passed.why and passed.remedy for passed in outcome.passed_over)


@given(facts=machines(), wanted=specs())
def test_no_placement_has_less_than_one_backing_for_all_would_give_it(
    facts: Facts, wanted: PoolSpec
) -> None:
    """Falling back by node is never worse than falling back as one."""
    made = plan([wanted], facts)
    if made.pools[0].unmet is not None:
        return
    ranks = [wanted.backings.index(a.backing) for a in created(made, wanted.name)]
    for rank, backing in enumerate(wanted.backings):
        alone = plan([replace(wanted, backings=(backing,))], facts).pools[0]
        if alone.unmet is None:
            assert max(ranks, default=0) <= rank
            return


@given(facts=machines(), wanted=specs())
def test_what_an_unmet_plan_says_is_possible_is_possible(facts: Facts, wanted: PoolSpec) -> None:
    unmet = plan([wanted], facts).pools[0].unmet
    if unmet is None or unmet.possible_bytes == 0:
        return
    smaller = PoolSpec(
        name=wanted.name,
        size_bytes=unmet.possible_bytes,
        backings=wanted.backings,
        layout=wanted.layout,
        region_count=wanted.region_count,
        reserve_bytes=wanted.reserve_bytes,
    )
    assert unmet.possible_bytes < plan([wanted], facts).pools[0].wanted_bytes
    assert plan([smaller], facts).pools[0].unmet is None


@st.composite
def held_regions(draw: st.DrawFn) -> list[RegionFacts]:
    names = ["node0-0", "node0-1", "node0-2", "node1-0", "interleave-0"]
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=4))
    found = []
    for name in chosen:
        backing = draw(st.sampled_from([Backing.HUGETLB_2MI, Backing.BASE]))
        finished = draw(st.sampled_from([True] * 7 + [False]))
        size = draw(st.integers(1, 4)) * GIB
        found.append(
            region(
                name,
                size,
                backing,
                leased=finished and draw(st.booleans()),
                clean=draw(st.booleans()),
                finished=finished,
                damage=draw(st.sampled_from([None, None, None, "poisoned"])) if finished else None,
                resident=size if finished else size // 2,
                mount_dir=draw(st.sampled_from(["mem", "mem-hugetlb2mi"]))
                if backing is Backing.HUGETLB_2MI
                else "mem-base",
            )
        )
    return found


@st.composite
def machines_with_a_pool(draw: st.DrawFn) -> Facts:
    regions = draw(held_regions())
    pages = 2048
    limits = {}
    for folder in {r.mount_dir for r in regions if r.backing is Backing.HUGETLB_2MI}:
        taken = reserved_bytes(r for r in regions if r.mount_dir == folder)
        limits[folder] = taken + draw(st.sampled_from([0, GIB, 4 * GIB]))
    there = pool(
        *regions,
        published=draw(st.booleans()),
        taken=[LedgerEntry(0, TWO_MI, pages)] if draw(st.booleans()) else [],
        boot_id=draw(st.sampled_from([None, "other"])) if not draw(st.integers(0, 5)) else BOOT_ID,
        limits=draw(st.sampled_from([limits, limits, {}])),
    )
    # In use are at least as many as all regions together may hold: 14 GiB on one node.
    found = [
        numa_node(node_id, free=32 * GIB, huge=(HugePages(TWO_MI, 5 * pages, pages, 0),))
        for node_id in range(2)
    ]
    return machine(
        *found, gpus=[0, 1], pools=[there], reserved={TWO_MI: draw(st.integers(0, pages))}
    )


BOOT_ID = machine().kernel.boot_id


@given(facts=machines_with_a_pool(), wanted=specs())
def test_leased_regions_are_never_removed(facts: Facts, wanted: PoolSpec) -> None:
    leased = {r.name for p in facts.pools for r in p.regions if r.leased}
    made = plan([wanted], facts)
    removed = {a.region for a in made.actions if isinstance(a, RemoveRegion)}
    assert not removed & leased


@given(facts=machines_with_a_pool())
def test_a_pool_that_is_leased_is_not_released(facts: Facts) -> None:
    made = plan([PoolSpec(name="kv", state=PoolState.ABSENT)], facts)
    leased = {r.name for p in facts.pools for r in p.regions if r.leased}
    assert bool(made.actions) == (not leased)
    assert set(made.pools[0].blocked) == leased


@given(facts=machines_with_a_pool(), wanted=specs())
def test_no_more_pages_are_returned_than_were_taken(facts: Facts, wanted: PoolSpec) -> None:
    there = facts.pools[0]
    taken = sum(e.pages for e in there.taken) if there.boot_id == BOOT_ID else 0
    made = plan([wanted], facts)
    back = sum(a.pages for a in made.actions if isinstance(a, ReturnHugePages))
    assert back <= taken
    after = carried_out(facts, made).huge(TWO_MI)
    assert after.free >= after.reserved


@given(facts=machines_with_a_pool(), wanted=specs())
def test_a_changed_pool_settles_after_one_plan(facts: Facts, wanted: PoolSpec) -> None:
    first = plan([wanted], facts)
    if first.pools[0].unmet is not None:
        assert first.actions == ()
        return
    held = [a for a in first.actions if isinstance(a, AdoptRegion | CreateRegion)]
    sizes = [a.size_bytes if isinstance(a, CreateRegion) else a.expected_bytes for a in held]
    assert sum(sizes) == first.pools[0].planned_bytes
    again = plan([wanted], carried_out(facts, first))
    changing = [a for a in again.actions if not isinstance(a, AdoptRegion)]
    assert changing == []


@given(facts=machines_with_a_pool(), wanted=specs())
def test_mounts_are_taken_away_only_once_nothing_is_on_them(facts: Facts, wanted: PoolSpec) -> None:
    made = plan([wanted], facts)
    gone = {a.mount_dir for a in made.actions if isinstance(a, UnmountMemory)}
    staying = {
        r.mount_dir
        for r in facts.pools[0].regions
        if r.name not in {a.region for a in made.actions if isinstance(a, RemoveRegion)}
    }
    assert not gone & (staying | {a.mount_dir for a in made.actions if isinstance(a, CreateRegion)})
