"""A process that maps a region for reading, without a lease, costs no other pool its pages."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.backing import MIB, Backing
from hostprep.client.handoff import read_handoff
from hostprep.errors import BusyError
from hostprep.node.apply.service import Node
from hostprep.node.ledger import read_ledger
from hostprep.node.observe.pools import held_files, observe_pools
from hostprep.paths import PoolPaths
from testbed.machine import pool_of
from tests.kernel.hostile.attackers import ATTACKED, BYSTANDER, BYSTANDER_GID, ENGINE, GID, Pools
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

PAGES = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB")
FOREIGN = 6
"""Free huge pages of the machine's own, more than one region of the attacked pool has."""


def count(name: str) -> int:
    return int((PAGES / name).read_text())


@pytest.fixture
def foreign_pages() -> Iterator[None]:
    """Huge pages that lie free for somebody else, as on a machine that reserves some at boot."""
    (PAGES / "nr_hugepages").write_text(str(count("nr_hugepages") + FOREIGN))
    yield
    (PAGES / "nr_hugepages").write_text(str(count("nr_hugepages") - FOREIGN))


@pytest.fixture
def huge_pools(node: Node, foreign_pages: None) -> Iterator[Pools]:
    """An attacked pool of two regions of four huge pages, all of them added by it."""
    _ = foreign_pages
    Path(node.root).parent.chmod(0o755)
    taken = count("free_hugepages")
    with _kept_by_another(taken):
        node.prepare([pool_of(name=ATTACKED, regions=2, gid=GID, backing=Backing.HUGETLB_2MI)])
    yield Pools(node)
    for name in [pool.name for pool in observe_pools(node.root)]:
        node.release([name], force=True)


@contextmanager
def _kept_by_another(pages: int) -> Iterator[None]:
    """Have another program use these free pages, so that the pool has to add its own."""
    with mmap.mmap(-1, pages * 2 * MIB, mmap.MAP_SHARED | 0x40000 | 21 << 26) as mapping:
        for offset in range(0, len(mapping), 2 * MIB):
            mapping[offset] = 1
        yield


def map_for_reading(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY)
    mapping = mmap.mmap(fd, 8 * MIB, prot=mmap.PROT_READ)
    os.close(fd)
    return mapping


def region_path(pools: Pools) -> str:
    return pools.attacked.region_of(read_handoff(pools.attacked).regions[0].path)


def test_pages_that_a_reader_keeps_are_never_taken_from_others(huge_pools: Pools) -> None:
    pools, node = huge_pools, huge_pools.node
    free, total, path = count("free_hugepages"), count("nr_hugepages"), region_path(huge_pools)
    with ENGINE.keeps(lambda: map_for_reading(path)):
        released = run_hostprep("release", ATTACKED, "--force", "--root", pools.root)
        assert f"not given back: 4 huge pages of {ATTACKED}" in released.stdout, released.stderr

        assert count("surplus_hugepages") == 0
        assert count("free_hugepages") == free, "another's free pages were given back"
        assert count("nr_hugepages") == total - 4
        ledger = read_ledger(pools.attacked)
        assert ledger is not None
        assert sum(entry.pages for entry in ledger.taken) == 4, "the reader's pages are forgotten"
        node.release([ATTACKED])  # nothing that could be given back yet
        assert count("free_hugepages") == free

        other = pool_of(name=BYSTANDER, gid=BYSTANDER_GID, backing=Backing.HUGETLB_2MI)
        node.prepare([other])
        assert read_handoff(pools.bystander).regions[0].backing is Backing.HUGETLB_2MI
        node.release([BYSTANDER])
    node.release([ATTACKED])
    assert count("nr_hugepages") == total - 8
    assert count("free_hugepages") == free
    assert not os.path.exists(node.root)


def empty_and_keep(path: str) -> int:
    fd = os.open(path, os.O_RDWR)
    os.ftruncate(fd, 0)
    return fd


def test_an_emptied_region_that_an_engine_keeps_is_not_in_the_way(huge_pools: Pools) -> None:
    """It has no page that could not be given back, and its mount cannot be taken away."""
    pools, node, path = huge_pools, huge_pools.node, region_path(huge_pools)
    spec = pool_of(name=ATTACKED, gid=GID, backing=Backing.HUGETLB_2MI)
    with ENGINE.keeps(lambda: empty_and_keep(path)):
        for _ in range(2):
            node.release([ATTACKED], force=True)
            node.prepare([spec])
    node.release([ATTACKED])
    assert not os.path.exists(pools.root)


def test_a_region_that_is_read_is_not_removed(huge_pools: Pools) -> None:
    pools, node, path = huge_pools, huge_pools.node, region_path(huge_pools)
    handoff = Path(pools.attacked.handoff).read_bytes()
    with ENGINE.keeps(lambda: map_for_reading(path)) as reader:
        with pytest.raises(BusyError, match=rf"process {reader} \("):
            node.release([ATTACKED])
        absent = PoolSpec(name=ATTACKED, state=PoolState.ABSENT, size_bytes=1)
        pools.specs = [absent]
        error = pools.errors()[ATTACKED]
        assert error is not None
        assert error.reason == "Leased"
        assert Path(pools.attacked.handoff).read_bytes() == handoff, "something was changed"
    assert pools.errors()[ATTACKED] is None
    assert not os.path.exists(pools.attacked.folder)


def test_a_pool_is_prepared_again_beside_pages_that_a_reader_keeps(huge_pools: Pools) -> None:
    pools, node, path = huge_pools, huge_pools.node, region_path(huge_pools)
    total = count("nr_hugepages")
    spec = pool_of(name=ATTACKED, gid=GID, backing=Backing.HUGETLB_2MI)
    pools.specs = [spec]
    with ENGINE.keeps(lambda: map_for_reading(path)):
        node.release([ATTACKED], force=True)
        with _kept_by_another(count("free_hugepages")):
            node.prepare([spec])
        assert len(held_files(pools.attacked)) == 1
        assert pools.reconcile()[ATTACKED].steps == (), "a round has something to do for ever"
    pools.reconcile()
    assert held_files(pools.attacked) == []
    node.release([ATTACKED])
    assert count("nr_hugepages") == total - 8
    assert count("surplus_hugepages") == 0
    assert not os.path.exists(PoolPaths(node.root, ATTACKED).folder)
