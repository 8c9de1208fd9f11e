"""A pool sized for a model, on this machine's memory: the layout is in the handoff, and stays."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import hostprep
from hostprep.api.pool_spec import PoolSpec
from hostprep.api.slot_layout import SlotLayout
from hostprep.backing import MIB, Backing
from hostprep.client.handoff import Region, read_handoff
from hostprep.layout import ATTENTION, RECURRENT, Group, Layout
from hostprep.node.apply.service import Node
from hostprep.node.plan.actions import AdoptRegion, PublishHandoff
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel


def sizing(slots: int, model: str = "") -> SlotLayout:
    return SlotLayout.of(
        (
            Group(name="full", slot_bytes=64 << 10, slots=slots, kind=ATTENTION),
            Group(name="state", slot_bytes=1 << 10, slots=4, kind=RECURRENT),
        ),
        tokens_per_block=32,
        model=model,
    )


def sized(slots: int, backing: Backing = Backing.BASE) -> PoolSpec:
    return pool_of(regions=2, backing=backing, size_bytes=None, sizing=sizing(slots))


def regions(node: Node) -> tuple[Region, ...]:
    return read_handoff(PoolPaths(node.root, POOL)).regions


@pytest.mark.parametrize("backing", [Backing.BASE, Backing.THP, Backing.HUGETLB_2MI])
def test_every_region_carries_the_layout_and_is_adopted_with_it(
    node: Node, backing: Backing
) -> None:
    node.prepare([sized(40, backing)])
    found = regions(node)
    assert [region.size_bytes for region in found] == [6 * MIB] * 2
    for region in found:
        assert region.layout is not None
        assert Layout.parse(region.layout, region.size_bytes) == sizing(40).layout

    outcome = node.prepare([sized(40, backing)])
    assert all(isinstance(action, AdoptRegion) for action in outcome.plan.actions)


def test_status_tells_programs_which_model_a_region_is_for(node: Node) -> None:
    plain = pool_of(name="plain", regions=1, backing=Backing.BASE, size_bytes=2 * MIB)
    node.prepare([replace(sized(40), sizing=sizing(40, "made-up")), plain])
    told = json.loads(run_hostprep("status", "--root", node.root, "-o", "json").stdout)
    found = {pool["name"]: {one["sized_for"] for one in pool["regions"]} for pool in told["pools"]}
    assert found == {POOL: {"made-up"}, "plain": {None}}


def test_another_layout_of_the_same_size_is_published_without_touching_memory(node: Node) -> None:
    node.prepare([sized(40)])
    inodes = [region.st_ino for region in regions(node)]
    outcome = node.prepare([sized(41)])
    kinds = {type(action) for action in outcome.plan.actions}
    assert kinds == {AdoptRegion, PublishHandoff}
    assert [region.st_ino for region in regions(node)] == inodes
    assert all(region.layout == sizing(41).to_json() for region in regions(node))


def test_what_is_leased_keeps_its_layout_until_it_is_released(node: Node) -> None:
    node.prepare([sized(40)])
    with hostprep.attach(POOL, root=node.root) as memory:
        node.prepare([sized(41)])
        layouts = {region.name: region.layout for region in regions(node)}
        assert layouts.pop(memory.region.name) == sizing(40).to_json()
        assert list(layouts.values()) == [sizing(41).to_json()]
        assert node.plan([sized(41)]).changes_anything is False
    node.prepare([sized(41)])
    assert all(region.layout == sizing(41).to_json() for region in regions(node))


def test_a_larger_layout_replaces_the_regions(node: Node) -> None:
    node.prepare([sized(40)])
    node.prepare([sized(400)])
    assert [region.size_bytes for region in regions(node)] == [28 * MIB] * 2
    assert all(region.layout == sizing(400).to_json() for region in regions(node))


def test_a_pool_without_sizing_has_no_layout(node: Node) -> None:
    node.prepare([sized(40)])
    node.prepare([pool_of(regions=2, mib=6)])
    assert [region.layout for region in regions(node)] == [None, None]
