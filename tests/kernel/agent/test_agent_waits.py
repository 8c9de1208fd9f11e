"""Engines that wait for a lease, as a real worker finds them, and how long they waited."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

import pytest

from hostprep.agent.messages import PoolObservation, ReconcileResult
from hostprep.agent.metrics import Registry, WaitMetrics
from hostprep.backing import Backing
from hostprep.client.attach import attach
from hostprep.node.apply.service import Node
from testbed.machine import pool_of
from testbed.processes import wait_for
from tests.kernel.worker_process import WorkerProcess, wanted

pytestmark = pytest.mark.kernel

KV = pool_of(regions=1, mib=4, backing=Backing.BASE)
HANG_S = 30.0


class Watched:
    """A pool of one region, the worker that observes it, and the metrics of what it finds."""

    def __init__(self, node: Node, worker: WorkerProcess) -> None:
        self.root = node.root
        self._worker = worker
        self._registry = Registry()
        self._metrics = WaitMetrics(self._registry)

    def observe(self) -> PoolObservation:
        answers = [
            message
            for message in self._worker.round(*wanted(KV))
            if isinstance(message, ReconcileResult)
        ]
        self._metrics.show(answers[0].observation)
        return answers[0].observation.pools[0]

    def value(self, name: str) -> float | None:
        return self._registry.get_sample_value(f"hostprep_{name}", {"pool": "kv"})


@pytest.fixture
def watched(node: Node) -> Iterator[Watched]:
    with WorkerProcess(node.root) as worker:
        worker.round(*wanted(KV))
        watched = Watched(node, worker)
        assert watched.observe().waits == ()
        yield watched


def _engine(root: str, end: Event) -> None:
    with attach("kv", root=root, wait_timeout_s=HANG_S):
        end.wait(HANG_S)


@contextmanager
def an_engine(root: str) -> Iterator[tuple[BaseProcess, Event]]:
    """An engine in a process of its own, and what ends it."""
    spawn = multiprocessing.get_context("spawn")
    end = spawn.Event()
    process = spawn.Process(target=_engine, args=(root, end))
    process.start()
    try:
        yield process, end
    finally:
        process.kill()
        process.join(HANG_S)


def test_an_engine_that_waits_is_seen_and_its_wait_is_counted_once_it_has_its_lease(
    watched: Watched,
) -> None:
    holder = attach("kv", root=watched.root)
    watched.observe()
    assert watched.value("lease_waiters") == 0
    assert watched.value("lease_wait_seconds_count") == 1
    begin_s = time.monotonic()
    with an_engine(watched.root) as (waiter, end):
        wait_for(lambda: watched.observe().waiters == 1, HANG_S)
        assert watched.value("lease_waiters") == 1
        time.sleep(0.3)
        watched.observe()
        assert watched.value("lease_wait_seconds_count") == 1

        holder.close()
        wait_for(lambda: (watched.observe(), watched.value("lease_wait_seconds_count"))[1] == 2)
        assert watched.value("lease_waiters") == 0
        end.set()
        waiter.join(HANG_S)
        assert waiter.exitcode == 0
    watched.observe()

    assert watched.value("lease_wait_seconds_count") == 2, "its end is no other lease"
    assert 0.3 <= (watched.value("lease_wait_seconds_sum") or 0) <= time.monotonic() - begin_s


def test_a_waiter_that_was_killed_waits_no_more(watched: Watched) -> None:
    with attach("kv", root=watched.root), an_engine(watched.root) as (waiter, _end):
        wait_for(lambda: watched.observe().waiters == 1, HANG_S)
        waiter.kill()
        waiter.join(HANG_S)
        watched.observe()
        assert watched.value("lease_waiters") == 0
        assert watched.value("lease_wait_seconds_count") == 1
