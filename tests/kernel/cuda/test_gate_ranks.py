"""The gate over real ranks, and what polling it costs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from hostprep.cuda.board import RankBoard
from hostprep.cuda.board_view import BoardReader
from hostprep.cuda.gate import Gate
from hostprep.errors import BadInputError
from tests.kernel.cuda.ranks import HANG_S, a_rank
from tests.support.processes import wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


def test_polling_costs_next_to_nothing_and_no_system_call(memory_folder: Path) -> None:
    path = str(memory_folder / "board")
    boards = [RankBoard.open(path, generation="run", world=8, rank=rank) for rank in range(8)]
    gate = Gate(8, boards[0])
    polls = 200_000
    took_s = min(timeit.repeat(lambda: gate.is_open, number=polls, repeat=5)) / polls
    print(f"a poll takes {took_s * 1e9:.0f} ns")
    assert took_s < 10e-6
    gate.close()
    for board in boards:
        board.close()


@pytest.mark.parametrize(("poll", "shown"), [("gate.is_open", b"polled"), ("os.getppid()", b"")])
def test_a_poll_makes_no_system_call(poll: str, shown: bytes) -> None:
    """Under strict seccomp (prctl(2)) any system call but read and write ends the process.

    So does its own end, hence a signal in any case; and one that polls by a system call, before.
    """
    code = (
        "import ctypes, os\n"
        "from hostprep.register.gate import Gate\n"
        "gate = Gate(2)\n"
        "libc = ctypes.CDLL(None)\n"
        f"poll = lambda: [{poll} for _ in range(10)]\n"
        "poll()\n"
        "assert libc.prctl(22, 1, 0, 0, 0) == 0\n"
        "poll()\n"
        "os.write(1, b'polled')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert (done.returncode < 0, done.stdout) == (True, shown)


def test_eight_ranks_open_it_when_the_last_is_ready(memory_folder: Path) -> None:
    path = str(memory_folder / "board")
    gate = Gate(8, BoardReader(path, generation="run"))
    with contextlib.ExitStack() as stack:
        for rank in range(7):
            stack.enter_context(a_rank(path, "run", 8, rank, "ready"))
        wait_until(lambda: gate.why.startswith("7 of 8 ranks ready"), timeout_s=HANG_S)
        assert not gate.is_open
        stack.enter_context(a_rank(path, "run", 8, 7, "ready"))
        assert gate.wait(HANG_S)
        wait_until(lambda: (RankBoard.look(path).gate) is not None, timeout_s=HANG_S)
        announced = RankBoard.look(path).gate
        assert announced is not None
        assert announced.state == "Open"
    assert gate.is_open, "once open it stays open"


def test_one_of_eight_that_fails_degrades_it(memory_folder: Path) -> None:
    path = str(memory_folder / "board")
    said: list[str] = []
    gate = Gate(8, BoardReader(path, generation="run"), on_degraded=said.append)
    with contextlib.ExitStack() as stack:
        for rank in range(8):
            stack.enter_context(a_rank(path, "run", 8, rank, "fail" if rank == 5 else "ready"))
        assert not gate.wait(HANG_S)
        wait_until(lambda: bool(said), timeout_s=HANG_S)
    assert gate.why == "rank 5 failed: no memory to pin"
    assert said == [gate.why]
    announced = RankBoard.look(path).gate
    assert announced is not None
    assert (announced.state, announced.reason) == ("Degraded", gate.why)


def test_after_kill_of_one_rank_that_runs_gate_never_opens(memory_folder: Path) -> None:
    path = str(memory_folder / "board")
    gate = Gate(2, BoardReader(path, generation="run"))
    with a_rank(path, "run", 2, 0, "ready"):
        with a_rank(path, "run", 2, 1, "hang"):
            wait_until(lambda: "1 (initializing)" in gate.why, timeout_s=HANG_S)
        assert not gate.wait(HANG_S)
        assert gate.why == "rank 1 ended before it was ready"
        with pytest.raises(BadInputError, match="has ended"):
            RankBoard.open(path, generation="run", world=2, rank=1)
        late = Gate(2, BoardReader(path, generation="run"))
        assert not late.wait(HANG_S), "nor does a gate that looks later"
    fresh = [RankBoard.open(path, generation="next", world=2, rank=rank) for rank in range(2)]
    gate = Gate(2, fresh[0])
    for board in fresh:
        board.ready()
    assert gate.wait(HANG_S), "the next run's does"
    for board in fresh:
        board.close()


def test_an_earlier_runs_ready_ranks_do_not_open_it(memory_folder: Path) -> None:
    path = str(memory_folder / "board")
    with a_rank(path, "old", 2, 0, "ready"), a_rank(path, "old", 2, 1, "ready"):
        assert Gate(2, BoardReader(path, generation="old")).wait(HANG_S)
        fresh = Gate(2, BoardReader(path, generation="new"), deadline_s=0.5)
        assert not fresh.wait(HANG_S)


def test_without_the_readers_check_of_generations_they_would(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(memory_folder / "board")
    monkeypatch.setattr("hostprep.cuda.board_view.generation_of", lambda _: EqualToAll())
    with a_rank(path, "old", 2, 0, "ready"), a_rank(path, "old", 2, 1, "ready"):
        assert Gate(2, BoardReader(path, generation="new"), deadline_s=HANG_S).wait(HANG_S)


class EqualToAll:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def test_a_forked_child_has_no_gate_that_opens() -> None:
    gate = Gate(1, deadline_s=600)
    pid = os.fork()
    if pid == 0:
        gate.report(0, "Ready")
        os._exit(0 if (gate.is_open, gate.state) == (False, "Degraded") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    gate.report(0, "Ready")
    assert gate.is_open
