"""An engine that enlarges its region's file gets no huge page beyond what its pool was given."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hostprep
from hostprep.backing import MIB, Backing
from hostprep.client.handoff import read_handoff
from hostprep.node.apply.service import Node
from hostprep.node.observe.host import read_mounts
from testbed.machine import pool_of
from tests.kernel.hostile.attackers import (
    ATTACKED,
    BYSTANDER,
    BYSTANDER_GID,
    ENGINE,
    GID,
    REGION,
    Pools,
    attacked_node,
)

pytestmark = pytest.mark.kernel

PAGES = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB")
RESERVED = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages")
PAGE = 2 * MIB
REGION_PAGES = 4
FOREIGN = 32
"""Free huge pages of the machine's own, as where some are reserved at boot for another program."""
MAP_NORESERVE = 0x4000


def count(name: str) -> int:
    return int((PAGES / name).read_text())


def untaken() -> int:
    """Free huge pages that no process has reserved."""
    return count("free_hugepages") - int(RESERVED.read_text())


@pytest.fixture
def huge_pools(node: Node) -> Iterator[Pools]:
    """Both pools in huge pages, and more of those free beside them."""
    specs = [
        pool_of(name=ATTACKED, regions=2, gid=GID, backing=Backing.HUGETLB_2MI),
        pool_of(name=BYSTANDER, gid=BYSTANDER_GID, backing=Backing.HUGETLB_2MI),
    ]
    with attacked_node(node, specs) as pools:
        (PAGES / "nr_hugepages").write_text(str(count("nr_hugepages") + FOREIGN))
        yield pools
        pools.node.release([ATTACKED, BYSTANDER], force=True)
        (PAGES / "nr_hugepages").write_text(str(count("nr_hugepages") - FOREIGN))


def touch(mapping: mmap.mmap) -> None:
    """Write to every page, in a child: what there is no page for ends it by SIGBUS."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        for offset in range(0, len(mapping), PAGE):
            mapping[offset] = 1
        os._exit(0)
    os.waitpid(pid, 0)


def by_mapping(fd: int, size: int) -> object:
    os.ftruncate(fd, size)
    return mmap.mmap(fd, size)


def by_mapping_without_reserving(fd: int, size: int) -> object:
    os.ftruncate(fd, size)
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | MAP_NORESERVE)
    touch(mapping)
    return mapping


def by_a_private_mapping(fd: int, size: int) -> object:
    """Copies of the region's own pages, without any change to the file."""
    _ = size
    mapping = mmap.mmap(fd, REGION_PAGES * PAGE, flags=mmap.MAP_PRIVATE)
    mapping[:] = bytes(len(mapping))
    return mapping


def by_allocating(fd: int, size: int) -> object:
    os.posix_fallocate(fd, 0, size)
    return None


Attack = Callable[[int, int], object]
ATTACKS = [by_mapping, by_mapping_without_reserving, by_a_private_mapping, by_allocating]


def enlarge(path: str, attack: Attack, pages: int) -> list[object]:
    """Try to have so many pages in a region's file; return what is held then."""
    fd = os.open(path, os.O_RDWR)
    try:
        return [fd, attack(fd, pages * PAGE)]
    except OSError:
        return [fd]


def path_of(pools: Pools, index: int = 0) -> str:
    return pools.attacked.region_of(read_handoff(pools.attacked).regions[index].path)


@pytest.mark.parametrize("attack", ATTACKS)
def test_free_pages_of_the_machine_are_not_to_be_had(huge_pools: Pools, attack: Attack) -> None:
    pools, path, free = huge_pools, path_of(huge_pools), untaken()
    inodes = [region.st_ino for region in read_handoff(pools.attacked).regions]
    with ENGINE.keeps(lambda: enlarge(path, attack, 20)):
        assert untaken() == free, "free pages of the machine were taken"
        pools.bystander_works()
        assert read_handoff(pools.attacked).regions[-1].st_ino == inodes[1], "the other one went"
    pools.reconcile()
    assert untaken() == free
    sizes = [region.size_bytes for region in read_handoff(pools.attacked).regions]
    assert sizes == [REGION_PAGES * PAGE] * 2
    mounts = [m for m in read_mounts() if m.path.startswith(pools.attacked.folder)]
    assert [os.path.basename(m.path) for m in mounts] == ["mem"], "it is made again in its place"


def test_a_tmpfs_gives_no_more_either(pools: Pools) -> None:
    path = path_of(pools)
    with ENGINE.keeps(lambda: enlarge(path, by_allocating, 20)):
        assert os.stat(path).st_blocks * 512 == REGION_PAGES * PAGE
        pools.bystander_works()


def test_a_pool_that_became_smaller_leaves_room_for_no_more_than_it_had(huge_pools: Pools) -> None:
    pools = huge_pools
    pools.specs[0] = pool_of(name=ATTACKED, gid=GID, backing=Backing.HUGETLB_2MI)
    pools.reconcile()
    path, free = path_of(pools), untaken()
    with ENGINE.keeps(lambda: enlarge(path, by_mapping_without_reserving, 20)):
        assert free - untaken() == REGION_PAGES, "what the removed region had, and nothing else"
        pools.bystander_works()


def test_a_pool_whose_room_is_taken_grows_all_the_same(huge_pools: Pools) -> None:
    """The engine spoils its own region, and keeps no other from being made."""
    pools = huge_pools
    pools.specs[0] = pool_of(name=ATTACKED, gid=GID, backing=Backing.HUGETLB_2MI)
    pools.reconcile()
    path = path_of(pools)
    with (
        hostprep.attach(ATTACKED, region=REGION, root=pools.root),
        ENGINE.keeps(lambda: enlarge(path, by_mapping_without_reserving, 20)),
    ):
        pools.specs[0] = pool_of(name=ATTACKED, regions=3, gid=GID, backing=Backing.HUGETLB_2MI)
        assert pools.errors() == {ATTACKED: None, BYSTANDER: None}
        (region,) = read_handoff(pools.attacked).regions
        assert region.path == "mem-hugetlb2mi/node0-1"
    pools.reconcile()
    regions = {region.name: region for region in read_handoff(pools.attacked).regions}
    assert set(regions) == {"node0-0", "node0-1", "node0-2"}
    assert regions["node0-2"].path == "mem/node0-2"
