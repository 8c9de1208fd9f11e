"""Pools that shall be absent: what they give back, and what holds that up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.facts import Facts, HugePages, LedgerEntry, PoolFacts
from hostprep.node.plan import plan
from hostprep.node.plan.actions import Plan, RemoveRegion, ReturnHugePages, UnmountMemory
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


def returned(made: Plan) -> list[int]:
    return [a.pages for a in made.actions if isinstance(a, ReturnHugePages)]


def absent(**more: object) -> PoolSpec:
    return spec(1, state=PoolState.ABSENT, **more)


def test_a_release_gives_back_exactly_what_was_taken() -> None:
    there = pool(
        region("node0-0", 4 * GIB),
        region("node1-0", 2 * GIB, BASE, mount_dir="mem-base"),
        region("node0-1", GIB, finished=False, resident=0),
        taken=[LedgerEntry(0, TWO_MI, 1500), LedgerEntry(1, TWO_MI, 7)],
    )
    made = plan([absent()], with_pool(there))
    assert kinds(made) == [
        "DropHandoff",
        *["RemoveRegion"] * 3,
        *["UnmountMemory"] * 2,
        *["ReturnHugePages"] * 2,
        "RemovePool",
    ]
    assert returned(made) == [1500, 7]
    folders = [a.mount_dir for a in made.actions if isinstance(a, UnmountMemory)]
    assert folders == ["mem", "mem-base"]


def test_a_leased_pool_is_released_by_force_only() -> None:
    there = pool(region("node0-0", 4 * GIB), region("node0-1", 4 * GIB, leased=True))
    kept = plan([absent()], with_pool(there))
    assert kept.actions == ()
    assert kept.pools[0].blocked == ("node0-1",)
    forced = plan([absent(force=True)], with_pool(there))
    assert removed(forced) == ["node0-0", "node0-1"]
    assert all(a.force for a in forced.actions if isinstance(a, RemoveRegion))


def test_a_release_of_nothing_does_nothing() -> None:
    assert plan([absent()], machine()).actions == ()


def test_a_release_of_another_boot_returns_no_pages() -> None:
    there = pool(taken=[LedgerEntry(0, TWO_MI, 1500)], boot_id="yesterday")
    assert kinds(plan([absent()], machine(pools=[there]))) == ["DropHandoff", "RemovePool"]


def test_what_was_never_published_is_not_withdrawn() -> None:
    there = pool(region("node0-0", GIB), published=False, has_handoff=False)
    assert "DropHandoff" not in kinds(plan([absent()], with_pool(there)))
    old = pool(boot_id="yesterday", published=False, has_handoff=False)
    (first, _) = plan([absent()], machine(pools=[old])).actions
    assert first.describe() == "withdraw what is recorded of the pool: it is of another boot"


def test_the_memory_of_a_released_pool_serves_the_others() -> None:
    there = pool(region("node0-0", 8 * GIB), taken=[LedgerEntry(0, TWO_MI, 4096)])
    node = numa_node(free=GIB, huge=[HugePages(TWO_MI, 4096, 0, 0)])
    facts = machine(node, pools=[there])
    new: Sequence[PoolSpec] = [spec(8 * GIB, BASE, name="new", priority=9), absent()]
    made = plan(new, facts)
    assert [p.name for p in made.pools] == ["kv", "new"]
    assert made.pools[1].unmet is None


@pytest.mark.parametrize("state", list(PoolState))
def test_facts_that_no_code_expects_cost_their_pool_only(state: PoolState) -> None:
    sound = region("node0-0", GIB, BASE)
    if state is PoolState.ABSENT:
        strange = replace(sound, backing=None)  # type: ignore[arg-type]
    else:
        strange = replace(sound, leased=True, layout="{")
    facts = with_pool(replace(pool(sound), regions=(strange,)))
    made = plan([spec(GIB, BASE, state=state), spec(GIB, BASE, name="other")], facts)

    outcome = {planned.name: planned.unmet for planned in made.pools}
    assert outcome["kv"] is not None
    assert outcome["kv"].reason == "CannotPlan"
    assert {action.pool for action in made.actions} == {"other"}
    assert outcome["other"] is None
