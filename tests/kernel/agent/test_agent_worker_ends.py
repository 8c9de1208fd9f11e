"""The worker is told to end, or killed: nothing is lost, and nothing is left."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.agent.messages import Done, Message, ReconcileResult
from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.backing import Backing
from hostprep.client.handoff import read_handoff, verify_handoff
from hostprep.errors import NotReadyError
from hostprep.linux.threads import Stopped
from hostprep.node.apply.service import Node, Reconciler
from hostprep.node.facts import RegionFacts
from hostprep.node.observe.pools import observe_pools
from hostprep.paths import PoolPaths
from testbed.machine import pool_of
from tests.kernel.worker_process import WorkerProcess, wanted

pytestmark = pytest.mark.kernel
KV = pool_of(regions=2, mib=16, backing=Backing.HUGETLB_2MI)
BATCH = pool_of(name="batch", backing=Backing.BASE)


def _absent(name: str) -> PoolSpec:
    return PoolSpec(name=name, state=PoolState.ABSENT, size_bytes=1)


@pytest.fixture
def worker(node: Node) -> Iterator[WorkerProcess]:
    with WorkerProcess(node.root) as worker:
        yield worker


def _inodes(node: Node, pool: str = "kv") -> list[int]:
    return [region.st_ino for region in read_handoff(PoolPaths(node.root, pool)).regions]


def _is_quiet(messages: list[Message]) -> bool:
    return [type(message) for message in messages] == [ReconcileResult]


@pytest.mark.parametrize("spec", [KV, _absent("kv")])
def test_nothing_is_begun_once_it_is_time_to_stop(node: Node, spec: PoolSpec) -> None:
    node.prepare([BATCH] if spec is KV else [KV])
    before = [pool.name for pool in observe_pools(node.root)]
    stop = threading.Event()
    stop.set()

    with pytest.raises(Stopped):
        Reconciler(node=node, specs=[spec], stop=stop).run()

    assert [pool.name for pool in observe_pools(node.root)] == before


def test_other_wishes_stop_the_work_that_is_under_way(node: Node, worker: WorkerProcess) -> None:
    large = pool_of(mib=1024, backing=Backing.BASE)
    worker.ask(*wanted(large))
    first = worker.hear()
    assert isinstance(first, ReconcileResult)
    assert first.busy

    worker.ask(*wanted(_absent("kv")))
    done = [message for message in worker.until_idle() if isinstance(message, Done)]

    assert done[0].stopped
    worker.round(*wanted(_absent("kv")))
    assert not observe_pools(node.root)


@pytest.mark.parametrize("how", ["end", "terminate"])
def test_a_worker_that_is_asked_to_end_stops_between_pieces_and_releases_nothing(
    node: Node, how: str
) -> None:
    large = pool_of(mib=3072, backing=Backing.BASE)
    with WorkerProcess(node.root) as worker:
        worker.ask(*wanted(large))
        while not any(region.resident_bytes for region in _regions(node)):
            time.sleep(0.005)
        begin_s = time.monotonic()
        assert (worker.end() if how == "end" else worker.terminate()) == 0
        assert time.monotonic() - begin_s < 5
    half = _regions(node)[0]
    assert not half.finished

    with WorkerProcess(node.root) as worker:
        worker.round(*wanted(large))
    assert _regions(node)[0].inode == half.inode, "what was populated was not taken up"


def _regions(node: Node) -> list[RegionFacts]:
    return [region for pool in observe_pools(node.root) for region in pool.regions]


def test_killed_at_random_it_leaves_nothing_that_the_next_one_does_not_put_right(
    node: Node,
) -> None:
    seed = int(os.environ.get("HOSTPREP_KILL_SEED") or time.time_ns() % 1_000_000)
    chance = random.Random(seed)
    wishes = [
        wanted(KV, BATCH),
        wanted(pool_of(regions=3, mib=16, backing=Backing.HUGETLB_2MI), _absent("batch")),
        wanted(_absent("kv"), BATCH),
    ]
    for turn in range(15):
        with WorkerProcess(node.root) as worker:
            worker.ask(*wishes[turn % 3])
            worker.hear()
            time.sleep(chance.uniform(0, 0.06))
            worker.kill()
        for pool in observe_pools(node.root):
            _check_handoff(PoolPaths(node.root, pool.name), seed)

    with WorkerProcess(node.root) as worker:
        worker.round(*wanted(KV, BATCH))
        assert _is_quiet(worker.round(*wanted(KV, BATCH))), f"seed {seed}: it never settles"
        assert len(_inodes(node)) == 2


def _check_handoff(paths: PoolPaths, seed: int) -> None:
    """Whatever stands there is whole; what it promises is there, or said not to be."""
    try:
        handoff = read_handoff(paths)
    except NotReadyError as error:
        if error.reason == "BadHandoff":
            pytest.fail(f"seed {seed}: torn: {error}")
        return
    problems = [problem for _, problem in verify_handoff(paths, handoff) if problem is not None]
    assert not problems, (seed, problems)


def test_a_worker_whose_agent_was_killed_ends(node: Node) -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'hostprep.agent.worker', '--root',"
        " sys.argv[1]], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, node.root], stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        agent.kill()
        agent.wait()
    deadline = time.monotonic() + 10
    while _is_alive(pid):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
