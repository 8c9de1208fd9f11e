"""Which folders regions of huge pages get: a hugetlbfs stays as large as it was made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostprep.api.pool_spec import PoolSpec, RegionLayout
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.facts import Facts, HugePages, LedgerEntry, Mount, PoolFacts
from hostprep.node.plan import plan
from hostprep.node.plan.actions import CreateRegion, MountMemory, Plan, UnmountMemory
from tests.support.node_facts import machine, mount, numa_node, pool, region
from tests.unit.node.plan.node_after import carried_out

pytestmark = pytest.mark.unit

TWO_MI = 2 * MIB
H1, H2, BASE = Backing.HUGETLB_1GI, Backing.HUGETLB_2MI, Backing.BASE
FURTHER = "mem-hugetlb2mi"


def spec(size: int, *backings: Backing, count: int = 1) -> PoolSpec:
    return PoolSpec(
        name="kv",
        size_bytes=size,
        backings=backings or (H2,),
        layout=RegionLayout.COUNT,
        region_count=count,
    )


def with_pool(*there: PoolFacts) -> Facts:
    huge = HugePages(TWO_MI, 16384, 4096, 0)
    return machine(numa_node(free=32 * GIB, huge=[huge]), pools=there)


def placed(made: Plan) -> dict[str, str]:
    """New regions and their folders."""
    return {a.region: a.mount_dir for a in made.actions if isinstance(a, CreateRegion)}


def mounted(made: Plan) -> dict[str, int]:
    """Mounts that are made or used, and what they are to hold, in GiB."""
    return {a.mount_dir: a.size_bytes // GIB for a in made.actions if isinstance(a, MountMemory)}


def unmounted(made: Plan) -> list[str]:
    return [a.mount_dir for a in made.actions if isinstance(a, UnmountMemory)]


def limits(facts: Facts) -> dict[str, int]:
    """Limits of the pool's mounts, in GiB."""
    there = facts.pool("kv")
    assert there is not None
    return {m.path.rpartition("/")[2]: (m.limit_bytes or 0) // GIB for m in there.mounts}


def test_a_new_mount_holds_its_regions_and_no_more() -> None:
    made = plan([spec(8 * GIB, count=2)], with_pool())
    assert mounted(made) == {"mem": 8}


def test_a_pool_that_grows_gets_a_mount_beside_each_as_large_as_its_regions() -> None:
    facts = with_pool(pool(region("node0-0", 4 * GIB, leased=True), limits={"mem": 4 * GIB}))
    first = plan([spec(6 * GIB)], facts)
    assert (placed(first), mounted(first)) == ({"node0-1": FURTHER}, {FURTHER: 2})

    facts = carried_out(facts, first)
    second = plan([spec(9 * GIB)], facts)
    assert placed(second) == {"node0-2": f"{FURTHER}-1"}
    facts = carried_out(facts, second)
    assert limits(facts) == {"mem": 4, FURTHER: 2, f"{FURTHER}-1": 3}

    less = plan([spec(6 * GIB)], facts)
    assert unmounted(less) == [f"{FURTHER}-1"]
    again = plan([spec(9 * GIB)], carried_out(facts, less))
    assert placed(again) == {"node0-2": f"{FURTHER}-1"}


def test_room_that_removed_regions_left_is_used_again() -> None:
    there = pool(
        region("node0-0", 4 * GIB),
        region("node0-1", 4 * GIB, mount_dir=FURTHER),
        limits={"mem": 8 * GIB, FURTHER: 4 * GIB},
    )
    made = plan([spec(14 * GIB)], with_pool(there))
    assert placed(made) == {"node0-2": FURTHER + "-1"}, "6 GiB fit in neither"
    made = plan([spec(12 * GIB)], with_pool(there))
    assert placed(made) == {"node0-2": "mem"}


def test_a_rebuilt_region_goes_back_to_its_place() -> None:
    """Containers that have mem/ alone mounted see it again."""
    broken = region("node0-0", 4 * GIB, damage="resized")
    there = pool(broken, region("node0-1", 4 * GIB, leased=True), limits={"mem": 8 * GIB})
    made = plan([spec(8 * GIB, count=2)], with_pool(there))
    assert placed(made) == {"node0-0": "mem"}


def test_bad_pages_leave_no_room_for_the_region_that_is_made_again() -> None:
    """The kernel keeps them charged to the mount: planned there, the region would fall short."""
    broken = replace(region("node0-0", 4 * GIB, damage="has a bad page"), has_bad_pages=True)
    there = pool(broken, region("node0-1", 4 * GIB, leased=True), limits={"mem": 8 * GIB})
    made = plan([spec(8 * GIB, count=2)], with_pool(there))
    assert placed(made) == {"node0-0": FURTHER}


def test_a_larger_region_in_the_place_of_a_removed_one_gets_a_new_mount() -> None:
    broken = region("node0-0", 4 * GIB, damage="poisoned")
    facts = with_pool(pool(broken, limits={"mem": 4 * GIB}))
    made = plan([spec(8 * GIB)], facts)
    assert (placed(made), unmounted(made)) == ({"node0-0": FURTHER}, ["mem"])
    assert limits(carried_out(facts, made)) == {FURTHER: 8}


def test_regions_of_one_plan_share_what_room_there_is() -> None:
    there = pool(region("node0-0", 2 * GIB), limits={"mem": 4 * GIB})
    made = plan([spec(6 * GIB, count=3)], with_pool(there))
    assert placed(made) == {"node0-1": "mem", "node0-2": FURTHER}
    assert mounted(made)[FURTHER] == 2


def test_a_mount_without_a_limit_of_an_earlier_version_goes_on_being_used() -> None:
    made = plan([spec(8 * GIB)], with_pool(pool(region("node0-0", 4 * GIB, leased=True))))
    assert placed(made) == {"node0-1": "mem"}


def test_what_an_engine_enlarged_its_file_by_takes_no_room() -> None:
    """A file's size is an engine's to set; pages beyond the limit it does not get."""
    large = region("node0-0", 1 << 50, leased=True, damage="resized", resident=2 * GIB)
    large = replace(large, place_bytes=2 * GIB)
    there = pool(large, region("node0-1", 2 * GIB), limits={"mem": 6 * GIB})
    made = plan([spec(6 * GIB, count=3)], with_pool(there))
    assert placed(made) == {"node0-2": "mem"}
    assert not [a for a in made.actions if type(a).__name__ == "RemoveRegion"]


def test_room_that_processes_keep_is_not_counted() -> None:
    """Of a removed region that is still mapped, or of a private mapping: only statvfs has it."""
    there = pool(region("node0-0", 4 * GIB), limits={"mem": 8 * GIB})
    kept = replace(there, mounts=tuple(replace(m, free_bytes=GIB) for m in there.mounts))
    made = plan([spec(8 * GIB, count=2)], with_pool(kept))
    assert placed(made) == {"node0-1": FURTHER}


def test_a_folder_with_a_file_that_processes_keep_stays() -> None:
    found = mount("kv", "mem", H2, limit=4 * GIB, taken=4 * GIB)
    there = replace(pool(), mounts=(found,))
    made = plan([spec(4 * GIB)], with_pool(replace(there, held_in=("mem",))))
    assert (placed(made), unmounted(made)) == ({"node0-0": FURTHER}, [])
    assert unmounted(plan([spec(4 * GIB)], with_pool(there))) == ["mem"]


def test_a_half_made_region_is_completed_where_it_is() -> None:
    """It has reserved its pages, or not yet: the other region fits in either case."""
    half = region("node0-0", 4 * GIB, finished=False, resident=GIB)
    there = pool(half, limits={"mem": 8 * GIB})
    (sized,) = there.mounts
    for free in (4 * GIB, 7 * GIB):
        pools = replace(there, mounts=(replace(sized, free_bytes=free),))
        made = plan([spec(8 * GIB, count=2)], with_pool(pools))
        assert placed(made) == {"node0-0": "mem", "node0-1": "mem"}
        assert unmounted(made) == []
    empty = replace(there, regions=(replace(half, resident_bytes=0),))
    more = replace(empty, mounts=(replace(sized, free_bytes=8 * GIB),))
    made = plan([spec(12 * GIB, count=3)], with_pool(more))
    assert placed(made) == {"node0-0": "mem", "node0-1": "mem", "node0-2": FURTHER}


def test_a_half_made_region_that_is_not_continued_gives_its_room_back() -> None:
    half = region("node0-0", 4 * GIB, finished=False, resident=GIB)
    there = pool(half, limits={"mem": 4 * GIB}, taken=[LedgerEntry(0, TWO_MI, 2048)])
    made = plan([spec(2 * GIB)], with_pool(there))
    assert placed(made) == {"node0-0": "mem"}


def test_each_page_size_has_mounts_of_its_own() -> None:
    there = pool(
        region("node0-0", 4 * GIB, H1, leased=True),
        region("node0-1", 4 * GIB, leased=True, mount_dir=FURTHER),
        limits={"mem": 4 * GIB, FURTHER: 4 * GIB},
    )
    made = plan([spec(12 * GIB, H2, H1)], with_pool(there))
    assert placed(made) == {"node0-2": f"{FURTHER}-1"}


@pytest.mark.parametrize(
    ("fs_type", "options", "limit"),
    [
        ("hugetlbfs", ("rw", "pagesize=2M", "size=16777216"), 16 * MIB),
        ("hugetlbfs", ("rw", "pagesize=2M"), None),
        ("hugetlbfs", ("rw", "pagesize=2M", "size="), None),
        ("tmpfs", ("rw", "size=16777216"), None),
        ("tmpfs", ("rw", "size=16384k"), None),
    ],
)
def test_the_limit_is_what_the_mount_table_says(
    fs_type: str, options: tuple[str, ...], limit: int | None
) -> None:
    assert Mount("/run/hostprep/kv/mem", fs_type, "hostprep", options, (0, 40)).limit_bytes == limit
