"""What happens to pools that exist: adopted, grown, shrunk, replaced, repaired, released."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostprep.api.pool_spec import PoolSpec, RegionLayout
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.facts import Facts, HugePages, LedgerEntry, PoolFacts, RegionFacts
from hostprep.node.plan import plan
from hostprep.node.plan.actions import (
    CreateRegion,
    DropHandoff,
    MountMemory,
    Plan,
    RemoveRegion,
    ReserveHugePages,
    ReturnHugePages,
    ScrubRegion,
)
from tests.support.node_facts import machine, numa_node, pool, region

pytestmark = pytest.mark.unit

TWO_MI = 2 * MIB
H2, THP, BASE = Backing.HUGETLB_2MI, Backing.THP, Backing.BASE


def spec(size: int, *backings: Backing, **more: object) -> PoolSpec:
    made = PoolSpec(name="kv", size_bytes=size, backings=backings or (H2, THP, BASE))
    return replace(made, **more)  # type: ignore[arg-type]


def with_pool(there: PoolFacts, *, free_pages: int = 0, used_pages: int = 8192) -> Facts:
    huge = HugePages(TWO_MI, used_pages + free_pages, free_pages, 0)
    return machine(numa_node(free=32 * GIB, huge=[huge]), pools=[there])


def kinds(made: Plan) -> list[str]:
    return [type(action).__name__ for action in made.actions]


def removed(made: Plan) -> list[str]:
    return [a.region for a in made.actions if isinstance(a, RemoveRegion)]


def created(made: Plan) -> list[tuple[str, int]]:
    return [(a.region, a.size_bytes // GIB) for a in made.actions if isinstance(a, CreateRegion)]


def returned(made: Plan) -> list[int]:
    return [a.pages for a in made.actions if isinstance(a, ReturnHugePages)]


def test_what_is_right_is_adopted_and_nothing_else_done() -> None:
    facts = with_pool(pool(region("node0-0", 8 * GIB)))
    made = plan([spec(8 * GIB)], facts)
    assert kinds(made) == ["AdoptRegion"]
    assert not made.changes_anything


def test_thp_regions_that_are_there_stay_though_new_ones_would_stall() -> None:
    there = pool(region("node0-0", 8 * GIB, backing=THP))
    facts = machine(numa_node(free=32 * GIB), pools=[there], defrag="always", hugepage_sizes=())
    assert kinds(plan([spec(8 * GIB, THP, BASE)], facts)) == ["AdoptRegion"]


def test_what_is_right_and_unpublished_is_published() -> None:
    facts = with_pool(pool(region("node0-0", 8 * GIB), published=False))
    assert kinds(plan([spec(8 * GIB)], facts)) == ["DropHandoff", "AdoptRegion", "PublishHandoff"]


def test_without_a_handoff_none_is_withdrawn_and_what_is_there_is_published_first() -> None:
    there = pool(region("node0-0", 4 * GIB), published=False, has_handoff=False)
    assert kinds(plan([spec(4 * GIB)], with_pool(there))) == ["AdoptRegion", "PublishHandoff"]
    growing = kinds(plan([spec(8 * GIB)], with_pool(there)))
    assert "DropHandoff" not in growing
    assert growing.index("PublishHandoff") < growing.index("CreateRegion")


def test_growing_adds_a_region_with_the_lowest_free_index() -> None:
    there = pool(region("node0-0", 4 * GIB), region("node0-2", 2 * GIB))
    made = plan([spec(8 * GIB)], with_pool(there))
    assert created(made) == [("node0-1", 2)]
    assert "DropHandoff" not in kinds(made)


def test_growing_says_that_one_engine_gets_one_region_and_how_to_make_it_one() -> None:
    made = plan([spec(8 * GIB)], with_pool(pool(region("node0-0", 4 * GIB))))
    (note,) = (note for note in made.pools[0].notes if "beside" in note)
    assert note.startswith("4 GiB at node:0 become a region beside")
    assert "`hostprep release kv`" in note
    for other in (plan([spec(8 * GIB)], with_pool(pool(region("node0-0", 8 * GIB)))),
                  plan([spec(8 * GIB, layout=RegionLayout.COUNT, region_count=2)],
                       with_pool(pool(region("node0-0", 4 * GIB))))):  # fmt: skip
        assert not any("beside" in note for note in other.pools[0].notes)


def test_growing_within_a_mount_counts_all_its_regions() -> None:
    there = pool(region("node0-0", 4 * GIB, BASE), region("node0-1", GIB, BASE))
    made = plan([spec(8 * GIB, BASE)], with_pool(there))
    sizes = [a.size_bytes for a in made.actions if isinstance(a, MountMemory)]
    assert sizes == [8 * GIB]


def test_shrinking_removes_the_newest_region_and_returns_its_pages() -> None:
    there = pool(
        region("node0-0", 4 * GIB),
        region("node0-1", 4 * GIB),
        taken=[LedgerEntry(0, TWO_MI, 3000)],
    )
    made = plan([spec(4 * GIB)], with_pool(there))
    assert removed(made) == ["node0-1"]
    assert kinds(made)[0] == "DropHandoff"
    assert kinds(made)[-1] == "PublishHandoff"
    assert returned(made) == [3000 - 2048]


def test_pages_in_use_by_others_are_not_returned() -> None:
    there = pool(region("node0-0", 4 * GIB), taken=[LedgerEntry(0, TWO_MI, 6000)])
    made = plan([spec(4 * GIB)], with_pool(there, free_pages=100))
    assert returned(made) == [100]


def test_pages_that_others_reserved_meanwhile_are_not_returned() -> None:
    there = pool(region("node0-0", 4 * GIB), taken=[LedgerEntry(0, TWO_MI, 6000)])
    huge = HugePages(TWO_MI, 8192, 1000, 0)
    facts = machine(numa_node(huge=[huge]), pools=[there], reserved={TWO_MI: 400})
    assert returned(plan([spec(4 * GIB)], facts)) == [600]


def test_shrinking_below_a_region_makes_a_smaller_one() -> None:
    made = plan([spec(3 * GIB)], with_pool(pool(region("node0-0", 4 * GIB))))
    assert removed(made) == ["node0-0"]
    assert created(made) == [("node0-0", 3)]


def test_shrinking_leaves_leased_regions_and_says_so() -> None:
    there = pool(region("node0-0", 4 * GIB), region("node0-1", 4 * GIB, leased=True))
    made = plan([spec(4 * GIB)], with_pool(there))
    assert removed(made) == ["node0-0"]
    assert made.pools[0].blocked == ()
    less = plan([spec(2 * GIB)], with_pool(there))
    assert removed(less) == ["node0-0"]
    assert less.pools[0].blocked == ("node0-1",)
    assert less.pools[0].planned_bytes == 4 * GIB


def test_another_backing_replaces_regions_that_nobody_holds() -> None:
    there = pool(region("node0-0", 8 * GIB), taken=[LedgerEntry(0, TWO_MI, 4096)])
    made = plan([spec(8 * GIB, BASE)], with_pool(there))
    assert kinds(made) == [
        "DropHandoff",
        "RemoveRegion",
        "UnmountMemory",
        "ReturnHugePages",
        "MakePool",
        "MountMemory",
        "CreateRegion",
        "PublishHandoff",
    ]
    assert [a.mount_dir for a in made.actions if isinstance(a, CreateRegion)] == ["mem-base"]


def test_the_memory_of_replaced_regions_serves_the_new_ones() -> None:
    there = pool(region("node0-0", 8 * GIB), taken=[LedgerEntry(0, TWO_MI, 4096)])
    huge = HugePages(TWO_MI, 4096, 0, 0)
    facts = machine(numa_node(free=2 * GIB, huge=[huge]), pools=[there])
    assert plan([spec(8 * GIB, BASE)], facts).pools[0].unmet is None
    without = replace(facts, pools=(replace(there, taken=()),))
    assert plan([spec(8 * GIB, BASE)], without).pools[0].unmet is not None


def test_another_backing_waits_for_leased_regions() -> None:
    made = plan([spec(8 * GIB, BASE)], with_pool(pool(region("node0-0", 8 * GIB, leased=True))))
    assert kinds(made) == ["AdoptRegion"]
    assert made.pools[0].blocked == ("node0-0",)


def test_a_damaged_region_is_made_anew() -> None:
    there = pool(region("node0-0", 4 * GIB, damage="poisoned page"))
    made = plan([spec(4 * GIB)], with_pool(there))
    assert kinds(made)[:2] == ["DropHandoff", "RemoveRegion"]
    assert created(made) == [("node0-0", 4)]


def test_a_region_that_is_not_all_resident_counts_as_damaged() -> None:
    there = pool(region("node0-0", 4 * GIB, resident=3 * GIB))
    assert removed(plan([spec(4 * GIB)], with_pool(there))) == ["node0-0"]


def test_a_damaged_region_that_is_leased_is_neither_touched_nor_doubled() -> None:
    there = pool(
        region("node0-0", 4 * GIB, damage="poisoned", leased=True),
        region("node0-1", 4 * GIB),
        published=False,
    )
    made = plan([spec(8 * GIB)], with_pool(there))
    assert kinds(made) == ["DropHandoff", "AdoptRegion", "PublishHandoff"]
    assert made.pools[0].planned_bytes == 4 * GIB
    assert any("node0-0 is damaged" in note for note in made.pools[0].notes)
    settled = with_pool(replace(there, published=True))
    assert kinds(plan([spec(8 * GIB)], settled)) == ["AdoptRegion"]


def test_a_region_that_was_shrunk_under_its_holder_keeps_the_place_of_its_whole_size() -> None:
    shrunk = replace(
        region("node0-0", GIB, leased=True, damage="has 1 GiB, 4 GiB were published"),
        place_bytes=4 * GIB,
    )
    there = pool(shrunk, region("node0-1", 4 * GIB))
    made = plan([spec(8 * GIB)], with_pool(there, free_pages=1536))
    assert created(made) == []
    assert made.pools[0].blocked == ("node0-0",)

    freed = replace(shrunk, leased=False)
    made = plan([spec(8 * GIB)], with_pool(pool(freed, there.regions[1]), free_pages=1536))
    assert removed(made) == ["node0-0"]
    assert created(made) == [("node0-0", 4)]


def test_a_half_made_region_is_completed() -> None:
    half = region("node0-0", 8 * GIB, finished=False, resident=6 * GIB)
    there = pool(half, published=False, taken=[LedgerEntry(0, TWO_MI, 4096)])
    facts = with_pool(there, free_pages=1024, used_pages=3072)
    made = plan([spec(8 * GIB)], facts)
    assert removed(made) == []
    steps = [a for a in made.actions if isinstance(a, CreateRegion | ReserveHugePages)]
    assert [step.expected_bytes // GIB for step in steps] == [2]


def test_a_half_made_regions_own_reservation_does_not_stand_in_its_way() -> None:
    half = region("node0-0", 8 * GIB, finished=False, resident=6 * GIB)
    there = pool(half, published=False, taken=[LedgerEntry(0, TWO_MI, 4096)])
    node = numa_node(free=GIB, huge=[HugePages(TWO_MI, 4096, 1024, 0)])
    facts = machine(node, pools=[there], reserved={TWO_MI: 1024})
    made = plan([spec(8 * GIB, H2)], facts)
    assert made.pools[0].unmet is None
    assert "ReserveHugePages" not in kinds(made)


def test_a_half_made_region_does_not_excuse_taking_what_others_reserved() -> None:
    half = region("node0-0", 8 * GIB, finished=False, resident=6 * GIB)
    node = numa_node(free=GIB, huge=[HugePages(TWO_MI, 4096, 1024, 0)])
    facts = machine(node, pools=[pool(half)], reserved={TWO_MI: 1024})
    assert plan([spec(8 * GIB, H2)], facts).pools[0].unmet is not None


def test_a_half_made_region_of_another_size_goes() -> None:
    half = region("node0-3", 2 * GIB, finished=False, resident=GIB)
    made = plan([spec(8 * GIB)], with_pool(pool(half, published=False)))
    assert removed(made) == ["node0-3"]
    assert created(made) == [("node0-0", 8)]


def test_a_half_made_namesake_never_costs_the_finished_region() -> None:
    there = pool(region("node0-0", 8 * GIB), region("node0-0", GIB, finished=False, resident=0))
    assert removed(plan([spec(8 * GIB)], with_pool(there))) == []


def test_dirty_regions_are_scrubbed_where_that_may_be_judged() -> None:
    """Not what is leased, not what its owner may come back for, not without the right to judge."""
    dirty = region("node0-0", 2 * GIB, clean=False)
    there = pool(
        dirty,
        replace(dirty, name="node0-1", leased=True),
        replace(dirty, name="node0-2", retained=True),
        replace(dirty, name="node0-3", scrubbable=False),
    )
    made = plan([spec(8 * GIB)], machine(numa_node(), pools=[there]))
    assert [a.region for a in made.actions if isinstance(a, ScrubRegion)] == ["node0-0"]


def test_a_handoff_of_another_boot_goes_first_and_its_ledger_is_void() -> None:
    there = pool(taken=[LedgerEntry(0, TWO_MI, 4096)], boot_id="yesterday")
    node = numa_node(huge=[HugePages(TWO_MI, 5000, 5000, 0)])
    made = plan([spec(8 * GIB, BASE)], machine(node, pools=[there]))
    first = made.actions[0]
    assert isinstance(first, DropHandoff)
    assert "another boot" in first.why
    assert returned(made) == []


def test_a_changed_layout_moves_regions_and_waits_for_leased_ones() -> None:
    there = pool(region("interleave-0", 2 * GIB, leased=True), region("node0-0", 6 * GIB))
    made = plan([spec(8 * GIB)], with_pool(there))
    assert kinds(made) == ["AdoptRegion", "AdoptRegion"]
    assert made.pools[0].blocked == ("interleave-0",)
    free = pool(region("interleave-0", 8 * GIB))
    assert removed(plan([spec(8 * GIB)], with_pool(free))) == ["interleave-0"]


def test_fewer_regions_of_the_same_total_stay_and_it_is_said() -> None:
    there = pool(region("node0-0", 4 * GIB), region("node0-1", 4 * GIB))
    made = plan([spec(8 * GIB)], with_pool(there))
    assert kinds(made) == ["AdoptRegion", "AdoptRegion"]
    assert any("2 regions" in note for note in made.pools[0].notes)


def test_one_lost_region_of_several_is_made_again_in_its_size() -> None:
    wanted = spec(8 * GIB, layout=RegionLayout.COUNT, region_count=4)
    there = pool(*(region(f"node0-{index}", 2 * GIB) for index in (0, 1, 3)))
    assert created(plan([wanted], with_pool(there))) == [("node0-2", 2)]


def test_growth_that_a_preferred_backing_is_too_coarse_for_uses_the_next() -> None:
    there = pool(region("node0-0", 3 * GIB // 2))
    made = plan([spec(2 * GIB, Backing.HUGETLB_1GI, H2)], with_pool(there))
    assert [a.size_bytes for a in made.actions if isinstance(a, CreateRegion)] == [GIB // 2]


def test_a_changed_group_or_mode_is_given_to_what_is_there() -> None:
    there = pool(region("node0-0", 4 * GIB))
    for wanted in (spec(4 * GIB, gid=1234), spec(4 * GIB, mode=0o600)):
        made = plan([wanted], with_pool(there))
        assert kinds(made) == ["MakePool", "AdoptRegion", "PublishHandoff"]


def test_sound_regions_are_published_again_before_a_lost_one_is_populated() -> None:
    wanted = spec(8 * GIB, layout=RegionLayout.COUNT, region_count=2)
    damaged = replace(region("node0-1", 4 * GIB), damage="has a bad page")
    made = kinds(plan([wanted], with_pool(pool(region("node0-0", 4 * GIB), damaged))))
    assert made.index("PublishHandoff") < made.index("CreateRegion")
    assert made[0] == "DropHandoff"
    assert made[-1] == "PublishHandoff"


def _compared(files: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often a plan that removes so many files compares one with another."""
    calls = 0
    equal = RegionFacts.__eq__

    def counted(self: RegionFacts, other: object) -> bool:
        nonlocal calls
        calls += 1
        return equal(self, other)

    foreign = [region(f"node0-{number}", 0, damage="empty") for number in range(1, 1 + files)]
    facts = with_pool(pool(region("node0-0", 8 * GIB), *foreign))
    with monkeypatch.context() as patched:
        patched.setattr(RegionFacts, "__eq__", counted)
        made = plan([spec(8 * GIB)], facts)
    assert len(removed(made)) == files
    return calls


def test_a_plan_compares_no_file_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thousand files that are no regions of ours kept an agent's round busy for a minute."""
    assert _compared(200, monkeypatch) < 10 * 200


def test_a_leased_region_that_takes_the_whole_size_is_named_as_what_is_in_the_way() -> None:
    there = pool(region("interleave-0", 512 * MIB, leased=True))
    unmet = plan([spec(256 * MIB)], with_pool(there)).pools[0].unmet
    assert unmet is not None
    assert (
        "interleave-0 of the pool's former shape, with 512 MiB, cannot go while leased" in unmet.why
    )
    assert unmet.remedy.startswith("end what holds the pool's regions")
    free = pool(region("interleave-0", 512 * MIB))
    assert plan([spec(256 * MIB)], with_pool(free)).pools[0].unmet is None
