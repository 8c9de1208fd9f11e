"""Engines' gates as a real worker finds them, and what the agent makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.agent.messages import GateObservation, Observation, ReconcileResult
from hostprep.agent.metrics import GateMetrics, Registry
from hostprep.backing import Backing
from hostprep.client.attach import attach
from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.board_view import BoardReader
from hostprep.cuda.gate import Gate
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import pool_of
from testbed.processes import wait_for
from tests.kernel.cuda.ranks import a_rank
from tests.kernel.worker_process import WorkerProcess, wanted

pytestmark = pytest.mark.kernel

KV = pool_of(regions=2, mib=4, backing=Backing.BASE)
HANG_S = 30.0


class Watched:
    """A pool, the worker that looks at it, and the metrics of what it finds."""

    def __init__(self, node: Node, worker: WorkerProcess) -> None:
        self.paths = PoolPaths(node.root, "kv")
        self._worker = worker
        self._registry = Registry()
        self._metrics = GateMetrics(self._registry)

    def look(self) -> tuple[GateObservation, ...]:
        """Have it look, as in each round, and return the gates that it finds."""
        looks: list[Observation] = [
            message.observation
            for message in self._worker.round(*wanted(KV))
            if isinstance(message, ReconcileResult)
        ]
        self._metrics.show(looks[0])
        return looks[0].pools[0].gates

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"hostprep_{name}", {"pool": "kv", **labels})


@pytest.fixture
def watched(node: Node) -> Iterator[Watched]:
    with WorkerProcess(node.root) as worker:
        worker.round(*wanted(KV))
        watched = Watched(node, worker)
        assert watched.look() == ()
        yield watched


def test_an_engine_whose_rank_fails_is_degraded_once(watched: Watched) -> None:
    board = watched.paths.board("node0-0")
    with a_rank(board, "run", 2, 0, "ready"), a_rank(board, "run", 2, 1, "fail"):
        gate = Gate(2, BoardReader(board, generation="run"), on_degraded=lambda _why: None)
        assert not gate.wait(HANG_S)
        for _ in range(3):
            (seen,) = watched.look()
            assert (seen.region, seen.state, seen.is_running) == ("node0-0", "Degraded", True)
        assert watched.value("gates", state="Degraded") == 1
        assert watched.value("gates_degraded_total") == 1
    (seen,) = watched.look()
    assert not seen.is_running
    assert watched.value("gates", state="Degraded") == 0
    with a_rank(board, "next", 1, 0, "fail"):
        wait_for(lambda: RankBoard.look(board).ranks[0].slot.state == "Failed", HANG_S)
        watched.look()
        watched.look()
    assert watched.value("gates_degraded_total") == 2
    assert watched.value("gate_open_seconds_count") == 0


def test_an_engine_that_opens_its_gate_is_timed_once_and_its_bytes_are_shown(
    watched: Watched,
) -> None:
    memory = attach("kv", root=watched.paths.root)
    board = RankBoard.open(board_path(memory), generation=memory.lease_id, world=1, rank=0)
    gate = Gate(1, board)
    board.initializing()
    board.progress(3 << 20, 4 << 20, 0.05)
    (seen,) = watched.look()
    assert (seen.state, seen.open_after_s) == ("Closed", None)
    assert watched.value("registered_bytes") == 3 << 20
    assert watched.value("register_longest_chunk_seconds") == 0.05
    board.ready()
    assert gate.wait(HANG_S)
    for _ in range(3):
        (seen,) = watched.look()
        assert seen.state == "Open"
    board.close()
    memory.close()
    watched.look()
    assert watched.value("gate_open_seconds_count") == 1
    assert 0 < (watched.value("gate_open_seconds_sum") or 0) < HANG_S
    assert watched.value("gates_degraded_total") == 0
    assert watched.value("registered_bytes") == watched.value("gates", state="Open") == 0


def test_ranks_that_end_one_by_one_are_no_degradation(watched: Watched) -> None:
    """Nor where no gate of the engine's announced anything: it had opened."""
    board = watched.paths.board("node0-0")
    with a_rank(board, "run", 2, 0, "ready"):
        with a_rank(board, "run", 2, 1, "ready"):
            wait_for(
                lambda: [rank.slot.state for rank in RankBoard.look(board).ranks] == ["Ready"] * 2,
                HANG_S,
            )
        (seen,) = watched.look()
        assert (seen.state, seen.is_running) == ("Open", True)
    assert watched.value("gates_degraded_total") == 0


def test_junk_in_a_boards_place_spoils_no_look(watched: Watched) -> None:
    Path(watched.paths.board("node0-0")).write_bytes(b"HPBOARD\0junk")
    assert watched.look() == (), "nobody leases it: what was left there is no gate"
    with attach("kv", root=watched.paths.root, region="node0-0"):
        (seen,) = watched.look()
        assert (seen.region, seen.state) == ("node0-0", "Unknown")
        assert watched.value("gates", state="Unknown") == 1
    assert watched.value("gates_degraded_total") == 0


def test_a_figure_that_cannot_be_spoils_no_metric(watched: Watched) -> None:
    board = RankBoard.open(watched.paths.board("node0-0"), generation="run", world=1, rank=0)
    for seconds in (float("nan"), float("-inf"), 1e300):
        board.progress(1, 1, seconds)
        assert watched.look() == (), "a board with a number that no engine writes is believed"
    for seconds, shown in ((1e12, 1e9), (0.5, 0.5)):
        board.progress(1, 1, seconds)
        (seen,) = watched.look()
        assert seen.longest_chunk_s == shown
    board.close()
