"""What fills a folder that engines write to fills that folder, and a full root is waited out."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostprep
from hostprep.cuda.turnstile_files import make_turnstiles
from hostprep.errors import HostprepError, NotReadyError
from hostprep.linux.files import closing_fd
from hostprep.linux.mounts import mount, unmount
from hostprep.node.apply.folder import unmount_shared_folder
from hostprep.node.apply.service import Node
from hostprep.node.observe.pools import pool_names
from hostprep.paths import TURNSTILE
from testbed.machine import POOL, clean_node, pool_of
from tests.kernel.hostile.attackers import ATTACKED, BYSTANDER, ENGINE, REGION, STRANGER, Pools

pytestmark = pytest.mark.kernel

_MIB = 1 << 20


def fill_with_bytes(folder: str) -> None:
    """Write to a file until there is no room; fails beyond 64 MiB."""
    with closing_fd(os.open(f"{folder}/heap", os.O_CREAT | os.O_WRONLY, 0o600)) as fd:
        for _ in range(64):
            try:
                os.write(fd, bytes(_MIB))
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    return
                raise
    raise AssertionError("64 MiB were taken")


def fill_with_files(folder: str) -> None:
    """Make empty files until there is no room; fails beyond 20,000."""
    for number in range(20_000):
        try:
            os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return
            raise
    raise AssertionError("20,000 files were made")


@pytest.mark.parametrize("fill", [fill_with_bytes, fill_with_files])
def test_a_full_turnstile_takes_no_room_from_the_root(pools: Pools, fill: object) -> None:
    folder = f"{pools.root}/{TURNSTILE}"
    assert callable(fill)
    STRANGER.does(lambda: fill(folder))
    pools.bystander_works()
    make_turnstiles(pools.root)
    pools.node.release([ATTACKED, BYSTANDER])
    assert not os.path.exists(pools.root)


def test_an_engine_that_was_started_before_sees_the_turnstile(node: Node) -> None:
    """As in a pod with mountPropagation HostToContainer: a mount namespace of its own, a slave."""
    os.makedirs(node.root)
    code = (
        "import sys\n"
        "from hostprep.cuda.turnstile import Turnstile\n"
        "print('go', flush=True)\n"
        "sys.stdin.readline()\n"
        "ours = Turnstile(sys.argv[1], say=lambda _: None)\n"
        "with ours.turn(5):\n"
        "    pass\n"
        "print(ours.without, flush=True)\n"
    )
    command = ["unshare", "--mount", "--propagation", "slave", sys.executable, "-c", code]
    shared = subprocess.run(["mount", "--make-shared", "/dev/shm"], check=False)
    if shared.returncode:
        pytest.skip("/dev/shm is no mount here that can be shared")
    try:
        with subprocess.Popen(
            [*command, node.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as engine:
            assert engine.stdout is not None
            assert engine.stdin is not None
            assert engine.stdout.readline() == "go\n"
            node.prepare([pool_of()])
            assert os.path.ismount(f"{node.root}/{TURNSTILE}")
            engine.stdin.write("\n")
            engine.stdin.flush()
            assert engine.stdout.readline() == "None\n", "it takes no turns with the others"
    finally:
        subprocess.run(["mount", "--make-private", "/dev/shm"], check=True)
    node.release([POOL])
    os.rmdir(node.root)


def test_turnstiles_in_use_are_not_mounted_over(node: Node) -> None:
    """As an earlier version of ours left them: those who wait there must find each other."""
    os.makedirs(node.root)
    make_turnstiles(node.root)
    node.prepare([pool_of()])
    assert not os.path.ismount(f"{node.root}/{TURNSTILE}")
    assert os.listdir(f"{node.root}/{TURNSTILE}") == ["node"]
    node.release([POOL])
    assert not os.path.exists(f"{node.root}/{TURNSTILE}")


def test_a_turnstile_that_a_killed_run_did_not_mount_goes_with_the_root(node: Node) -> None:
    node.prepare([pool_of()])
    turnstile = f"{node.root}/{TURNSTILE}"
    unmount_shared_folder(turnstile)
    os.mkdir(turnstile, 0o755)
    node.release([POOL])
    assert not os.path.exists(node.root)


@pytest.fixture
def small_node(machine: None) -> Iterator[Node]:
    """A node whose root lies on a tmpfs of 4 MiB."""
    del machine
    with clean_node() as node:
        os.makedirs(node.root)
        mount("tmpfs", node.root, "mode=0755,size=4M")
        try:
            yield node
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{node.root}/heap")
            for pool in pool_names(node.root):
                node.release([pool], force=True)
            unmount(node.root)


def test_a_full_root_is_not_ready_and_claims_wait_for_room(small_node: Node) -> None:
    root = small_node.root
    small_node.prepare([pool_of()])
    hostprep.attach(POOL, root=root).close()
    small_node.prepare([pool_of()])
    fill_with_bytes(root)
    fill_the_rest(root)
    with pytest.raises(NotReadyError) as caught:
        hostprep.attach(POOL, root=root)
    assert caught.value.reason == "NoSpace"
    timer = threading.Timer(1.0, os.unlink, [f"{root}/heap"])
    timer.start()
    try:
        hostprep.attach(POOL, root=root, wait_timeout_s=20).close()
    finally:
        timer.join()


@pytest.mark.parametrize("where", ["state", "tickets", "links"])
def test_releasing_a_pool_that_filled_the_root_gives_the_room_back(
    small_node: Node, where: str
) -> None:
    os.chmod(os.path.dirname(small_node.root), 0o755)
    pools = Pools(small_node)
    small_node.prepare(pools.specs)
    outside, attacked = os.path.dirname(small_node.root), pools.attacked
    folder = attacked.state_of(REGION) if where == "state" else f"{attacked.folder}/{where}"
    assert os.stat(folder).st_dev != os.stat(outside).st_dev
    ENGINE.does(lambda: fill_with_bytes(folder))
    ENGINE.does(lambda: fill_the_rest(folder))
    with pytest.raises(HostprepError) as caught:
        hostprep.attach(BYSTANDER, root=small_node.root)
    assert caught.value.reason == "NoSpace"
    small_node.release([ATTACKED])
    pools.bystander_works_in_process()
    small_node.release([BYSTANDER])


def fill_the_rest(folder: str) -> None:
    """Fill the last pages, of which one write of 1 MiB leaves some."""
    with contextlib.suppress(OSError), Path(f"{folder}/heap").open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
