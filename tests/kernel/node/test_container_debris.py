"""Folders that containerd made where a container's mounts had no source: taken or cleared away.

It makes every missing source of a bind mount (os.MkdirAll, mode 0755), and kubelet starts a
container again with the mounts of its first start, whatever became of the pool meanwhile.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostprep.backing import Backing
from hostprep.client.handoff import Region, read_handoff, verify_handoff
from hostprep.deviceplugin.plugin import allocation_of
from hostprep.errors import FailedError, HostprepError
from hostprep.node.apply.folder import clear_debris, is_debris
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of
from tests.kernel.worker_process import WorkerProcess, results_of, wanted

pytestmark = pytest.mark.kernel

GID = 4242
BACKINGS = [Backing.BASE, Backing.HUGETLB_2MI]


def _paths(node: Node) -> PoolPaths:
    return PoolPaths(node.root, POOL)


def _start_again(node: Node, *regions: Region) -> None:
    """Make what the mounts of a container with these regions lack."""
    allocation = allocation_of(_paths(node), regions)
    for mount in sorted(allocation.mounts, key=lambda mount: mount.container_path):
        if not os.path.exists(mount.host_path):
            os.makedirs(mount.host_path, 0o755)


def _verify(node: Node, regions: int) -> None:
    handoff = read_handoff(_paths(node))
    assert [error for _, error in verify_handoff(_paths(node), handoff)] == [None] * regions
    zipapp = Path(node.root, "hostprep.pyz")
    assert zipapp.read_bytes().startswith(b"#!")


@pytest.mark.parametrize("backing", BACKINGS)
def test_a_pool_is_made_where_a_container_was_started_again(node: Node, backing: Backing) -> None:
    spec = pool_of(regions=2, backing=backing, gid=GID)
    node.prepare([spec])
    regions = read_handoff(_paths(node)).regions
    node.release([POOL])
    _start_again(node, *regions)
    Path(node.root, ".made").touch()
    inode = os.stat(_paths(node).folder).st_ino

    node.prepare([spec])
    _verify(node, 2)
    assert os.stat(_paths(node).folder).st_ino == inode
    for region in regions:
        status = os.stat(_paths(node).state_of(region.name))
        assert (status.st_gid, status.st_mode & 0o7777) == (GID, 0o2770)
    node.release([POOL])
    assert not os.path.exists(node.root)


@pytest.mark.parametrize("backing", BACKINGS)
def test_a_region_is_rebuilt_where_a_container_was_started_again(
    node: Node, backing: Backing
) -> None:
    spec = pool_of(regions=2, backing=backing, gid=GID)
    node.prepare([spec])
    region = read_handoff(_paths(node)).regions[0]
    os.unlink(_paths(node).region_of(region.path))
    _start_again(node, region)
    assert os.path.isdir(_paths(node).region_of(region.path))

    node.prepare([spec])
    _verify(node, 2)
    node.release([POOL])
    assert not os.path.exists(node.root)


def test_the_zipapps_place_holds_up_no_pool_of_the_agents(node: Node) -> None:
    os.makedirs(f"{node.root}/hostprep.pyz")
    with WorkerProcess(node.root) as worker:
        assert results_of(worker.round(*wanted(pool_of())))[POOL].error is None
    _verify(node, 1)


def test_the_last_release_clears_what_other_pools_left(node: Node) -> None:
    node.prepare([pool_of(), pool_of(name="other")])
    regions = read_handoff(_paths(node)).regions
    node.release([POOL])
    _start_again(node, *regions)
    os.unlink(f"{node.root}/hostprep.pyz")
    os.mkdir(f"{node.root}/hostprep.pyz")
    node.release(["other"])
    assert not os.path.exists(node.root)


def test_a_folder_that_a_pod_may_wait_in_stays(node: Node) -> None:
    node.prepare([pool_of()])
    os.makedirs(f"{node.root}/waited-for/mem")
    node.release([POOL])
    assert os.path.isdir(f"{node.root}/waited-for/mem")


def test_what_is_no_empty_folder_is_left_alone_and_named(node: Node) -> None:
    node.prepare([pool_of(regions=2)])
    region = read_handoff(_paths(node)).regions[0]
    path = _paths(node).region_of(region.path)
    os.unlink(path)
    os.makedirs(f"{path}/somebodys")
    os.chown(f"{path}/somebodys", 4321, -1)
    with pytest.raises(FailedError, match=f"put the region at {path}"):
        node.prepare([pool_of(regions=2)])
    assert os.path.isdir(f"{path}/somebodys")


def test_a_pools_folder_with_a_file_deep_in_it_is_refused(node: Node) -> None:
    deep = Path(node.root, POOL, "devices", "node0-0", "links")
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    with pytest.raises(HostprepError, match="is no pool"):
        node.prepare([pool_of()])
    assert (deep / "file").read_text() == "x"


@pytest.mark.parametrize("kind", ["file", "link", "foreign"])
def test_only_empty_folders_of_ours_are_debris(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "kv"
    (folder / "mem" / "node0-0").mkdir(parents=True)
    (folder / "tickets").mkdir()
    (tmp_path / "elsewhere").mkdir()
    assert is_debris(str(folder))
    stray = folder / "mem" / "stray"
    if kind == "file":
        stray.write_text("")
    elif kind == "link":
        stray.symlink_to(tmp_path / "elsewhere")
    elif os.geteuid() != 0:
        pytest.skip("needs root: chown")
    else:
        stray.mkdir()
        os.chown(stray, 4321, -1)

    clear_debris(str(folder))
    assert os.path.lexists(stray)
    assert (folder / "tickets").is_dir()
    if kind == "foreign":
        stray.rmdir()
    else:
        stray.unlink()
    clear_debris(str(folder))
    assert sorted(os.listdir(tmp_path)) == ["elsewhere"]
