"""A share of the memory: of NUMA nodes that have CPUs; and regions of a given size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.api.pool_spec import PoolSpec, RegionLayout
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.facts import Facts
from hostprep.node.observe import HostRoot, observe
from hostprep.node.plan import plan
from hostprep.node.plan.actions import AdoptRegion, CreateRegion, RemoveRegion
from hostprep.node.plan.placement import memory_with_cpus
from tests.support import host_trees
from tests.support.node_facts import pool, region

pytestmark = pytest.mark.unit


def facts_of(tree: Path) -> Facts:
    return observe(host=HostRoot(tree), root="/run/hostprep")


def share(percent: float) -> PoolSpec:
    return PoolSpec(name="kv", percent=percent, backings=(Backing.HUGETLB_2MI,), reserve_bytes=0)


def test_a_share_is_of_the_memory_of_cpus_alone(tmp_path: Path) -> None:
    facts = facts_of(host_trees.gb200(tmp_path))
    grace = sum(node.total_bytes for node in facts.nodes if node.cpus)
    assert memory_with_cpus(facts) == grace < facts.memory.total_bytes // 1.7
    (planned,) = plan([share(70)], facts).pools
    assert planned.wanted_bytes == int(grace * 0.7)
    assert not planned.unmet


def test_it_is_all_memory_where_every_node_has_cpus(tmp_path: Path) -> None:
    facts = facts_of(host_trees.two_socket_8gpu(tmp_path))
    assert memory_with_cpus(facts) == facts.memory.total_bytes


def holding(facts: Facts, size_bytes: int) -> Facts:
    """The same machine with two regions that hold it all."""
    each = size_bytes // 2 // (2 * MIB) * 2 * MIB
    regions = [region(f"node{node}-0", each) for node in (0, 1)]
    return replace(facts, pools=(pool(*regions, boot_id=facts.kernel.boot_id),))


def test_an_upgrade_keeps_the_size_that_an_earlier_version_gave(tmp_path: Path) -> None:
    facts = facts_of(host_trees.gb200(tmp_path))
    earlier = int(facts.memory.total_bytes * 0.4)
    planned = plan([share(40)], holding(facts, earlier))
    assert {type(action) for action in planned.actions} <= {AdoptRegion}
    assert planned.pools[0].wanted_bytes == earlier
    # Another share is an order to change, and it is reckoned as it is now.
    changed = plan([share(41)], holding(facts, earlier))
    assert changed.pools[0].wanted_bytes == int(memory_with_cpus(facts) * 0.41)
    assert any(isinstance(action, RemoveRegion) for action in changed.actions)


@pytest.mark.parametrize(
    ("layout", "count", "regions"),
    [
        (RegionLayout.PER_GPU, None, 8),
        (RegionLayout.PER_NUMA_NODE, None, 2),
        (RegionLayout.SINGLE, None, 1),
        (RegionLayout.COUNT, 3, 3),
    ],
)
def test_regions_of_a_given_size_are_as_many_as_the_layout_says(
    tmp_path: Path, layout: RegionLayout, count: int | None, regions: int
) -> None:
    facts = facts_of(host_trees.two_socket_8gpu(tmp_path))
    spec = PoolSpec(
        name="kv",
        region_size_bytes=24 * GIB - 1,
        layout=layout,
        region_count=count,
        backings=(Backing.HUGETLB_2MI,),
    )
    planned = plan([spec], facts)
    sizes = [a.size_bytes for a in planned.actions if isinstance(a, CreateRegion)]
    assert sizes == [24 * GIB] * regions
    assert planned.pools[0].wanted_bytes == 24 * GIB * regions


def test_nodes_with_other_gpus_hold_regions_of_one_size(tmp_path: Path) -> None:
    spec = PoolSpec(
        name="kv",
        region_size_bytes=16 * GIB,
        layout=RegionLayout.PER_GPU,
        backings=(Backing.BASE,),
    )
    found = []
    for number, tree in enumerate((host_trees.two_socket_8gpu, host_trees.gb200)):
        planned = plan([spec], facts_of(tree(tmp_path / str(number))))
        found.append([a.size_bytes for a in planned.actions if isinstance(a, CreateRegion)])
    assert found == [[16 * GIB] * 8, [16 * GIB] * 4]
