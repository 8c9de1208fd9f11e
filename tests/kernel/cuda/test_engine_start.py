"""The second seed's test plan: an engine serves while its ranks register, and joins when all have.

Two ranks as processes, with the board, the turnstile and the stand-in driver; the scheduler in
this one, with the gate.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.cuda.board_view import BoardReader
from hostprep.cuda.gate import Gate
from hostprep.cuda.turnstile_files import make_turnstiles
from hostprep.linux.locks import try_lock
from testbed.processes import wait_for
from testbed.standin.children import Scene, in_child
from tests.kernel.cuda.parts import LONG_S

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]

WORLD = 2


class Scheduler:
    """The engine's side: asks the gate for each request, and serves each."""

    def __init__(self, scene: Scene) -> None:
        self.said: list[str] = []
        reader = BoardReader(str(scene.folder / "board"), generation="run")
        self.gate = Gate(WORLD, reader, on_degraded=self.said.append)
        self.hits = self.served = 0

    def serve(self, requests: int) -> None:
        """Serve requests whose prefix is in host memory: hits, if it may be used."""
        for _ in range(requests):
            self.hits += self.gate.is_open
            self.served += 1


@contextlib.contextmanager
def _rank(
    scene: Scene, rank: int, *, mode: str = "background", fail: str = ""
) -> Iterator[subprocess.Popen[str]]:
    what = (str(scene.folder), "run", str(WORLD), str(rank), mode)
    process = subprocess.Popen(
        [sys.executable, "-B", "-m", "tests.kernel.cuda.engine_rank", *what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "STANDIN_FAIL": fail},
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@in_child()
def test_it_serves_without_hits_until_the_last_rank_has_registered(scene: Scene) -> None:
    scheduler = Scheduler(scene)
    with contextlib.ExitStack() as stack:
        with scene.busy_driver():
            ranks = [stack.enter_context(_rank(scene, rank)) for rank in range(WORLD)]
            for rank in ranks:
                assert _line(rank).startswith("serving ")
            scheduler.serve(100)
            assert not scheduler.gate.is_open
        assert [_line(rank) for rank in ranks] == ["ended Registered"] * WORLD
        assert scheduler.gate.wait(LONG_S)
        scheduler.serve(10)
    assert (scheduler.served, scheduler.hits, scheduler.said) == (110, 10, [])


@in_child()
def test_one_rank_that_fails_leaves_it_serving_from_gpu_memory(scene: Scene) -> None:
    scheduler = Scheduler(scene)
    with _rank(scene, 0) as good, _rank(scene, 1, fail="register:3:2") as bad:
        assert {_line(good)[:7], _line(bad)[:7]} == {"serving"}
        assert [_line(good), _line(bad)] == ["ended Registered", "ended Failed"]
        assert not scheduler.gate.wait(LONG_S)
        scheduler.serve(100)
        wait_for(lambda: scheduler.said)
        assert scene.calls("unregister", pid=good.pid) == []
        assert len(scene.calls("unregister", pid=bad.pid)) == 2
    assert (scheduler.gate.state, scheduler.served, scheduler.hits) == ("Degraded", 100, 0)
    assert "rank 1 failed" in scheduler.said[0]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in scheduler.said[0]
    assert len(scheduler.said) == 1


@in_child()
def test_sync_serves_only_when_all_is_registered(scene: Scene) -> None:
    with contextlib.ExitStack() as stack:
        with scene.busy_driver():
            rank = stack.enter_context(_rank(scene, 0, mode="sync"))
            wait_for(lambda: scene.calls("capture_mode", pid=rank.pid), LONG_S)
            assert scene.calls("register", pid=rank.pid) == []
        assert _line(rank) == "serving Registered"
        assert len(scene.calls("register", pid=rank.pid)) == 4


@in_child(fail="register:2:2")
def test_sync_fails_as_engines_do_today(scene: Scene) -> None:
    with _rank(scene, 0, mode="sync", fail="register:2:2") as rank:
        assert _line(rank) == "ended OutOfMemory"


@in_child()
def test_processes_take_turns_chunk_by_chunk(scene: Scene) -> None:
    """Who waits is next, though who registers would have more to register."""
    folder = scene.folder / "turnstile" / "node"
    make_turnstiles(str(scene.folder))

    def is_first_at_work_and_second_in_line() -> bool:
        tickets = [file for file in folder.iterdir() if file.name.isdigit()]
        return len(tickets) == WORLD and not _is_free(folder / "slot0")

    with contextlib.ExitStack() as stack:
        with scene.busy_driver():
            ranks = [stack.enter_context(_rank(scene, rank)) for rank in range(WORLD)]
            for rank in ranks:
                assert _line(rank).startswith("serving ")
            wait_for(is_first_at_work_and_second_in_line, LONG_S)
        for rank in ranks:
            assert _line(rank) == "ended Registered"
        order = [pid for pid, text in scene.lines() if text == "enter"]
    assert sorted(order) == sorted([rank.pid for rank in ranks] * 4)
    assert order[0] != order[1]


def _is_free(path: Path) -> bool:
    with path.open("rb") as file:
        return try_lock(file.fileno(), exclusive=True)
