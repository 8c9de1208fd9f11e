"""An engine that may write a region may shrink it too: what others then see, and how it ends.

Named files of hugetlbfs and tmpfs cannot be sealed. What can be kept is: nobody is handed less than
was promised, and the region is made anew once nobody is in it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostprep
from hostprep.agent.messages import DesiredPool, ReconcileResult
from hostprep.backing import MIB, Backing
from hostprep.client.handoff import read_handoff
from hostprep.errors import HostprepError
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of
from testbed.processes import wait_for
from tests.kernel.worker_process import WorkerProcess, wanted

pytestmark = pytest.mark.kernel

GROUP = 54321
BACKINGS = [Backing.HUGETLB_2MI, Backing.BASE]


def _as_engine(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the pool's group and nothing else."""
    return subprocess.run(
        ["setpriv", "--reuid=4321", f"--regid={GROUP}", "--clear-groups", *command],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
    )


@pytest.fixture(params=BACKINGS, ids=str)
def backing(request: pytest.FixtureRequest) -> Backing:
    assert isinstance(request.param, Backing)
    return request.param


@pytest.fixture
def worker(node: Node, backing: Backing) -> Iterator[WorkerProcess]:
    """A worker that has prepared two regions for the group."""
    Path(node.root).parent.chmod(0o755)
    with WorkerProcess(node.root) as worker:
        worker.round(*_wanted(backing))
        yield worker


def _wanted(backing: Backing) -> tuple[DesiredPool, ...]:
    return wanted(pool_of(regions=2, gid=GROUP, backing=backing))


def _states(worker: WorkerProcess, backing: Backing) -> dict[str, tuple[str, str]]:
    answer = worker.round(*_wanted(backing))[0]
    assert isinstance(answer, ReconcileResult)
    return {r.name: (r.state, r.message) for pool in answer.observation.pools for r in pool.regions}


@pytest.mark.parametrize(
    "command",
    [
        "rm -f {mem}/node0-0",
        "mv {mem}/node0-0 {mem}/mine",
        "touch {mem}/mine",
        "mkdir {mem}/mine",
        "ln {mem}/node0-0 {mem}/mine",
        "mv {mem} {mem}-mine",
        "rm -f {mem}/../handoff.json",
    ],
)
def test_the_group_neither_adds_nor_renames_nor_removes_files(
    node: Node, worker: WorkerProcess, command: str
) -> None:
    folder = Path(node.root, POOL)
    before = sorted(os.listdir(folder)), sorted(os.listdir(folder / "mem"))
    done = _as_engine("sh", "-c", command.format(mem=folder / "mem"))
    assert done.returncode != 0
    assert "Permission denied" in done.stderr or "not permitted" in done.stderr
    assert (sorted(os.listdir(folder)), sorted(os.listdir(folder / "mem"))) == before


def test_nobody_is_handed_a_region_that_was_shrunk(
    node: Node, worker: WorkerProcess, backing: Backing
) -> None:
    """Before any round has seen it: size and blocks are looked at under the lease."""
    region = f"{node.root}/{POOL}/mem/node0-0"
    assert _as_engine("truncate", "-s", str(4 * MIB), region).returncode == 0
    with pytest.raises(HostprepError, match="node0-0"):
        hostprep.attach(POOL, region="node0-0", root=node.root)
    with hostprep.attach(POOL, root=node.root) as memory:
        assert memory.region.name == "node0-1"


def test_holes_are_seen_like_a_smaller_size(
    node: Node, worker: WorkerProcess, backing: Backing
) -> None:
    region = f"{node.root}/{POOL}/mem/node0-0"
    hole = ("fallocate", "--punch-hole", "--offset", str(2 * MIB), "--length", str(2 * MIB))
    assert _as_engine(*hole, region).returncode == 0
    with pytest.raises(HostprepError, match="lacks"):
        hostprep.attach(POOL, region="node0-0", root=node.root)


def test_it_is_damaged_while_it_is_leased_and_made_anew_after(
    node: Node, worker: WorkerProcess, backing: Backing
) -> None:
    before = [region.st_ino for region in read_handoff(PoolPaths(node.root, POOL)).regions]
    with hostprep.attach(POOL, region="node0-0", root=node.root):
        os.truncate(f"{node.root}/{POOL}/mem/node0-0", 4 * MIB)
        assert _states(worker, backing)["node0-0"][0] == "Damaged"
        state, why = _states(worker, backing)["node0-0"]
        assert state == "Damaged"
        assert str(4 * MIB) in why
        served = read_handoff(PoolPaths(node.root, POOL)).regions
        assert [region.name for region in served] == ["node0-1"]
    wait_for(lambda: _states(worker, backing)["node0-0"][0] == "Free")
    after = [region.st_ino for region in read_handoff(PoolPaths(node.root, POOL)).regions]
    assert (after[0] != before[0], after[1] == before[1]) == (True, True)
