"""Machines that cannot give what is asked for: refused with what to do, or the next in the list."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, MIB, Backing
from hostprep.errors import HostprepError
from hostprep.node.apply.service import check_met
from hostprep.node.facts import Facts
from hostprep.node.observe import HostRoot, observe
from hostprep.node.plan import plan
from hostprep.node.plan.actions import PoolPlan, ReserveHugePages
from tests.support import host_trees

pytestmark = pytest.mark.unit

H1, H2, THP, BASE = Backing.HUGETLB_1GI, Backing.HUGETLB_2MI, Backing.THP, Backing.BASE


def _facts(tree: Path) -> Facts:
    return observe(host=HostRoot(tree), root="/run/hostprep")


def _planned(facts: Facts, size_bytes: int, *backings: Backing) -> PoolPlan:
    spec = PoolSpec(name="kv", size_bytes=size_bytes, backings=backings)
    return plan([spec], facts).pools[0]


def _refused(facts: Facts, size_bytes: int, *backings: Backing) -> HostprepError:
    """Return what `hostprep prepare` says."""
    spec = PoolSpec(name="kv", size_bytes=size_bytes, backings=backings)
    wanted = plan([spec], facts)
    assert wanted.actions == ()
    with pytest.raises(HostprepError) as caught:
        check_met(wanted, [spec])
    return caught.value


@pytest.fixture
def without_hugetlbfs(tmp_path: Path) -> Facts:
    """CONFIG_HUGETLBFS off: no such line in /proc/filesystems, and no pools in /sys either."""
    return _facts(host_trees.small(tmp_path, huge_sizes=()))


@pytest.fixture
def without_free_pages(tmp_path: Path) -> Facts:
    """A pool of 512 pages on each node, all in use, and little memory beside it."""
    return _facts(
        host_trees.two_socket_8gpu(
            tmp_path,
            huge_2mi_per_node=512,
            huge_2mi_free_per_node=0,
            free_bytes_per_node=2 * GIB,
        )
    )


@pytest.fixture
def swapping(tmp_path: Path) -> Facts:
    """Swap is on, and Linux 6.1 populates but has no noswap."""
    return _facts(host_trees.small(tmp_path, swap_bytes=GIB, release="6.1.0-18-amd64"))


@pytest.mark.parametrize("backing", [H1, H2])
def test_without_hugetlbfs_huge_pages_are_refused_with_what_to_do(
    without_hugetlbfs: Facts, backing: Backing
) -> None:
    error = _refused(without_hugetlbfs, 64 * MIB * (16 if backing is H1 else 1), backing)
    assert (error.reason, error.exit_code) == ("NoSuchPages", 2)
    assert "this CPU or kernel has no pages of" in error.message
    assert error.remedy is not None
    assert "choose another backing" in error.remedy


def test_without_hugetlbfs_the_next_in_the_list_is_taken_and_the_reason_told(
    without_hugetlbfs: Facts,
) -> None:
    made = _planned(without_hugetlbfs, GIB, H1, H2, BASE)
    assert made.backings == (BASE,)
    assert [passed.backing for passed in made.passed_over] == [H1, H2]
    assert all("this CPU or kernel has no pages" in passed.why for passed in made.passed_over)


def test_no_free_huge_pages_and_no_memory_to_add_any_is_refused(without_free_pages: Facts) -> None:
    error = _refused(without_free_pages, 64 * GIB, H2)
    assert error.reason == "NotEnoughMemory"
    assert "node 0" in error.message
    assert error.remedy is not None
    assert "or less, which HugeTLB2Mi can give now" in error.remedy


def test_huge_pages_in_use_by_others_are_not_counted_as_ours(without_free_pages: Facts) -> None:
    """512 pages are there on each node, just as many as are needed: none of them is free."""
    spec = PoolSpec(name="kv", size_bytes=2 * GIB, backings=(H2,))
    actions = plan([spec], without_free_pages).actions
    reserved = [(a.node_id, a.pages) for a in actions if isinstance(a, ReserveHugePages)]
    assert reserved == [(0, 512), (1, 512)]


def test_where_no_huge_page_is_to_be_had_base_pages_are_taken(tmp_path: Path) -> None:
    """Plenty of memory, in crumbs: none of it becomes a huge page."""
    facts = _facts(host_trees.fragmented(tmp_path, huge_2mi_per_node=64, huge_2mi_free_per_node=0))
    made = _planned(facts, 32 * GIB, H2, THP, BASE)
    assert made.backings == (BASE,)
    assert [passed.backing for passed in made.passed_over] == [H2, THP]
    assert _refused(facts, 32 * GIB, H2).reason == "Fragmented"


@pytest.mark.parametrize("backing", [THP, BASE])
def test_swap_without_noswap_is_refused_with_what_to_do(swapping: Facts, backing: Backing) -> None:
    error = _refused(swapping, GIB, backing)
    assert (error.reason, error.exit_code) == ("NotPinned", 2)
    assert error.remedy is not None
    for way in ("swapoff -a", "HugeTLB2Mi", "newer kernel"):
        assert way in error.remedy


def test_swap_without_noswap_leaves_huge_pages(swapping: Facts) -> None:
    made = _planned(swapping, GIB, BASE, H2)
    assert made.backings == (H2,)
    assert "noswap" in made.passed_over[0].why
