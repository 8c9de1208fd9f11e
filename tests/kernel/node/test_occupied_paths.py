"""Somebody else's files where ours should be: said with what to do, and left alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.errors import BadInputError
from hostprep.node.apply.exclusive import AgentLock, exclusive
from hostprep.node.apply.service import Node
from testbed.agent_process import run_agent
from testbed.machine import pool_of
from tests.kernel.worker_process import WorkerProcess, results_of, wanted
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel


def test_a_root_that_is_a_file_ends_agent_and_prepare_at_once(node: Node, tmp_path: Path) -> None:
    Path(node.root).write_text("somebody's\n")
    agent = run_agent(
        node.root, tmp_path / "state", "--node-name", "a", "--allow-cgroup-v1", timeout_s=30
    )
    prepare = run_hostprep("prepare", "--name", "kv", "--size", "8Mi", "--root", node.root)
    for done in (agent, prepare):
        assert done.returncode == 2
        assert "not a plain folder" in done.stderr
        assert "Traceback" not in done.stderr
    assert Path(node.root).read_text() == "somebody's\n"
    os.unlink(node.root)


@pytest.mark.parametrize("place", ["kv", "kv/mem"])
def test_a_pools_path_that_is_a_file_costs_that_pool_only(node: Node, place: str) -> None:
    path = Path(node.root, place)
    path.parent.mkdir(parents=True)
    path.write_text("somebody's\n")
    with WorkerProcess(node.root) as worker:
        outcomes = results_of(worker.round(*wanted(pool_of(), pool_of(name="batch"))))
    error = outcomes["kv"].error
    assert error is not None
    assert error.reason == "BadRoot"
    assert "; " in error.message
    assert outcomes["batch"].error is None
    assert path.read_text() == "somebody's\n"


def test_one_agent_has_a_root_for_life(node: Node) -> None:
    node.prepare([pool_of()])
    first, second = AgentLock(node.root), AgentLock(node.root)
    first.hold()
    first.hold()
    with pytest.raises(BadInputError, match=f"process {os.getpid()}"):
        second.hold()
    first.close()
    second.hold()
    second.close()


def test_a_root_that_was_made_anew_is_taken_again(node: Node) -> None:
    lock, other = AgentLock(node.root), AgentLock(node.root)
    lock.hold()
    assert not os.path.exists(node.root)
    node.prepare([pool_of()])
    lock.hold()
    node.release(["kv"])
    assert not os.path.exists(node.root)
    node.prepare([pool_of()])
    lock.hold()
    with pytest.raises(BadInputError):
        other.hold()
    lock.close()


def test_no_trace_is_left_in_a_root_that_is_not_ours_to_remove(node: Node) -> None:
    """As in a Pod, where kubelet made it and it is mounted."""
    os.mkdir(node.root, 0o755)
    lock = AgentLock(node.root)
    node.prepare([pool_of()])
    lock.hold()
    node.release(["kv"])
    lock.hold()
    lock.close()
    assert os.listdir(node.root) == []


def test_of_two_agents_at_a_fresh_root_one_has_it(node: Node) -> None:
    """Each is about to make something there: nothing was made yet, no lock either."""
    first, second = AgentLock(node.root), AgentLock(node.root)
    first.hold()
    second.hold()
    first.hold(make=True)
    with pytest.raises(BadInputError, match=f"process {os.getpid()}"):
        second.hold(make=True)
    node.prepare([pool_of()])
    node.release(["kv"])
    second.hold(make=True)
    with pytest.raises(BadInputError):
        first.hold(make=True)
    second.close()
    assert not os.path.exists(node.root)


def test_a_root_that_cannot_be_made_is_the_workers_to_say(node: Node) -> None:
    Path(node.root).write_text("somebody's")
    AgentLock(node.root).hold(make=True)
    AgentLock(f"{node.root}/below").hold(make=True)
    os.unlink(node.root)


@pytest.fixture
def full(node: Node) -> Iterator[Node]:
    """A root on a file system that takes files, and not one byte."""
    os.mkdir(node.root)
    _run("mount", "-t", "tmpfs", "-o", "size=8k,mode=755", "test", node.root)
    Path(node.root, "filler").write_bytes(bytes(8 << 10))
    Path(node.root, ".lock").touch()
    yield node
    _run("umount", node.root)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def test_both_locks_are_had_on_a_full_disk(full: Node) -> None:
    first, second = AgentLock(full.root), AgentLock(full.root)
    for _ in range(2):
        first.hold()
        with pytest.raises(BadInputError, match="another agent works"):
            second.hold()
        with exclusive(full.root, wait_timeout_s=0, on_wait=lambda _: None):
            pass
        first.close()
