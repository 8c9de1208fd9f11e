"""Which backing is chosen on which machine, and what is said about the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hostprep.api.pool_spec import PoolSpec, RegionLayout
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.facts import CgroupFacts, Facts, HugePages
from hostprep.node.plan import plan
from hostprep.node.plan.actions import (
    CreateRegion,
    MountMemory,
    PoolPlan,
    ReserveHugePages,
    Shortfall,
)
from tests.support.node_facts import machine, numa_node, pool, region
from tests.unit.node.plan.node_after import carried_out

pytestmark = pytest.mark.unit

TWO_MI = 2 * MIB
H1, H2, THP, BASE = Backing.HUGETLB_1GI, Backing.HUGETLB_2MI, Backing.THP, Backing.BASE


def spec(size: int = 8 * GIB, *backings: Backing, **more: object) -> PoolSpec:
    made = PoolSpec(name="kv", size_bytes=size, backings=backings or (H2, THP, BASE))
    return replace(made, **more)  # type: ignore[arg-type]


def outcome(facts: Facts, wanted: PoolSpec) -> PoolPlan:
    return plan([wanted], facts).pools[0]


def test_free_huge_pages_are_used_before_new_ones_are_added() -> None:
    facts = machine(numa_node(huge=[HugePages(TWO_MI, 3000, 1000, 0)]))
    made = plan([spec(8 * GIB)], facts)
    assert [a.pages for a in made.actions if isinstance(a, ReserveHugePages)] == [4096 - 1000]


def test_pages_reserved_by_others_are_left_to_them() -> None:
    facts = machine(numa_node(huge=[HugePages(TWO_MI, 3000, 1000, 0)]), reserved={TWO_MI: 900})
    made = plan([spec(8 * GIB)], facts)
    assert [a.pages for a in made.actions if isinstance(a, ReserveHugePages)] == [4096 - 100]


def test_free_surplus_pages_are_not_ours() -> None:
    facts = machine(numa_node(huge=[HugePages(TWO_MI, 3000, 1000, 600)]))
    made = plan([spec(8 * GIB)], facts)
    assert [a.pages for a in made.actions if isinstance(a, ReserveHugePages)] == [4096 - 400]


def test_huge_pages_free_beside_little_memory_are_enough() -> None:
    node = numa_node(free=GIB, huge=[HugePages(TWO_MI, 8192, 8192, 0)])
    assert outcome(machine(node), spec(16 * GIB)).backings == (H2,)


@pytest.mark.parametrize(
    ("contiguous", "chosen"), [(8, H2), (5, H2), (4, H2), (3, BASE), (0, BASE)]
)
def test_two_mebibyte_pages_need_half_of_them_in_blocks(contiguous: int, chosen: Backing) -> None:
    facts = machine(numa_node(contiguous=contiguous * GIB))
    assert outcome(facts, spec(8 * GIB)).backings == (chosen,)


def test_one_compaction_is_announced_where_blocks_are_short() -> None:
    made = outcome(machine(numa_node(contiguous=5 * GIB)), spec(8 * GIB))
    assert any("5 GiB of 8 GiB" in note and "compacted once" in note for note in made.notes)


def test_a_fragmented_node_is_not_fought_with_thp_faults() -> None:
    made = outcome(machine(numa_node(contiguous=3 * GIB)), spec(8 * GIB))
    assert [passed.backing for passed in made.passed_over] == [H2, THP]
    assert "only 3 GiB of 8 GiB free in blocks of 2 MiB" in made.passed_over[0].why
    assert all("nothing is fought with faults" in passed.why for passed in made.passed_over)


@pytest.mark.parametrize(("contiguous", "chosen"), [(10, H1), (9, BASE)])
def test_one_gibibyte_pages_need_a_quarter_more_in_blocks(contiguous: int, chosen: Backing) -> None:
    facts = machine(numa_node(contiguous=contiguous * GIB))
    assert outcome(facts, spec(8 * GIB, H1, BASE)).backings == (chosen,)


def test_a_page_size_that_the_cpu_lacks_is_named() -> None:
    made = outcome(machine(hugepage_sizes=(TWO_MI,)), spec(8 * GIB, H1, H2))
    assert made.backings == (H2,)
    assert "no pages of 1 GiB" in made.passed_over[0].why


def test_without_root_the_roots_tmpfs_is_used_and_what_root_adds_is_said() -> None:
    facts = machine(euid=1000, can_mount=False)
    made = plan([spec()], facts)
    assert made.pools[0].backings == (BASE,)
    assert any("as root" in note for note in made.pools[0].notes)
    assert [a.own_mount for a in made.actions if isinstance(a, MountMemory)] == [False]


def test_without_root_a_root_folder_on_disk_is_refused() -> None:
    made = outcome(machine(euid=1000, can_mount=False, root_fs="ext4"), spec())
    assert made.unmet is not None
    assert "ext4, not tmpfs" in made.unmet.why


def test_without_root_the_tmpfs_must_have_room() -> None:
    made = outcome(machine(euid=1000, can_mount=False, root_free=2 * GIB), spec())
    assert made.unmet is not None
    assert made.unmet.possible_bytes == 2 * GIB


def test_tmpfs_is_refused_where_it_would_be_swapped() -> None:
    made = outcome(machine(swap=GIB, kernel=(6, 1)), spec(8 * GIB, THP, BASE))
    assert made.unmet is not None
    assert made.unmet.reason == "NotPinned"
    assert "swapoff" in made.unmet.remedy


@pytest.mark.parametrize(("swap", "kernel", "noswap"), [(GIB, (6, 4), True), (0, (6, 1), False)])
def test_tmpfs_is_mounted_noswap_where_the_kernel_can(
    swap: int, kernel: tuple[int, int], noswap: bool
) -> None:
    made = plan([spec(8 * GIB, BASE)], machine(swap=swap, kernel=kernel))
    assert [a.noswap for a in made.actions if isinstance(a, MountMemory)] == [noswap]


def test_an_old_kernel_cannot_populate() -> None:
    made = outcome(machine(kernel=(5, 10)), spec())
    assert made.unmet is not None
    assert made.unmet.reason == "KernelTooOld"


def test_thp_is_passed_over_where_tmpfs_denies_it() -> None:
    made = outcome(machine(shmem="deny"), spec(8 * GIB, THP, BASE))
    assert made.backings == (BASE,)


def test_a_node_with_movable_memory_gives_gigantic_pages_only() -> None:
    made = outcome(machine(numa_node(movable=8 * GIB)), spec(8 * GIB, H2, BASE, H1))
    assert made.backings == (H1,)
    assert all("ZONE_MOVABLE" in passed.why for passed in made.passed_over)


def test_free_cma_memory_is_not_available() -> None:
    facts = machine(numa_node(free=10 * GIB, cma=4 * GIB))
    made = outcome(facts, spec(8 * GIB))
    assert made.unmet is not None
    assert made.unmet.possible_bytes == 6 * GIB


def test_a_cgroup_without_huge_pages_is_passed_over_unless_it_can_be_left() -> None:
    limited = CgroupFacts(2, "/kubepods/x", None, ((TWO_MI, 0),), writable=False)
    assert outcome(machine(cgroup=limited), spec(8 * GIB, H2, BASE)).backings == (BASE,)
    free = replace(limited, writable=True)
    assert outcome(machine(cgroup=free), spec(8 * GIB, H2, BASE)).backings == (H2,)


def test_a_memory_limit_of_the_cgroup_counts_for_tmpfs() -> None:
    limited = CgroupFacts(2, "/user", 4 * GIB, writable=False)
    made = outcome(machine(cgroup=limited), spec(8 * GIB, BASE))
    assert made.unmet is not None
    assert made.unmet.possible_bytes == 4 * GIB


def test_what_apply_found_short_is_passed_over() -> None:
    made = plan(
        [spec()], machine(), shortfalls=[Shortfall("kv", H2, "node 0 gave 3 of 4096 pages", 0)]
    )
    assert made.pools[0].backings == (THP,)
    assert "3 of 4096" in made.pools[0].passed_over[0].why


def by_region(facts: Facts, wanted: PoolSpec, **more: Any) -> dict[str, Backing]:
    made = plan([wanted], facts, **more)
    return {a.region: a.backing for a in made.actions if isinstance(a, CreateRegion)}


def test_a_fragmented_node_falls_back_alone() -> None:
    facts = machine(numa_node(0), numa_node(1, contiguous=GIB))
    made = plan([spec(8 * GIB, H2, BASE)], facts)
    assert by_region(facts, spec(8 * GIB, H2, BASE)) == {"node0-0": H2, "node1-0": BASE}
    assert [a.mount_dir for a in made.actions if isinstance(a, MountMemory)] == ["mem", "mem-base"]
    (reserve,) = (a for a in made.actions if isinstance(a, ReserveHugePages))
    assert (reserve.node_id, reserve.pages) == (0, 2048)
    (pool_plan,) = made.pools
    assert pool_plan.backings == (H2, BASE)
    assert [over.backing for over in pool_plan.passed_over] == [H2]
    assert "node 1 is fragmented" in pool_plan.passed_over[0].why
    # Only what is in base pages costs page tables.
    assert pool_plan.page_table_bytes_per_process == 8 * MIB


def test_the_low_hole_of_node_0_costs_the_other_nodes_no_gigantic_pages() -> None:
    facts = machine(*(numa_node(n, contiguous=9 * GIB if n == 0 else None) for n in range(4)))
    found = by_region(facts, spec(32 * GIB, H1, H2))
    assert found == {"node0-0": H2, "node1-0": H1, "node2-0": H1, "node3-0": H1}


def test_a_shortfall_that_only_trying_shows_is_one_nodes_too() -> None:
    facts = machine(numa_node(0), numa_node(1))
    short = [Shortfall("kv", H2, "node 1 gave 3 of 2048 pages", 1)]
    found = by_region(facts, spec(8 * GIB, H2, BASE), shortfalls=short)
    assert found == {"node0-0": H2, "node1-0": BASE}


def test_an_interleaved_region_does_without_what_one_of_its_nodes_lacks() -> None:
    facts = machine(numa_node(0), numa_node(1, contiguous=GIB))
    wanted = spec(8 * GIB, H2, BASE, layout=RegionLayout.SINGLE)
    assert by_region(facts, wanted) == {"interleave-0": BASE}


def test_regions_that_are_there_keep_their_backing_beside_others() -> None:
    facts = machine(numa_node(0), numa_node(1, contiguous=GIB))
    wanted = spec(8 * GIB, H2, BASE)
    after = carried_out(facts, plan([wanted], facts))
    again = plan([wanted], after)
    assert not again.changes_anything
    assert again.pools[0].backings == (H2, BASE)


def test_the_reserve_stays_available() -> None:
    facts = machine(numa_node(free=20 * GIB))
    made = plan([spec(16 * GIB, BASE, reserve_bytes=4 * GIB)], facts)
    assert carried_out(facts, made).memory.available_bytes == 4 * GIB
    more = outcome(facts, spec(16 * GIB, BASE, reserve_bytes=5 * GIB))
    assert more.unmet is not None
    assert more.unmet.possible_bytes == 15 * GIB


def test_a_pool_of_lower_priority_keeps_the_reserve_of_a_higher_one() -> None:
    facts = machine(numa_node(free=20 * GIB))
    first = spec(8 * GIB, BASE, reserve_bytes=8 * GIB, priority=5)
    made = plan([spec(8 * GIB, BASE, name="aaa"), first], facts)
    assert [(p.name, p.unmet is None) for p in made.pools] == [("kv", True), ("aaa", False)]


def test_a_size_beyond_the_machine_can_never_be_had() -> None:
    made = outcome(machine(), spec(100 * GIB))
    assert made.unmet is not None
    assert made.unmet.never
    assert made.unmet.possible_bytes == 64 * GIB


def test_a_percentage_is_of_all_memory() -> None:
    made = outcome(machine(), spec(size=1, size_bytes=None, percent=25.0))
    assert made.planned_bytes == 16 * GIB


def test_regions_per_numa_node_are_equal_and_leave_gpu_memory_alone() -> None:
    facts = machine(numa_node(0), numa_node(1), numa_node(2, cpus=()))
    made = plan([spec(9 * GIB)], facts)
    regions = [a for a in made.actions if isinstance(a, CreateRegion)]
    assert [(a.region, a.size_bytes) for a in regions] == [
        ("node0-0", 9 * GIB // 2),
        ("node1-0", 9 * GIB // 2),
    ]
    assert any("node 2" in note for note in made.pools[0].notes)


def test_regions_per_gpu_lie_on_the_gpus_nodes() -> None:
    facts = machine(numa_node(0), numa_node(1), gpus=[1, 1, 0, None])
    made = plan([spec(8 * GIB, layout=RegionLayout.PER_GPU)], facts)
    names = [a.region for a in made.actions if isinstance(a, CreateRegion)]
    assert names == ["node1-0", "node1-1", "node0-0", "interleave-0"]


def test_a_gpu_without_node_takes_the_only_one() -> None:
    made = plan([spec(8 * GIB, layout=RegionLayout.PER_GPU)], machine(gpus=[None]))
    assert [a.region for a in made.actions if isinstance(a, CreateRegion)] == ["node0-0"]


def test_regions_per_gpu_need_a_gpu() -> None:
    made = outcome(machine(), spec(8 * GIB, layout=RegionLayout.PER_GPU))
    assert made.unmet is not None
    assert made.unmet.reason == "NoGpu"


def test_a_number_of_regions_is_dealt_over_the_nodes_in_turn() -> None:
    facts = machine(numa_node(0), numa_node(1))
    wanted = spec(6 * GIB, layout=RegionLayout.COUNT, region_count=3)
    made = plan([wanted], facts)
    names = sorted(a.region for a in made.actions if isinstance(a, CreateRegion))
    assert names == ["node0-0", "node0-1", "node1-0"]


def test_a_single_region_is_interleaved_over_nodes_with_cpus() -> None:
    facts = machine(numa_node(0), numa_node(1), numa_node(2, cpus=()))
    made = plan([spec(8 * GIB, layout=RegionLayout.SINGLE)], facts)
    (region_made,) = [a for a in made.actions if isinstance(a, CreateRegion)]
    assert (region_made.region, region_made.node_ids) == ("interleave-0", (0, 1))
    assert region_made.threads == 16
    assert [a.pages for a in made.actions if isinstance(a, ReserveHugePages)] == [2048, 2048]


def test_a_share_smaller_than_a_page_is_unmet() -> None:
    wanted = spec(4 * GIB, H1, layout=RegionLayout.COUNT, region_count=8)
    made = outcome(machine(), wanted)
    assert made.unmet is not None
    assert made.unmet.reason == "TooSmall"


def test_base_pages_cost_each_process_a_512th_in_page_tables() -> None:
    assert outcome(machine(), spec(8 * GIB, BASE)).page_table_bytes_per_process == 16 * MIB
    assert outcome(machine(), spec(8 * GIB, H2)).page_table_bytes_per_process == 0


def test_threads_stay_on_the_nodes_cpus() -> None:
    made = plan([spec(8 * GIB)], machine(numa_node(0), numa_node(1)))
    second = [a for a in made.actions if isinstance(a, CreateRegion)][1]
    assert second.cpus == tuple(range(8, 16))
    assert second.threads == 8


def test_pools_that_no_spec_names_are_left_alone() -> None:
    facts = machine(pools=[pool(region("node0-0", GIB), name="other", published=False)])
    assert all(action.pool == "kv" for action in plan([spec(GIB)], facts).actions)


def test_a_new_pool_is_prepared_in_this_order() -> None:
    names = [type(action).__name__ for action in plan([spec(GIB)], machine()).actions]
    assert names == [
        "MakePool",
        "ReserveHugePages",
        "MountMemory",
        "CreateRegion",
        "PublishHandoff",
    ]


def _thp_machine(defrag: str, **more: Any) -> Facts:
    return machine(numa_node(**more), defrag=defrag, hugepage_sizes=())


@pytest.mark.parametrize("defrag", ["madvise", "defer", "defer+madvise", "never", "unknown"])
def test_thp_is_taken_where_populating_it_compacts_nothing(defrag: str) -> None:
    assert outcome(_thp_machine(defrag), spec(8 * GIB)).backings == (THP,)


def test_thp_comes_last_where_its_page_faults_stall() -> None:
    made = outcome(_thp_machine("always"), spec(8 * GIB))
    assert made.backings == (BASE,)
    assert [passed.backing for passed in made.passed_over] == [H2, THP]
    assert "stall" in made.passed_over[1].why
    assert made.passed_over[1].remedy == "echo defer > /sys/kernel/mm/transparent_hugepage/defrag"


@pytest.mark.parametrize("backings", [(THP,), (H2, THP)])
def test_thp_that_stalls_is_better_than_nothing_and_said(backings: tuple[Backing, ...]) -> None:
    made = outcome(_thp_machine("always"), spec(8 * GIB, *backings))
    assert made.backings == (THP,)
    assert any("stall" in note and "echo defer" in note for note in made.notes)


def test_thp_that_was_asked_for_last_is_not_called_passed_over() -> None:
    made = outcome(_thp_machine("always"), spec(8 * GIB, BASE, THP))
    assert (made.backings, made.passed_over) == ((BASE,), ())
