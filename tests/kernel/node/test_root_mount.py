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
from hostprep.errors import FailedError
from hostprep.linux.files import closing_fd
from hostprep.linux.mounts import open_below_mounts, unmount
from hostprep.node.apply.exclusive import AgentLock
from hostprep.node.apply.root import AGENT_LOCK, LOCK, MADE, grow_root
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


def test_a_mount_that_others_made_over_a_root_of_ours_stays(node: Node) -> None:
    os.makedirs(node.root)
    Path(node.root, MADE).touch()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "mine", node.root], check=True)
    try:
        node.prepare([pool_of()])
        node.release([POOL])
        assert [entry.source for entry in read_mounts() if entry.path == node.root] == ["mine"]
    finally:
        subprocess.run(["umount", node.root], check=False)
        node.clear_if_empty(wait_timeout_s=10)


def test_it_goes_with_a_lock_that_an_agent_made_before_it_was_mounted(node: Node) -> None:
    node.prepare([pool_of()])
    parent, name = os.path.split(node.root)
    with closing_fd(open_below_mounts(parent)) as fd:
        os.close(os.open(f"{name}/{AGENT_LOCK}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    node.release([POOL])
    assert not os.path.lexists(node.root)


def test_it_goes_with_its_agent_whatever_way_its_path_is_written(node: Node) -> None:
    parent, name = os.path.split(node.root)
    link = f"{parent}/link"
    os.symlink(".", link)
    for root in (f"{node.root}/", f"{link}/{name}", f"{parent}/./{name}"):
        agent = AgentLock(root)
        agent.hold(make=True)
        assert os.path.lexists(f"{node.root}/{AGENT_LOCK}")
        assert _mounts_of(node.root) == 1
        agent.close()
        assert not os.path.lexists(node.root)
    os.unlink(link)


def test_it_stays_while_an_agent_has_it_and_goes_with_that(node: Node) -> None:
    """The agent's container would keep a mount of a root that is gone, and prepare in it."""
    node.prepare([pool_of()])
    code = """if 1:
        import sys
        from hostprep.node.apply.exclusive import AgentLock
        agent = AgentLock(sys.argv[1])
        agent.hold()
        print(flush=True)
        sys.stdin.readline()
        agent.hold()
        agent.close()
    """
    command = [sys.executable, "-c", code, node.root]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "\n"
        node.release([POOL])
        assert _mounts_of(node.root) == 1
        assert os.listdir(node.root) == [AGENT_LOCK]
        agent.communicate("\n", timeout=60)
        assert agent.returncode == 0
    assert not os.path.lexists(node.root)


def test_in_a_container_that_has_a_removed_root_the_error_says_so(node: Node) -> None:
    """Not for ever busy: neither a file nor a folder can be made in it."""
    inside = Path(node.root).parent / "inside"
    inside.mkdir()
    os.mkdir(node.root)
    subprocess.run(["mount", "--bind", node.root, str(inside)], check=True)
    # As another mount namespace would keep it: in one's own the folder of a bind may be removed.
    os.rmdir(node.root)
    try:
        AgentLock(str(inside)).hold(make=True)
        with pytest.raises(FailedError, match="removed since"):
            Node(str(inside)).prepare([pool_of()], wait_timeout_s=1)
    finally:
        unmount(str(inside))


def test_what_a_killed_run_left_of_a_removed_root_goes_with_the_next(node: Node) -> None:
    parent, name = os.path.split(node.root)
    left = Path(parent, f".{name}.removed")
    left.mkdir()
    for file in (LOCK, MADE, AGENT_LOCK):
        left.joinpath(file).touch()
    node.prepare([pool_of()])
    assert not left.exists()
    node.release([POOL])


def test_what_another_put_in_the_place_of_a_removed_root_is_not_touched(node: Node) -> None:
    """In /dev/shm anybody may: following it would remove the lock of a root in use."""
    parent, name = os.path.split(node.root)
    victim = Path(parent, "victim")
    victim.mkdir()
    victim.joinpath(LOCK).touch()
    Path(parent, f".{name}.removed").symlink_to(victim)
    node.prepare([pool_of()])
    node.release([POOL])
    assert victim.joinpath(LOCK).exists()
    assert not _mounts_of(node.root)
    os.unlink(f"{parent}/.{name}.removed")
    node.clear_if_empty(wait_timeout_s=10)
    assert not os.path.lexists(node.root)


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
    grow_root(node.root, regions=0)
    assert os.statvfs(node.root).f_files == 8 * ROOT_INODES
    assert Path(node.root, POOL, "links", "kept").read_text() == "x"


def test_an_administrators_larger_size_is_not_made_smaller(node: Node) -> None:
    os.makedirs(node.root)
    options = "mode=0755,size=1G,nr_inodes=1000"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "hostprep", node.root], check=True)
    try:
        grow_root(node.root, regions=200)
        room = os.statvfs(node.root)
        assert room.f_blocks * room.f_frsize == 1 << 30
    finally:
        subprocess.run(["umount", node.root], check=True)


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
