"""Engines of the pool's group, without any right of their own: as in an ordinary pod."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

import hostprep
from hostprep.errors import HostprepError
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of
from tests.support.processes import hostprep_as

pytestmark = pytest.mark.kernel

GROUP = 54321


def _as_engine(*arguments: str, group: int = GROUP) -> subprocess.CompletedProcess[str]:
    return hostprep_as(4321, group, *arguments)


@pytest.fixture
def shared(node: Node) -> Node:
    """A node whose folders above the root let everybody pass."""
    Path(node.root).parent.chmod(0o755)
    node.prepare([pool_of(regions=2, gid=GROUP)])
    return node


def test_an_engine_of_the_group_attaches_to_a_clean_region(shared: Node) -> None:
    done = _as_engine("attach", "--pool", POOL, "--root", shared.root, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["size_bytes"] == 8 << 20


def test_a_dirty_region_waits_for_the_agents_scrub(shared: Node) -> None:
    command = ("attach", "--pool", POOL, "--root", shared.root, "--region", "node0-0")
    assert _as_engine(*command).returncode == 0
    refused = _as_engine(*command)
    assert refused.returncode == 1
    assert "scrub" in refused.stderr
    shared.prepare([pool_of(regions=2, gid=GROUP)])
    assert _as_engine(*command).returncode == 0


def test_an_engine_execs_with_a_link_of_its_own(shared: Node, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    done = _as_engine(
        "exec", "--pool", POOL, "--root", shared.root, "--link", f"{tmp_path}/kv.bin", "--",
        "sh", "-c", f"readlink -f {tmp_path}/kv.bin",
    )  # fmt: skip
    assert done.stdout.strip() == f"{shared.root}/{POOL}/mem/node0-0", done.stderr


def test_another_group_is_kept_out(shared: Node) -> None:
    done = _as_engine("attach", "--pool", POOL, "--root", shared.root, group=1234)
    assert done.returncode == 2
    assert "no permission" in done.stderr


def test_a_deleted_users_lock_is_made_anew(shared: Node) -> None:
    users = PoolPaths(shared.root, POOL).users_lock("node0-0")
    os.unlink(users)
    shared.prepare([pool_of(regions=2, gid=GROUP)])
    command = ("attach", "--pool", POOL, "--root", shared.root, "--region", "node0-0")
    assert _as_engine(*command).returncode == 0
    assert os.stat(users).st_gid == GROUP


def test_links_planted_by_the_group_are_not_followed_by_root(shared: Node, tmp_path: Path) -> None:
    """The group may write beside the regions: root must not be led elsewhere from there."""
    precious = tmp_path / "precious"
    precious.write_text("not yours")
    before = precious.stat()
    paths = PoolPaths(shared.root, POOL)
    with hostprep.attach(POOL, region="node0-0", root=shared.root) as memory:
        memory.buffer[:4] = b"dirt"
    for name in ("node0-0/users", "node0-1/users", "node0-1/.clean.new"):
        planted = f"{paths.state}/{name}"
        if os.path.lexists(planted):
            os.unlink(planted)
        os.symlink(precious, planted)

    with contextlib.suppress(HostprepError):
        shared.prepare([pool_of(regions=3, gid=GROUP)])

    assert precious.read_text() == "not yours"
    after = precious.stat()
    assert (after.st_gid, after.st_mode, after.st_size) == (
        before.st_gid,
        before.st_mode,
        before.st_size,
    )
    shared.release([POOL], force=True)
    assert precious.exists()
