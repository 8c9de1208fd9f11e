"""The worker in this process, where a test can break one of its probes."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.agent import verification
from hostprep.agent.messages import (
    DesiredPool,
    Done,
    Message,
    ReconcileRequest,
    ReconcileResult,
    decode,
)
from hostprep.agent.worker import Worker
from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.node.apply.service import Node
from hostprep.node.facts import Mount, PoolFacts
from hostprep.node.observe.pools import observe_pool
from hostprep.paths import PoolPaths
from testbed.machine import pool_of
from testbed.processes import wait_for

pytestmark = pytest.mark.unit


def _break(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def probe(
        paths: PoolPaths, mounts: tuple[Mount, ...] | None = None, **options: Any
    ) -> PoolFacts:
        if paths.pool == broken:
            raise OSError(5, "Input/output error")
        return observe_pool(paths, mounts, **options)

    monkeypatch.setattr(verification, "observe_pool", probe)


def _round(node: Node, *specs: PoolSpec) -> list[Message]:
    output = io.BytesIO()
    worker = Worker(node, output)
    worker.reconcile(
        ReconcileRequest(number=1, pools=tuple(DesiredPool(spec=spec, key="k") for spec in specs))
    )
    worker.finish()
    return [decode(line) for line in output.getvalue().splitlines()]


def _pool_folder(root: Path, name: str) -> None:
    os.makedirs(root / name)
    (root / name / "claim.lock").touch()


def test_a_pool_that_cannot_be_looked_at_stops_no_other(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = memory_folder / "root"
    for name in ("kv", "batch"):
        _pool_folder(root, name)
    _break(monkeypatch, "kv")

    looks = {
        pool.name: pool.failure for pool in verification.verify_node(str(root)).observation.pools
    }

    assert "Input/output error" in looks["kv"]
    assert looks["batch"] == ""


@pytest.mark.parametrize("state", list(PoolState))
def test_a_pool_that_cannot_be_looked_at_is_neither_made_anew_nor_taken_for_released(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch, state: PoolState
) -> None:
    root = memory_folder / "root"
    _pool_folder(root, "kv")
    _break(monkeypatch, "kv")

    heard = _round(Node(str(root)), pool_of(state=state))

    assert len(heard) == 1
    answer = heard[0]
    assert isinstance(answer, ReconcileResult)
    assert not answer.busy
    assert answer.results[0].error is not None
    assert answer.results[0].error.reason == "CannotLook"
    assert [pool.name for pool in answer.observation.pools] == ["kv"]
    assert sorted(os.listdir(root / "kv")) == ["claim.lock"]


def test_a_node_without_pools_is_looked_at_too(memory_folder: Path) -> None:
    heard = _round(Node(str(memory_folder / "root")))

    assert isinstance(heard[0], ReconcileResult)
    assert heard[0].observation.pools == ()
    assert not (memory_folder / "root").exists()


@pytest.fixture
def no_thread_to_be_had() -> Iterator[None]:
    """Ask for stacks larger than the address space: the kernel refuses, as under `pids.max`."""
    before = threading.stack_size(1 << 47)
    yield
    threading.stack_size(before)


def _absent(number: int) -> ReconcileRequest:
    spec = pool_of(state=PoolState.ABSENT)
    return ReconcileRequest(number=number, pools=(DesiredPool(spec=spec, key="k"),))


def _heard(output: io.BytesIO) -> list[Message]:
    return [decode(line) for line in output.getvalue().splitlines()]


@pytest.mark.usefixtures("no_thread_to_be_had")
def test_a_worker_that_gets_no_thread_says_so_and_works_at_the_next_request(
    memory_folder: Path,
) -> None:
    root = memory_folder / "root"
    _pool_folder(root, "kv")
    output = io.BytesIO()
    worker = Worker(Node(str(root)), output)

    worker.reconcile(_absent(1))

    answer, done = _heard(output)
    assert isinstance(answer, ReconcileResult)
    assert isinstance(done, Done)
    assert done.error is not None
    assert done.error.reason == "NoThread"
    assert "podPidsLimit" in done.error.message
    assert (root / "kv").exists()

    threading.stack_size(0)
    worker.reconcile(_absent(2))
    wait_for(lambda: isinstance(_heard(output)[-1], Done) and len(_heard(output)) > 3)

    assert _heard(output)[-1] == Done()
    assert not (root / "kv").exists()
