"""The folders of the regions' small files: lost or with other rights, they get what they had."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from hostprep.agent.verification import verify_node
from hostprep.client.claim import claim_lock
from hostprep.client.sidecar import make_state_folder
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of

pytestmark = pytest.mark.kernel

GID = 4242
Damage = Callable[[str], None]


def _change_access(folder: str) -> None:
    os.chown(folder, -1, 0)
    os.chmod(folder, 0o700)


@pytest.mark.parametrize("gid", [GID, None])
@pytest.mark.parametrize("damage", [shutil.rmtree, _change_access])
def test_prepare_gives_them_their_access_back(node: Node, damage: Damage, gid: int | None) -> None:
    spec = pool_of(gid=gid)
    node.prepare([spec])
    folder = PoolPaths(node.root, POOL).state_of("node0-0")
    before = os.stat(folder)
    damage(folder)
    node.prepare([spec])
    after = os.stat(folder)
    assert after.st_gid == before.st_gid
    assert after.st_mode & 0o7777 == (0o755 if gid is None else 0o2770)
    users = os.stat(f"{folder}/users")
    assert (users.st_gid, users.st_mode & 0o777) == (before.st_gid, 0o660)


def test_prepare_without_a_group_leaves_the_pools_own(node: Node) -> None:
    node.prepare([pool_of(gid=GID)])
    node.prepare([pool_of()])
    status = os.stat(PoolPaths(node.root, POOL).state_of("node0-0"))
    assert (status.st_gid, status.st_mode & 0o7777) == (GID, 0o2770)


def test_who_stands_by_looks_and_repairs_nothing(node: Node) -> None:
    node.prepare([pool_of(gid=GID)])
    folder = PoolPaths(node.root, POOL).state_of("node0-0")
    shutil.rmtree(folder)
    region = verify_node(node.root, repair=False).observation.pools[0].regions[0]
    assert region.state == "Leased"
    assert not os.path.exists(folder)
    verify_node(node.root)
    assert os.path.exists(f"{folder}/users")


def test_a_folder_that_is_right_is_not_touched(node: Node) -> None:
    node.prepare([pool_of(gid=GID)])
    paths = PoolPaths(node.root, POOL)
    with claim_lock(paths):
        before = os.stat(paths.state_of("node0-0"))
        make_state_folder(paths, "node0-0")
        assert os.stat(paths.state_of("node0-0")).st_ctime_ns == before.st_ctime_ns
