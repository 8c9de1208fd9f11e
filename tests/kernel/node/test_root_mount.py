"""The root's own tmpfs: it bounds what engines take, comes once, grows, and goes with the root."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hostprep.api.pool_spec import ROOT_BYTES, ROOT_INODES
from hostprep.linux.mounts import unmount
from hostprep.node.apply.exclusive import AgentLock
from hostprep.node.apply.root import grow_root
from hostprep.node.apply.service import Node
from hostprep.node.observe.host import read_mounts
from hostprep.node.observe.pools import pool_names
from testbed.machine import POOL, pool_of

pytestmark = pytest.mark.kernel

TURN = """
import os, random, sys, time
from hostprep.node.apply.exclusive import exclusive
from hostprep.node.apply.service import Node

node = Node(sys.argv[1])
print(flush=True)
for _ in range(int(sys.argv[2])):
    with exclusive(node.root, wait_timeout_s=60, on_wait=lambda _: None):
        os.mkdir(f"{node.root}/../alone")
        time.sleep(random.random() / 500)
        os.rmdir(f"{node.root}/../alone")
    if random.random() < 0.5:
        node.clear_if_empty(wait_timeout_s=60)
"""


def _mounts_of(root: str) -> int:
    return sum(entry.path == root for entry in read_mounts())


def test_the_root_is_a_small_file_system_of_its_own_and_goes_with_the_last_pool(node: Node) -> None:
    node.prepare([pool_of(), pool_of(name="second")])
    assert _mounts_of(node.root) == 1
    room = os.statvfs(node.root)
    assert (room.f_blocks * room.f_frsize, room.f_files) == (ROOT_BYTES, ROOT_INODES)
    assert os.stat(node.root).st_mode & 0o7777 == 0o755
    node.release([POOL])
    assert _mounts_of(node.root) == 1
    node.release(["second"])
    assert not os.path.lexists(node.root)


def test_a_folder_that_was_there_is_not_mounted_over_and_stays(node: Node) -> None:
    os.makedirs(node.root)
    node.prepare([pool_of()])
    assert not _mounts_of(node.root)
    node.release([POOL])
    os.rmdir(node.root)


def test_the_agent_mounts_over_a_folder_that_was_there_and_leaves_that(node: Node) -> None:
    """As kubelet makes it, and containers that wait for a pool have it mounted."""
    os.makedirs(node.root)
    agent = AgentLock(node.root)
    agent.hold(make=True)
    assert _mounts_of(node.root) == 1
    node.prepare([pool_of()])
    node.release([POOL])
    agent.hold()
    agent.close()
    assert _mounts_of(node.root) == 1
    assert not pool_names(node.root)


@pytest.mark.parametrize("name", ["waiting/mem", "file"])
def test_a_root_in_use_is_not_mounted_over(node: Node, name: str) -> None:
    """Containers have folders of it mounted, and would not see those of another file system."""
    os.makedirs(f"{node.root}/{name}")
    agent = AgentLock(node.root)
    agent.hold(make=True)
    agent.close()
    assert not _mounts_of(node.root)
    assert os.path.isdir(f"{node.root}/{name}")


def test_a_mount_that_was_there_is_used_as_it_is(node: Node) -> None:
    os.makedirs(node.root)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "mine", node.root], check=True)
    try:
        agent = AgentLock(node.root)
        agent.hold(make=True)
        node.prepare([pool_of()])
        grow_root(node.root, regions=100_000)
        assert [entry.source for entry in read_mounts() if entry.path == node.root] == ["mine"]
        node.release([POOL])
        agent.close()
        assert _mounts_of(node.root) == 1
    finally:
        subprocess.run(["umount", node.root], check=True)


def test_a_container_keeps_its_mount_of_a_root_that_was_made_outside(node: Node) -> None:
    """There the root's mount is all that leads to it; what lies below is the container's own."""
    node.prepare([pool_of()])
    kept = Path(node.root, "kept")
    kept.touch()
    node.release([POOL])
    kept.unlink()
    inside = Path(node.root).parent / "inside"
    inside.mkdir()
    code = """
        mount --bind "$0" "$1"
        "$2" -m hostprep prepare kv --size 8Mi --backing Base --root "$1" &&
        "$2" -m hostprep release kv --root "$1" && cat /proc/self/mountinfo
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", code, node.root, str(inside), sys.executable],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f" {inside} " in done.stdout
    assert _mounts_of(node.root) == 1
    node.prepare([pool_of()])
    node.release([POOL])
    assert not os.path.lexists(node.root)


def test_containers_that_had_the_empty_root_mounted_see_what_comes(node: Node) -> None:
    """As with mountPropagation HostToContainer: a mount namespace of its own, a slave."""
    os.makedirs(node.root)
    shared = subprocess.run(["mount", "--make-shared", "/dev/shm"], check=False)
    if shared.returncode:
        pytest.skip("/dev/shm is no mount here that can be shared")
    code = 'mount --rbind "$0" "$1" && echo && read _ && cat "$1/kv/handoff.json"'
    inside = Path(node.root).parent / "inside"
    inside.mkdir()
    command = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", code]
    try:
        with subprocess.Popen(
            [*command, node.root, str(inside)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as container:
            assert container.stdout is not None
            assert container.stdout.readline() == "\n"
            AgentLock(node.root).hold(make=True)
            node.prepare([pool_of()])
            assert _mounts_of(node.root) == 1
            out, _ = container.communicate("\n", timeout=60)
            assert '"pool": "kv"' in out or '"pool":"kv"' in out
    finally:
        node.release([POOL])
        unmount(node.root)
        subprocess.run(["mount", "--make-private", "/dev/shm"], check=True)


def test_it_grows_with_the_regions(node: Node) -> None:
    node.prepare([pool_of()])
    Path(node.root, POOL, "links", "kept").write_text("x")
    grow_root(node.root, regions=128)
    assert os.statvfs(node.root).f_files == ROOT_INODES
    grow_root(node.root, regions=1000)
    room = os.statvfs(node.root)
    assert (room.f_blocks * room.f_frsize, room.f_files) == (8 * ROOT_BYTES, 8 * ROOT_INODES)
    grow_root(node.root, regions=1)
    assert os.statvfs(node.root).f_files == 8 * ROOT_INODES
    assert Path(node.root, POOL, "links", "kept").read_text() == "x"


def _start(node: Node, turns: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TURN, node.root, str(turns)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_processes_that_make_and_remove_it_at_once_are_alone_in_turn(node: Node) -> None:
    running = [_start(node, 40) for _ in range(6)]
    for process in running:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    node.clear_if_empty(wait_timeout_s=10)
    assert not os.path.lexists(node.root)


def test_killed_at_random_it_is_used_and_removed_by_the_next(node: Node) -> None:
    for _ in range(12):
        with _start(node, 1_000_000) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.random() / 10)
            process.send_signal(signal.SIGKILL)
        assert _mounts_of(node.root) <= 1
        if os.path.isdir(f"{node.root}/../alone"):
            os.rmdir(f"{node.root}/../alone")
    node.prepare([pool_of()])
    node.release([POOL])
    assert not os.path.lexists(node.root)
