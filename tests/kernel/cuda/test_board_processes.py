"""The rank board among forked children, users, namespaces and kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hostprep.cuda.board import RankBoard
from hostprep.cuda.board_view import BoardReader
from hostprep.cuda.gate import Gate
from hostprep.errors import BadInputError, FailedError
from tests.kernel.cuda.ranks import CHECKOUT, HANG_S, RANK, a_rank, states
from tests.kernel.cuda.users import as_user, become, expect
from tests.support.processes import forked, kill, wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


def test_a_child_forked_while_the_board_is_read_does_not_hang(path: str) -> None:
    board = RankBoard.open(path, generation="a", world=1, rank=0)

    def leave(ready: Callable[[], None]) -> None:
        with pytest.raises(FailedError, match="forked"):
            board.read()
        board.close()
        ready()

    with board._lock:  # as the gate's thread holds it at the moment of a fork
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            leave(lambda: os._exit(0))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert states(path) == {0: ("Joined", True)}
    board.close()


def test_kill_is_seen_though_a_forked_child_lives_on(path: str) -> None:
    def work(ready: object) -> None:
        assert callable(ready)
        board = RankBoard.open(path, generation="run", world=1, rank=0)
        if os.fork() == 0:
            with pytest.raises(FailedError, match="forked"):
                board.ready()
            Path(f"{path}.child").write_text(str(os.getpid()))
            time.sleep(600)
        ready()

    with forked(work) as pid:
        wait_until(lambda: os.path.exists(f"{path}.child"), timeout_s=HANG_S)
        assert states(path) == {0: ("Joined", True)}
        kill(pid)
        try:
            assert states(path) == {0: ("Joined", False)}
        finally:
            os.kill(int(Path(f"{path}.child").read_text()), signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces and users")
def test_a_rank_of_another_pid_namespace(path: str) -> None:
    with a_rank(path, "run", 2, 0, "ready", before=("unshare", "--pid", "--fork", "--kill-child")):
        wait_until(lambda: states(path)[0] == ("Ready", True), timeout_s=HANG_S)
        (rank,) = RankBoard.look(path).ranks
        assert rank.slot.process.pid == 1
    wait_until(lambda: states(path)[0] == ("Ready", False), timeout_s=HANG_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces and users")
def test_users_of_the_pools_group_share_it(path: str) -> None:
    folder = os.path.dirname(path)
    os.chown(folder, -1, 54321)
    os.chmod(folder, 0o2770)

    def hold(ready: object) -> None:
        assert callable(ready)
        become(1000, 54321)
        board = RankBoard.open(path, generation="run", world=2, rank=0)
        board.ready()
        ready()
        time.sleep(600)

    def join() -> None:
        board = RankBoard.open(path, generation="run", world=2, rank=1)
        board.ready()
        expect(board.read().ranks[0].alive)

    def replace() -> None:
        RankBoard.open(path, generation="later", world=2, rank=0)

    def refused() -> None:
        with pytest.raises(BadInputError, match=r"Gate\.report"):
            RankBoard.open(path, generation="run", world=2, rank=1)

    with forked(hold):
        as_user(1001, refused)
        as_user(1001, join, 54321)
    assert os.stat(path).st_mode & 0o777 == 0o660
    as_user(1001, replace, 54321)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces and users")
def test_a_folder_that_may_only_be_read(path: str) -> None:
    RankBoard.open(path, generation="run", world=2, rank=0).close()
    os.chmod(path, 0o644)

    def look_but_not_join() -> None:
        expect(len(RankBoard.look(path).ranks) == 1)
        reader = BoardReader(path, generation="run")
        expect(reader.read() is not None)
        reader.announce("Open")
        with pytest.raises(BadInputError, match=r"Gate\.report"):
            RankBoard.open(path, generation="run", world=2, rank=1)

    before = Path(path).read_bytes()
    as_user(1000, look_but_not_join)
    assert Path(path).read_bytes() == before


def test_killed_at_random_points_no_run_is_misled(path: str) -> None:
    """Ranks die joining, replacing and writing; each next run begins from nothing."""
    chance = random.Random(6)
    for run in range(12):
        started = [
            subprocess.Popen(
                [sys.executable, str(RANK), path, f"run{run}", "3", str(rank), "ready"],
                env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
            for rank in range(3)
        ]
        time.sleep(0.1 + chance.random() * 0.2)
        for process in started:
            process.kill()
        for process in started:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        left = os.listdir(os.path.dirname(path))
        assert set(left) <= {"board"}, "nothing else is left of the dead"
        if left:
            assert not RankBoard.look(path).alive
    boards = [RankBoard.open(path, generation="last", world=3, rank=rank) for rank in range(3)]
    gate = Gate(3, boards[0])
    for board in boards:
        assert not gate.is_open
        board.ready()
    assert gate.wait(HANG_S)
    for board in boards:
        board.close()
