"""A plan's seconds are those of its longest way through the lanes that run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.api.pool_spec import Placement, PoolSpec, RegionLayout
from hostprep.backing import GIB, Backing
from hostprep.node.facts import Facts, PoolFacts
from hostprep.node.plan import plan
from hostprep.node.plan.actions import Action, AdoptRegion, CreateRegion, Plan, stages
from tests.support.node_facts import machine, numa_node, pool, region

pytestmark = pytest.mark.unit

H1 = Backing.HUGETLB_1GI


def _populating(plan_: Plan) -> list[CreateRegion]:
    return [action for action in plan_.actions if isinstance(action, CreateRegion)]


def _planned(nodes: int, regions: int, *, cpus: tuple[int, ...] | None = None) -> Plan:
    spec = PoolSpec(
        name="kv",
        size_bytes=nodes * 32 * GIB,
        backings=(Backing.BASE,),
        layout=RegionLayout.COUNT,
        region_count=regions,
    )
    facts = machine(*(numa_node(node) for node in range(nodes)))
    if cpus is not None:
        facts = replace(facts, process=replace(facts.process, cpus=cpus))
    return plan([spec], facts)


def test_regions_on_eight_nodes_take_as_long_as_one_of_them() -> None:
    made = _planned(8, 8)
    each = _populating(made)
    assert len(each) == 8
    assert made.expected_s == pytest.approx(each[0].expected_s)
    assert made.expected_s == pytest.approx(sum(one.expected_s for one in each) / 8)


def test_regions_on_one_node_follow_one_another() -> None:
    made = _planned(2, 8)
    each = _populating(made)
    assert [len(lane) for lane in stages(each)[0]] == [4, 4]
    assert made.expected_s == pytest.approx(4 * each[0].expected_s)


def test_lanes_on_the_same_processors_are_no_faster_than_these() -> None:
    apart, shared = _planned(4, 4), _planned(4, 4, cpus=(0, 1))
    one = _populating(shared)[0]
    assert one.threads == 2
    assert shared.expected_s == pytest.approx(4 * one.expected_s)
    assert apart.expected_s == pytest.approx(_populating(apart)[0].expected_s)


def test_huge_pages_are_added_before_and_one_node_after_the_other() -> None:
    spec = PoolSpec(name="kv", size_bytes=64 * GIB, backings=(Backing.HUGETLB_2MI,))
    made = plan([spec], machine(numa_node(0), numa_node(1)))
    populate_s = max(action.expected_s for action in _populating(made))
    others_s = sum(a.expected_s for a in made.actions if not isinstance(a, CreateRegion))
    assert others_s > 0
    assert made.expected_s == pytest.approx(others_s + populate_s)


def _threads(facts: Facts, *, gib: int = 4096, backing: Backing = H1, **spec: Any) -> list[int]:
    wanted = PoolSpec(name="kv", size_bytes=gib * GIB, backings=(backing,), **spec)
    return [action.threads for action in _populating(plan([wanted], facts))]


def _large(*, pools: Sequence[PoolFacts] = ()) -> Facts:
    """Two sockets of 132 CPUs, as of the fastest populating that is published."""
    first = numa_node(0, size=4096 * GIB, cpus=range(132))
    second = numa_node(1, size=4096 * GIB, cpus=range(132, 264))
    return machine(first, second, pools=pools)


def test_all_cpus_of_a_node_populate_while_no_region_is_leased() -> None:
    idle = pool(region("node0-0", GIB), name="other")
    assert _threads(_large(pools=[idle])) == [132, 132]
    assert _threads(_large(), layout=RegionLayout.SINGLE) == [264]


def test_an_eighth_of_the_cpus_populates_while_an_engine_runs_or_may_run() -> None:
    leased = pool(region("node1-0", GIB, leased=True), name="other")
    unknown = replace(pool(name="other"), failure="it is a file")
    for busy in (leased, unknown):
        assert _threads(_large(pools=[busy])) == [16, 16]
        assert _threads(_large(pools=[busy]), layout=RegionLayout.SINGLE) == [33]
    small = machine(numa_node(0, cpus=[3]), pools=[leased])
    assert _threads(small, gib=8, backing=Backing.HUGETLB_2MI) == [1]


def test_no_more_threads_than_pieces_of_work() -> None:
    assert _threads(_large(), gib=10) == [5, 5]
    assert _threads(_large(), gib=1, backing=Backing.HUGETLB_2MI) == [8, 8]


def test_only_cpus_that_this_process_may_use_populate() -> None:
    facts = _large()
    facts = replace(facts, process=replace(facts.process, cpus=(1, 2, 200)))
    assert _threads(facts) == [2, 1]


def test_the_fastest_populating_that_is_published_is_expected_so() -> None:
    """cloud-hypervisor's pull request 8785: 2 x 1,477 GiB in 7.4 s; without our adding pages."""
    spec = PoolSpec(name="kv", size_bytes=2 * 1477 * GIB, backings=(H1,))
    made = plan([spec], _large())
    assert max(action.expected_s for action in _populating(made)) == pytest.approx(7.4, rel=0.1)


