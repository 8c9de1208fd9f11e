"""Prepare and release on this machine's memory: adopted, grown, shrunk, repaired, given back."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hostprep
from hostprep.api.pool_spec import RegionLayout
from hostprep.backing import MIB, Backing
from hostprep.client.handoff import Handoff, read_handoff, verify_handoff
from hostprep.errors import BadInputError, BusyError, HostprepError
from hostprep.node.apply import hugepages
from hostprep.node.apply.service import Node
from hostprep.node.facts import LedgerEntry
from hostprep.node.ledger import LedgerWriter, read_ledger
from hostprep.node.observe.host import read_mounts
from hostprep.node.observe.pools import observe_pools
from hostprep.node.plan.actions import AdoptRegion
from hostprep.paths import PoolPaths
from testbed.machine import POOL, huge_pages_total, pool_of
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

_MAP_HUGETLB = 0x40000
BACKINGS = (Backing.BASE, Backing.THP, Backing.HUGETLB_2MI)


def _handoff(node: Node) -> Handoff:
    handoff = read_handoff(PoolPaths(node.root, POOL))
    problems = [problem for _, problem in verify_handoff(PoolPaths(node.root, POOL), handoff)]
    assert problems == [None] * len(handoff.regions)
    return handoff


@pytest.mark.parametrize("backing", BACKINGS)
def test_prepared_memory_is_resident_pinned_and_published(node: Node, backing: Backing) -> None:
    node.prepare([pool_of(regions=2, backing=backing, gid=0)])

    handoff = _handoff(node)
    assert [(r.name, r.size_bytes, r.backing) for r in handoff.regions] == [
        ("node0-0", 8 * MIB, backing),
        ("node0-1", 8 * MIB, backing),
    ]
    mount = next(entry for entry in read_mounts() if entry.path == f"{node.root}/{POOL}/mem")
    assert mount.fs_type == ("hugetlbfs" if backing.is_hugetlb else "tmpfs")
    if not backing.is_hugetlb:
        assert mount.option("noswap") is not None
    assert os.stat(f"{node.root}/{POOL}/mem/node0-0").st_mode & 0o777 == 0o660


def test_what_is_right_is_adopted_not_rebuilt(node: Node) -> None:
    node.prepare([pool_of(backing=Backing.HUGETLB_2MI)])
    before = _handoff(node)

    outcome = node.prepare([pool_of(backing=Backing.HUGETLB_2MI)])

    assert all(isinstance(action, AdoptRegion) for action in outcome.plan.actions)
    assert _handoff(node) == before


def test_release_gives_back_exactly_what_was_taken(node: Node, root: Path) -> None:
    path = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages")
    before = int(path.read_text())
    path.write_text(str(before + 3))
    try:
        node.prepare([pool_of(backing=Backing.HUGETLB_2MI)])
        assert huge_pages_total() == before + 4  # 3 lay free already: only 1 was added
        node.release([POOL])
        assert huge_pages_total() == before + 3
    finally:
        path.write_text(str(before))
    assert not root.exists()


def test_pages_that_somebody_reserved_are_not_touched(node: Node) -> None:
    path = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages")
    before = int(path.read_text())
    path.write_text(str(before + 4))
    try:
        map_hugetlb = 0x40000
        theirs = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_hugetlb)
        node.prepare([pool_of(backing=Backing.HUGETLB_2MI)])
        assert huge_pages_total() >= before + 8
        theirs[:] = b"\1" * (8 * MIB)  # would be SIGBUS without the pages promised to them
        theirs.close()
        node.release([POOL])
    finally:
        path.write_text(str(before))


def test_growing_adds_regions_beside_a_leased_one(node: Node) -> None:
    small, large = pool_of(regions=1, mib=8), pool_of(regions=1, mib=24)
    node.prepare([small])
    with hostprep.attach(POOL, root=node.root) as memory:
        memory.buffer[:4] = b"live"
        node.prepare([large])
        assert memory.buffer[:4].tobytes() == b"live"
        assert sum(region.size_bytes for region in _handoff(node).regions) == 24 * MIB


def test_shrinking_takes_unleased_regions_and_waits_for_leased_ones(node: Node) -> None:
    node.prepare([pool_of(regions=3)])
    with hostprep.attach_many(POOL, regions=["node0-1"], root=node.root)[0] as memory:
        node.prepare([pool_of(regions=1)])
        assert [region.name for region in _handoff(node).regions] == ["node0-1"]
        memory.buffer[:2] = b"ok"
    with hostprep.attach_many(POOL, regions=["node0-1"], root=node.root)[0]:
        outcome = node.prepare([pool_of(regions=1, mib=4)])
        assert outcome.plan.pools[0].blocked == ("node0-1",)


def test_another_backing_replaces_regions_as_they_fall_free(node: Node) -> None:
    node.prepare([pool_of(regions=2, backing=Backing.BASE)])
    with hostprep.attach(POOL, region="node0-0", root=node.root):
        node.prepare([pool_of(regions=2, backing=Backing.HUGETLB_2MI)])
        kinds = {region.name: region.backing for region in _handoff(node).regions}
        assert kinds["node0-0"] is Backing.BASE
        assert Backing.HUGETLB_2MI in kinds.values()
    node.prepare([pool_of(regions=2, backing=Backing.HUGETLB_2MI)])
    assert {region.backing for region in _handoff(node).regions} == {Backing.HUGETLB_2MI}


def test_release_is_refused_while_leased_and_changes_nothing(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as memory:
        before = _handoff(node)
        with pytest.raises(BusyError, match="leased"):
            node.release([POOL])
        assert _handoff(node) == before
        node.release([POOL], force=True)
        assert memory.buffer[:4].tobytes() == bytes(4)
        memory.buffer[:4] = b"mine"
    assert not os.path.exists(node.root)


def test_two_pools_live_side_by_side(node: Node) -> None:
    node.prepare([pool_of(), pool_of(name="other", backing=Backing.HUGETLB_2MI)])
    node.prepare([pool_of(regions=2)])
    assert [pool.name for pool in observe_pools(node.root)] == ["kv", "other"]
    node.release(["kv"])
    assert [pool.name for pool in observe_pools(node.root)] == ["other"]
    hostprep.attach("other", root=node.root).close()


def test_an_interleaved_region_is_prepared(node: Node) -> None:
    node.prepare([pool_of(layout=RegionLayout.SINGLE, region_count=None)])
    assert _handoff(node).regions[0].placement == "interleave"
    with hostprep.attach(POOL, root=node.root) as memory:
        assert memory.numa_node is None


def test_a_backing_that_falls_short_is_given_up_for_the_next(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives less than was asked for, without an error: only reading back tells."""
    write = hugepages._write

    def write_half(folder: str, pages: int) -> None:
        write(folder, pages // 2)

    before = huge_pages_total()
    monkeypatch.setattr(hugepages, "_write", write_half)
    backings = (Backing.HUGETLB_2MI, Backing.BASE)
    outcome = node.prepare([pool_of(backings=backings, mib=32)])

    assert {region.backing for region in _handoff(node).regions} == {Backing.BASE}
    assert "gave" in outcome.shortfalls[0]
    assert "surplus" not in outcome.shortfalls[0]
    monkeypatch.undo()
    node.release([POOL])
    assert huge_pages_total() == before


def test_a_shortfall_names_the_pages_that_others_took_by_overcommit(node: Node) -> None:
    """The kernel takes them into the pool that grows, and they are not free."""
    overcommit = Path("/proc/sys/vm/nr_overcommit_hugepages")
    allowed = overcommit.read_text()
    huge = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB
    try:
        overcommit.write_text("3")
        with mmap.mmap(-1, 3 * 2 * MIB, flags=huge) as others:
            overcommit.write_text(allowed)
            for page in range(3):
                others[page * 2 * MIB] = 1
            backings = (Backing.HUGETLB_2MI, Backing.BASE)
            outcome = node.prepare([pool_of(backings=backings, mib=32)])
    finally:
        overcommit.write_text(allowed)
    assert {region.backing for region in _handoff(node).regions} == {Backing.BASE}
    assert "; others use 3 surplus pages there" in outcome.shortfalls[0]


def test_a_killed_change_of_huge_pages_is_settled_by_the_next_run(node: Node) -> None:
    """Killed between the write to the kernel and the account of it."""
    before = huge_pages_total()
    node.prepare([pool_of()])
    paths = PoolPaths(node.root, POOL)
    ledger = read_ledger(paths)
    assert ledger is not None

    class Killed(BaseException):
        pass

    class DyingWriter(LedgerWriter):
        def save(self, ledger: object) -> None:
            if getattr(ledger, "pending", None) is None:
                raise Killed
            super().save(ledger)  # type: ignore[arg-type]

    with pytest.raises(Killed):
        hugepages.add_pages(DyingWriter(paths, ledger), LedgerEntry(0, 2 * MIB, 5))
    assert huge_pages_total() == before + 5

    node.prepare([pool_of()])
    node.release([POOL])
    assert huge_pages_total() == before


def test_two_prepares_at_once_one_works_and_the_other_waits(node: Node) -> None:
    command = [sys.executable, "-m", "hostprep", "prepare", "--name", POOL, "--size", "64Mi"]
    command += ["--backing", "Base", "--root", node.root, "--progress", "none"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted("adopted" in output for output in outputs) == [False, True]
    assert len(_handoff(node).regions) == 1


def test_a_dirty_region_is_scrubbed_by_prepare(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as memory:
        memory.buffer[:4] = b"old!"
    node.prepare([pool_of()])
    assert observe_pools(node.root)[0].regions[0].clean
    with open(f"{node.root}/{POOL}/mem/node0-0", "rb") as file:
        assert file.read(4) == bytes(4)


def test_a_region_with_a_bad_page_costs_itself_only(node: Node) -> None:
    """verify --pages leaves word (userfaultfd's poison stands in for the hardware: see walk)."""
    node.prepare([pool_of(regions=2)])
    inodes = {region.name: region.st_ino for region in _handoff(node).regions}
    mark = PoolPaths(node.root, POOL).bad_mark("node0-1")
    Path(mark).write_text("region node0-1 has 1 bad page(s)")
    assert "Damaged" in run_hostprep("status", "--root", node.root).stdout

    node.prepare([pool_of(regions=2)])

    after = {region.name: region.st_ino for region in _handoff(node).regions}
    assert after["node0-0"] == inodes["node0-0"]
    assert after["node0-1"] != inodes["node0-1"]
    assert not os.path.exists(mark)


def test_a_damaged_leased_region_is_left_alone_until_it_is_free(node: Node) -> None:
    node.prepare([pool_of(regions=2)])
    with hostprep.attach(POOL, region="node0-1", root=node.root) as memory:
        mark = PoolPaths(node.root, POOL).bad_mark("node0-1")
        Path(mark).write_text("has a bad page")
        memory.buffer[:4] = b"live"
        node.prepare([pool_of(regions=2)])
        assert memory.buffer[:4].tobytes() == b"live"
        assert [region.name for region in _handoff(node).regions] == ["node0-0"]
    node.prepare([pool_of(regions=2)])
    assert len(_handoff(node).regions) == 2


def test_more_than_the_node_has_is_bad_input_and_changes_nothing(node: Node, root: Path) -> None:
    with pytest.raises(BadInputError, match="pool kv"):
        node.prepare([pool_of(size_bytes=1 << 50)])
    with pytest.raises(HostprepError):
        node.prepare([pool_of(backing=Backing.HUGETLB_1GI, mib=20 * 1024)])
    assert not root.exists()


def test_the_pool_is_populated_in_a_cgroup_of_the_hosts_own(node: Node) -> None:
    """From inside a cgroup that would be charged, as a pod's is."""
    tops = [Path(entry.path) for entry in read_mounts() if entry.fs_type.startswith("cgroup")]
    top = next(path for path in tops if list(path.glob("memory.*")))
    own = top / f"hostprep-test-{os.getpid()}"
    own.mkdir()
    try:
        prepare = f"prepare --name {POOL} --size 16Mi --backing Base --root {node.root}"
        script = f"echo $$ > {own}/cgroup.procs && exec {sys.executable} -m hostprep {prepare}"
        subprocess.run(["sh", "-c", script], check=True, timeout=60)
        assert _charged(top / "hostprep") >= 16 * MIB
        assert _charged(own) < 16 * MIB
        node.release([POOL])
        assert not (top / "hostprep").exists()
    finally:
        own.rmdir()


def _charged(folder: Path) -> int:
    names = ("memory.usage_in_bytes", "memory.current")
    return sum(int(path.read_text()) for name in names if (path := folder / name).exists())
