"""A pool with a sizing: what the plan makes of it, and which layout each region is given."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from hostprep.api.pool_spec import PoolSpec, RegionLayout
from hostprep.api.slot_layout import SlotLayout, layout_text
from hostprep.backing import GIB, MIB, Backing
from hostprep.client.handoff import MAX_BYTES, parse_handoff
from hostprep.errors import BadInputError
from hostprep.layout import ATTENTION, RECURRENT, Group, Layout
from hostprep.node.apply.publish import build_handoff
from hostprep.node.boot import boot_script
from hostprep.node.facts import Facts, HugePages
from hostprep.node.plan import plan
from hostprep.node.plan.actions import CreateRegion, Plan
from hostprep.paths import PoolPaths
from tests.support.node_facts import BOOT, machine, numa_node, pool, region

pytestmark = pytest.mark.unit

H2, BASE = Backing.HUGETLB_2MI, Backing.BASE


def sizing(slots: int = 100) -> SlotLayout:
    return SlotLayout.of(
        (
            Group(name="full", slot_bytes=MIB + 1, slots=slots, kind=ATTENTION),
            Group(name="state", slot_bytes=100, slots=8, kind=RECURRENT),
        ),
        min_slots=(8, 1),
        tokens_per_block=32,
        model="made-up",
    )


def spec(slots: int = 100, **more: object) -> PoolSpec:
    made = PoolSpec(
        name="kv",
        sizing=sizing(slots),
        backings=(H2, BASE),
        layout=RegionLayout.COUNT,
        region_count=3,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def node(**more: object) -> Facts:
    huge = HugePages(2 * MIB, 8192, 4096, 0)
    return machine(numa_node(free=32 * GIB, huge=[huge]), **more)  # type: ignore[arg-type]


def kinds(made: Plan) -> list[str]:
    return [type(action).__name__ for action in made.actions]


def test_slots_are_whole_sectors_and_groups_begin_on_pages() -> None:
    full, state = sizing().layout.groups
    assert full.slot_bytes == MIB + 512
    assert (full.offset_bytes, state.offset_bytes) == (0, 102 * MIB)
    assert sizing().size_bytes == 102 * MIB + 8 * 512


def test_the_pool_is_as_large_as_its_regions_together() -> None:
    made = plan([spec()], node())
    created = [action for action in made.actions if isinstance(action, CreateRegion)]
    assert [action.size_bytes for action in created] == [104 * MIB] * 3
    assert made.pools[0].wanted_bytes == made.pools[0].planned_bytes == 3 * 104 * MIB


@pytest.mark.parametrize(
    ("backings", "size_bytes"),
    [((BASE,), 104 * MIB), ((H2, Backing.HUGETLB_1GI), GIB), ((Backing.THP, BASE), 104 * MIB)],
)
def test_a_region_fits_whichever_backing_it_gets(
    backings: tuple[Backing, ...], size_bytes: int
) -> None:
    assert spec(backings=backings).region_bytes == size_bytes


def test_regions_are_one_for_each_gpu() -> None:
    made = plan([spec(layout=RegionLayout.PER_GPU, region_count=None)], node(gpus=[0, 0]))
    assert made.pools[0].planned_bytes == 2 * 104 * MIB


def test_without_a_place_for_regions_one_is_missed() -> None:
    made = plan([spec(layout=RegionLayout.PER_GPU, region_count=None)], node())
    assert made.pools[0].unmet is not None
    assert made.pools[0].wanted_bytes == 104 * MIB


def test_a_pool_that_does_not_fit_says_for_how_much_the_model_would_have_to_be_sized() -> None:
    facts = node()
    unmet = plan([spec(20 * 1024, region_count=2)], facts).pools[0].unmet
    assert unmet is not None
    found = re.search(r"`hostprep size`\) with --host-memory (\d+)Mi or less", unmet.remedy)
    assert found
    whole = replace(spec(), sizing=None, size_bytes=2 * int(found[1]) * MIB, region_count=2)
    assert plan([whole], facts).pools[0].unmet is None


@pytest.mark.parametrize("per_engine", [1, 2])
def test_where_ranks_share_regions_the_advice_is_for_all_of_them(per_engine: int) -> None:
    """--host-memory is of each rank, and the plan does not know how many there are."""
    shared = replace(
        sizing(20 * 1024), integration="vllm-offloading", regions_per_engine=per_engine
    )
    unmet = plan([spec(region_count=2, sizing=shared)], node()).pools[0].unmet
    assert unmet is not None
    found = re.search(
        r"--host-memory, times the ranks of an engine, is (\d+)Mi or less", unmet.remedy
    )
    assert found
    whole = replace(
        spec(), sizing=None, size_bytes=2 // per_engine * int(found[1]) * MIB, region_count=2
    )
    assert plan([whole], node()).pools[0].unmet is None


def test_no_remedy_tells_to_write_bytes_into_a_pool_that_was_sized() -> None:
    made = plan([spec(20 * 1024, region_count=2)], node()).pools[0]
    assert {over.backing for over in made.passed_over} == {H2, BASE}
    told = "size the model for less, lower the reserve, or free memory"
    assert {over.remedy for over in made.passed_over} == {told}
    plain = replace(spec(), sizing=None, size_bytes=made.wanted_bytes, region_count=2)
    (first, *_) = plan([plain], node()).pools[0].passed_over
    assert first.remedy == "ask for less, lower the reserve, or free memory"


def test_what_has_its_layout_is_adopted_and_nothing_else_done() -> None:
    text = layout_text(sizing().to_json())
    regions = [
        replace(region(f"node0-{index}", 104 * MIB), layout=text, inode=index + 1)
        for index in range(3)
    ]
    assert kinds(plan([spec()], node(pools=[pool(*regions)]))) == ["AdoptRegion"] * 3


def test_another_layout_of_the_same_size_is_published_anew() -> None:
    old = layout_text(sizing(99).to_json())
    assert spec(99).region_bytes == 102 * MIB
    regions = [replace(region(f"node0-{n}", 104 * MIB), layout=old) for n in range(3)]
    made = plan([spec()], node(pools=[pool(*regions)]))
    assert kinds(made) == ["AdoptRegion"] * 3 + ["PublishHandoff"]


def test_regions_of_another_size_are_replaced_and_leased_ones_wait() -> None:
    there = pool(region("node0-0", 64 * MIB), region("node0-1", 64 * MIB, leased=True))
    made = plan([spec(region_count=2)], node(pools=[there]))
    removals = [action.describe() for action in made.actions if "RemoveRegion" in str(action)]
    assert removals == ["remove node0-0: the pool is sized for regions of another size"]
    assert made.pools[0].blocked == ("node0-1",)


def published(layout: str, *, leased: bool, size_bytes: int = 104 * MIB) -> object:
    there = pool(replace(region("node0-0", size_bytes, leased=leased), layout=layout))
    paths = PoolPaths("/run/hostprep", "kv")
    handoff = build_handoff(paths, node(pools=[there]), there, 2, "", sizing=sizing())
    assert handoff.boot_id == BOOT
    return handoff.regions[0].layout


def test_a_region_is_published_with_the_layout_that_slots_reads() -> None:
    found = published("", leased=False)
    assert isinstance(found, dict)
    assert Layout.parse(found, 104 * MIB) == sizing().layout


def test_a_leased_region_keeps_the_layout_that_its_holder_read() -> None:
    old = sizing(90).to_json()
    assert published(layout_text(old), leased=True) == json.loads(layout_text(old))
    assert published(layout_text(old), leased=False) == sizing().to_json()


def test_a_leased_regions_layout_outlives_the_handoff_being_withdrawn() -> None:
    """Between withdrawing and publishing the file is gone; the facts of before still know."""
    old = layout_text(sizing(90).to_json())
    leased = region("node0-0", 104 * MIB, leased=True)
    before = node(pools=[pool(replace(leased, layout=old))])
    paths = PoolPaths("/run/hostprep", "kv")
    handoff = build_handoff(paths, before, pool(leased), 2, "", sizing=sizing())
    assert handoff.regions[0].layout == json.loads(old)


def test_a_region_too_small_for_the_layout_has_none() -> None:
    assert published("", leased=True, size_bytes=64 * MIB) is None


def test_a_pool_that_is_no_longer_sized_has_no_layout() -> None:
    text = layout_text(sizing().to_json())
    regions = [replace(region(f"node0-{n}", 104 * MIB), layout=text) for n in range(3)]
    plain = replace(spec(), sizing=None, size_bytes=3 * 104 * MIB)
    made = plan([plain], node(pools=[pool(*regions)]))
    assert kinds(made) == ["AdoptRegion"] * 3 + ["PublishHandoff"]


def test_what_runs_before_kubelet_reserves_for_the_regions_that_there_are() -> None:
    script = boot_script(spec(), root="/run/hostprep")
    assert f"REGION_KIB={104 * 1024}\n" in script
    assert "SIZE_KIB=0\n" in script


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"slot_bytes": 0}, "slot_bytes is 0"),
        ({"window_tokens": 0}, "window_tokens is 0"),
        ({"kind": "convolution"}, "kind is 'convolution'"),
        ({"name": ""}, "has no name"),
    ],
)
def test_a_group_that_cannot_be_is_named(change: dict[str, object], words: str) -> None:
    group = Group(name="full", slot_bytes=512, slots=1, kind=ATTENTION)
    with pytest.raises(BadInputError, match=words):
        SlotLayout.of([replace(group, **change)], tokens_per_block=32)  # type: ignore[arg-type]


def test_the_most_that_a_resource_may_ask_for_is_a_handoff_that_readers_read() -> None:
    longest = SlotLayout.of(
        [
            Group(
                name=f"{index:063}",
                slot_bytes=1 << 32,
                slots=(1 << 50) // 8 >> 32,
                window_tokens=(1 << 31) - 1,
                kind=ATTENTION,
            )
            for index in range(8)
        ],
        min_slots=[(1 << 50) // 8 >> 32] * 8,
        tokens_per_block=1 << 20,
        model="m" * 128,
    )
    names = [f"node0-{index}" for index in range(1024)]
    there = pool(*(region(name, longest.size_bytes) for name in names))
    paths = PoolPaths("/run/hostprep", "kv")
    handoff = build_handoff(paths, node(), there, 1, "", sizing=longest)
    assert parse_handoff(handoff.to_bytes()).regions == handoff.regions
    assert len(handoff.to_bytes()) < MAX_BYTES