@given(
    node_cpus=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    allowed=st.sets(st.integers(0, 2399), min_size=1),
    leased=st.booleans(),
    single=st.booleans(),
)
def test_a_regions_threads_are_never_more_than_its_cpus(
    node_cpus: list[int], allowed: set[int], leased: bool, single: bool
) -> None:
    nodes = [
        numa_node(n, size=512 * GIB, cpus=range(n * 300, n * 300 + count))
        for n, count in enumerate(node_cpus)
    ]
    facts = machine(*nodes, pools=[pool(region("node0-0", GIB, leased=leased), name="other")])
    facts = replace(facts, process=replace(facts.process, cpus=tuple(sorted(allowed))))
    layout = RegionLayout.SINGLE if single else RegionLayout.PER_NUMA_NODE
    spec = PoolSpec(name="kv", size_bytes=256 * GIB * len(nodes), backings=(H1,), layout=layout)
    made = _populating(plan([spec], facts))
    assert len(made) == (1 if single else len(nodes))
    for action in made:
        local = {cpu for node in nodes if node.node_id in action.node_ids for cpu in node.cpus}
        assert set(action.cpus) == (local & allowed or allowed)
        most = len(action.cpus) // 8 if leased else len(action.cpus)
        assert action.threads == max(1, min(most, action.size_bytes // GIB))


_ACTIONS = st.lists(
    st.one_of(
        st.builds(
            CreateRegion,
            pool=st.just("kv"), region=st.just("r"), mount_dir=st.just("mem"),
            backing=st.just(Backing.BASE),
            placement=st.builds(Placement, st.sampled_from([None, 0, 1, 2])),
            size_bytes=st.just(1), node_ids=st.just((0,)),
            cpus=st.lists(st.integers(0, 7), max_size=4, unique=True).map(tuple),
            threads=st.integers(1, 4), gid=st.none(), mode=st.just(0o660),
            expected_s=st.floats(0, 1e3),
        ),
        st.builds(
            AdoptRegion, pool=st.just("kv"), region=st.just("r"), expected_s=st.floats(0, 1e3)
        ),
    ),
    max_size=12,
)  # fmt: skip


@given(actions=_ACTIONS)
def test_no_plan_is_shorter_than_its_longest_lane_or_longer_than_its_sum(
    actions: list[Action],
) -> None:
    made = Plan(actions=tuple(actions), pools=())
    lanes = [lane for stage in stages(actions) for lane in stage]
    assert sorted(map(id, (a for lane in lanes for a in lane))) == sorted(map(id, actions))
    longest = max((sum(a.expected_s for a in lane) for lane in lanes), default=0.0)
    total = sum(action.expected_s for action in actions)
    assert longest <= made.expected_s * (1 + 1e-9) + 1e-9
    assert made.expected_s <= total * (1 + 1e-9) + 1e-9
    for earlier, later in pairwise(stages(actions)):
        assert not all(isinstance(lane[0], CreateRegion) for lane in (*earlier, *later))
