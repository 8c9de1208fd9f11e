"""The worker on real memory: many pools, each by itself; killed at any time, adopted after."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.agent.messages import Done, Message, PoolDone, ReconcileResult
from hostprep.agent.status import PoolContext, derive_phase
from hostprep.api.node_resource import Phase
from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.backing import Backing
from hostprep.client.attach import attach
from hostprep.client.handoff import read_handoff
from hostprep.client.owner import Owner
from hostprep.errors import NotReadyError
from hostprep.node.apply import hugepages
from hostprep.node.apply.exclusive import AgentLock
from hostprep.node.apply.service import AppliedPool, Node, Reconciler, pending_actions
from hostprep.node.facts import RegionFacts
from hostprep.node.observe.pools import observe_pools
from hostprep.paths import PoolPaths
from testbed.machine import huge_pages_total, pool_of
from testbed.processes import wait_for
from tests.kernel.worker_process import WorkerProcess, results_of, wanted
from tests.support.agent_values import entry_of

pytestmark = pytest.mark.kernel

KV = pool_of(regions=2, mib=16, backing=Backing.HUGETLB_2MI)
BATCH = pool_of(name="batch", backing=Backing.BASE)
TOO_LARGE = pool_of(name="big", mib=100 << 20)


def _absent(name: str) -> PoolSpec:
    return PoolSpec(name=name, state=PoolState.ABSENT, size_bytes=1)


@pytest.fixture
def worker(node: Node) -> Iterator[WorkerProcess]:
    with WorkerProcess(node.root) as worker:
        yield worker


def _regions(node: Node) -> list[RegionFacts]:
    return [region for pool in observe_pools(node.root) for region in pool.regions]


def _inodes(node: Node, pool: str = "kv") -> list[int]:
    return [region.st_ino for region in read_handoff(PoolPaths(node.root, pool)).regions]


def _is_quiet(messages: list[Message]) -> bool:
    return [type(message) for message in messages] == [ReconcileResult]


def test_one_pool_that_cannot_be_had_holds_up_no_other(node: Node, worker: WorkerProcess) -> None:
    outcomes = results_of(worker.round(*wanted(KV, TOO_LARGE, BATCH)))

    assert [pool.name for pool in observe_pools(node.root)] == ["batch", "kv"]
    unmet = outcomes["big"].unmet
    assert unmet is not None
    assert (unmet.reason, "ask for" in unmet.message) == ("TooLarge", True)
    assert outcomes["kv"].error is outcomes["kv"].unmet is None


def test_one_pool_that_fails_holds_up_no_other(node: Node, worker: WorkerProcess) -> None:
    os.makedirs(f"{node.root}/kv")
    Path(node.root, "kv", "theirs").write_text("not ours")

    outcomes = results_of(worker.round(*wanted(KV, BATCH)))

    error = outcomes["kv"].error
    assert error is not None
    assert error.reason == "BadRoot"
    assert [pool.name for pool in observe_pools(node.root)] == ["batch"]
    assert Path(node.root, "kv", "theirs").read_text() == "not ours"


def test_a_round_with_nothing_to_do_changes_and_begins_nothing(
    node: Node, worker: WorkerProcess
) -> None:
    worker.round(*wanted(KV, BATCH))
    before = _inodes(node), read_handoff(PoolPaths(node.root, "kv")).generation

    assert all(_is_quiet(worker.round(*wanted(KV, BATCH))) for _ in range(3))

    assert (_inodes(node), read_handoff(PoolPaths(node.root, "kv")).generation) == before


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_only_what_was_damaged_is_made_anew(node: Node, worker: WorkerProcess, damage: str) -> None:
    worker.round(*wanted(KV))
    before = _inodes(node)
    path = f"{node.root}/kv/mem/node0-1"

    os.truncate(path, 0) if damage == "truncated" else os.unlink(path)
    messages = worker.round(*wanted(KV))

    found = messages[0]
    assert isinstance(found, ReconcileResult)
    assert [one.name for one in found.observation.pools[0].regions if one.problem] == ["node0-1"]
    assert [region.sound for region in found.observation.pools[0].regions] == [True, False]
    assert (_inodes(node)[0] == before[0], _inodes(node)[1] == before[1]) == (True, False)


def test_a_region_that_is_lost_while_another_is_made_leaves_the_pool_degraded_not_ready(
    node: Node, worker: WorkerProcess
) -> None:
    worker.round(*wanted(pool_of(mib=64, backing=Backing.BASE)))
    larger = wanted(pool_of(mib=1024, backing=Backing.BASE))
    worker.ask(*larger)
    while not any(not region.finished and region.resident_bytes for region in _regions(node)):
        time.sleep(0.002)
    os.unlink(f"{node.root}/kv/mem/node0-0")

    done = next(message for message in worker.until_idle() if isinstance(message, PoolDone))
    derived = derive_phase(
        PoolContext(entry=entry_of(), observation=done.observation.pool("kv"), result=done.result)
    )

    assert derived is not None
    assert derived.phase is Phase.DEGRADED
    assert "node0-0 was lost" in derived.message
    worker.round(*larger)
    assert sum(region.size_bytes for region in _regions(node)) == 1 << 30


def test_who_holds_a_region_is_named_by_what_it_runs_now(node: Node, worker: WorkerProcess) -> None:
    worker.round(*wanted(KV))
    command = [sys.executable, "-m", "hostprep", "exec", "--pool", "kv", "--root", node.root]
    with subprocess.Popen([*command, "--", "sleep", "40"]) as holder:
        try:
            wait_for(lambda: _has_become(holder.pid, "sleep"), 20, why="nothing was run")
            found = worker.round(*wanted(KV))[0]
        finally:
            holder.kill()

    assert isinstance(found, ReconcileResult)
    held = [region.holder for region in found.observation.pools[0].regions if region.holder]
    assert set(held) == {f"process {holder.pid}, sleep 40"}


def _has_become(pid: int, program: str) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(program.encode() + b"\0")


def test_a_damaged_region_that_is_leased_waits_for_its_release(
    node: Node, worker: WorkerProcess
) -> None:
    worker.round(*wanted(KV))
    before = _inodes(node)
    with attach("kv", root=node.root) as attachment:
        name = attachment.region.name
        Path(PoolPaths(node.root, "kv").bad_mark(name)).write_text("a bad page")
        for _ in range(2):
            outcomes = results_of(worker.round(*wanted(KV)))
            assert outcomes["kv"].blocked == (name,)
            assert not outcomes["kv"].pending
        assert [region.name != name for region in read_handoff(PoolPaths(node.root, "kv")).regions]

    worker.round(*wanted(KV))

    assert len(_inodes(node)) == 2
    assert len(set(_inodes(node)) & set(before)) == 1


def test_absent_pools_are_released_and_all_traces_with_the_last(
    node: Node, worker: WorkerProcess
) -> None:
    before = huge_pages_total()
    worker.round(*wanted(KV, BATCH))

    worker.round(*wanted(_absent("kv"), BATCH))
    assert [pool.name for pool in observe_pools(node.root)] == ["batch"]
    assert huge_pages_total() == before
    worker.round(*wanted(_absent("kv"), _absent("batch")))

    assert not os.path.exists(node.root)


def test_a_root_folder_that_was_there_before_is_left_empty(
    node: Node, worker: WorkerProcess
) -> None:
    """As in a Pod, where kubelet made it: hostprep.pyz goes with the last pool as well."""
    os.mkdir(node.root, 0o755)
    lock = AgentLock(node.root)
    try:
        worker.round(*wanted(BATCH))
        lock.hold()
        assert {"batch", "hostprep.pyz", ".agent.lock"} <= set(os.listdir(node.root))
        worker.round(*wanted(_absent("batch")))
        lock.hold()
        worker.round(*wanted(_absent("batch")))
        assert os.listdir(node.root) == []
    finally:
        lock.close()


def test_an_absent_pool_that_is_leased_stays(node: Node, worker: WorkerProcess) -> None:
    worker.round(*wanted(KV))
    with attach("kv", root=node.root) as attachment:
        outcomes = results_of(worker.round(*wanted(_absent("kv"))))
        assert outcomes["kv"].blocked == (attachment.region.name,)
        assert len(_inodes(node)) == 2

    worker.round(*wanted(_absent("kv")))
    assert not observe_pools(node.root)


def test_pools_that_nobody_mentions_are_left_alone(node: Node, worker: WorkerProcess) -> None:
    worker.round(*wanted(KV))
    before = _inodes(node)
    os.truncate(f"{node.root}/kv/mem/node0-1", 0)

    assert _is_quiet(worker.round())

    assert Path(f"{node.root}/kv/mem/node0-1").stat().st_ino == before[1]


@pytest.mark.parametrize(("leave_dirty", "state"), [(False, "Free"), (True, "Dirty")])
def test_what_a_lease_left_dirty_is_scrubbed_unless_claims_do_it(
    node: Node, worker: WorkerProcess, leave_dirty: bool, state: str
) -> None:
    worker.round(*wanted(KV, leave_dirty=leave_dirty))
    with attach("kv", root=node.root):
        pass

    worker.round(*wanted(KV, leave_dirty=leave_dirty))
    last = worker.round(*wanted(KV, leave_dirty=leave_dirty))[-1]

    assert isinstance(last, ReconcileResult)
    states = {region.state for region in last.observation.pools[0].regions}
    assert states == {"Free", state}


@pytest.mark.parametrize("leave_dirty", [False, True])
def test_what_was_kept_too_long_is_scrubbed_even_where_claims_scrub(
    node: Node, worker: WorkerProcess, leave_dirty: bool
) -> None:
    limited = replace(KV, max_kept_s=3600)
    worker.round(*wanted(limited, leave_dirty=leave_dirty))
    with attach("kv", owner=Owner("a-secret-of-the-engine", name="chat"), root=node.root) as memory:
        region = memory.region.name
    mark = Path(PoolPaths(node.root, "kv").kept_mark(region))

    def state_after_a_round() -> str:
        worker.round(*wanted(limited, leave_dirty=leave_dirty))
        last = worker.round(*wanted(limited, leave_dirty=leave_dirty))[-1]
        assert isinstance(last, ReconcileResult)
        return next(r.state for r in last.observation.pools[0].regions if r.name == region)

    assert state_after_a_round() == "Retained"
    document = json.loads(mark.read_text())
    mark.write_text(json.dumps(document | {"since_s": document["since_s"] - 3700}))
    assert state_after_a_round() == "Free"


def test_a_pool_that_is_held_is_left_as_it_is(node: Node, worker: WorkerProcess) -> None:
    worker.round(*wanted(KV))
    path = Path(f"{node.root}/kv/mem/node0-1")
    os.truncate(path, 0)

    messages = worker.round(*wanted(KV, BATCH), held=("kv",))

    assert path.stat().st_size == 0
    assert "kv" not in results_of(messages)
    assert [pool.name for pool in observe_pools(node.root)] == ["batch", "kv"]


def test_pages_that_the_kernel_does_not_give_are_a_failure_to_be_tried_again_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan takes them for free each time: at once, it would be tried every five seconds."""
    write = hugepages._write

    def write_half(folder: str, pages: int) -> None:
        write(folder, pages // 2)

    monkeypatch.setattr(hugepages, "_write", write_half)
    outcomes: list[AppliedPool] = []
    before = huge_pages_total()

    Reconciler(node=node, specs=[KV], on_pool=outcomes.append).run()

    assert outcomes[0].plan.unmet is not None
    assert isinstance(outcomes[0].error, NotReadyError)
    assert pending_actions(node.plan([KV]), "kv")
    assert huge_pages_total() == before


def test_the_worker_needs_nothing_beyond_the_standard_library() -> None:
    script = (
        "import sys\nimport hostprep.agent.worker\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(roots & {'kubernetes', 'aiohttp', 'click', 'rich', 'pydantic', 'yaml',"
        " 'structlog', 'prometheus_client', 'asyncio'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_busy_is_said_while_another_hostprep_is_at_work(node: Node, worker: WorkerProcess) -> None:
    from hostprep.node.apply.exclusive import exclusive

    with exclusive(node.root, wait_timeout_s=1, on_wait=lambda _: None):
        done = worker.round(*wanted(KV))[-1]
    assert isinstance(done, Done)
    assert done.error is not None
    assert (done.error.reason, done.error.waits) == ("AlreadyRunning", True)
    assert isinstance(worker.round(*wanted(KV))[-1], Done)
    assert len(_inodes(node)) == 2
