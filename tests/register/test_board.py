"""The rank board: one run's, one writer a slot, and what becomes of the dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hostprep
from hostprep.errors import BadInputError, BusyError, FailedError, HostprepError, NotReadyError
from hostprep.register import board_join, board_layout
from hostprep.register.board import BoardReader, RankBoard
from hostprep.register.gate import Gate
from tests.register.users import as_user, become, expect
from tests.support.processes import forked, kill, wait_until

pytestmark = pytest.mark.kernel

CHECKOUT = Path(hostprep.__file__).parents[1]
RANK = Path(__file__).with_name("one_rank.py")
HANG_S = 30.0


@pytest.fixture
def path(memory_folder: Path) -> str:
    memory_folder.chmod(0o755)
    return str(memory_folder / "board")


@contextlib.contextmanager
def a_rank(
    path: str, run: str, world: int, rank: int, fate: str = "hang", *, before: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start a rank and wait until it has joined; killed afterwards."""
    process = subprocess.Popen(
        [*before, sys.executable, str(RANK), path, run, str(world), str(rank), fate],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "joined\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def states(path: str) -> dict[int, tuple[str, bool]]:
    return {rank.rank: (rank.slot.state, rank.alive) for rank in RankBoard.look(path).ranks}


def test_a_ranks_way(path: str) -> None:
    board = RankBoard.open(path, generation="a", world=4, rank=2)
    assert states(path) == {2: ("Joined", True)}
    board.initializing()
    board.progress(1 << 30, 4 << 30, 0.05)
    (rank,) = RankBoard.look(path).ranks
    assert (rank.slot.state, rank.slot.done_bytes, rank.slot.size_bytes) == (
        "Initializing", 1 << 30, 4 << 30,
    )  # fmt: skip
    board.ready()
    view = board.read()
    assert (view.world, view.ranks[0].slot.state, view.ranks[0].alive) == (4, "Ready", True)
    board.close()
    assert states(path) == {2: ("Ready", False)}
    with pytest.raises(FailedError, match="closed"):
        board.ready()


def test_failed_is_final_and_keeps_its_reason(path: str) -> None:
    board = RankBoard.open(path, generation="a", world=1, rank=0)
    board.failed("out of memory: \u00e9" * 100)
    (rank,) = RankBoard.look(path).ranks
    assert rank.slot.reason.startswith("out of memory: \u00e9out")
    assert len(rank.slot.reason.encode()) <= 300
    with pytest.raises(BadInputError, match="final"):
        board.ready()
    board.close()
    again = RankBoard.open(path, generation="a", world=1, rank=0)
    with pytest.raises(BadInputError, match="final"):
        again.initializing()
    again.close()


def test_closing_twice_does_not_close_the_next_one(path: str) -> None:
    """The second board gets the descriptor's number that the first one had."""
    first = RankBoard.open(path, generation="a", world=2, rank=0)
    first.close()
    second = RankBoard.open(path, generation="b", world=2, rank=1)
    first.close()
    first.announce("Open")
    with pytest.raises(FailedError, match="closed"):
        first.ready()
    assert states(path) == {1: ("Joined", True)}
    assert RankBoard.look(path).gate is None
    second.close()


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


def _leave_a_ready_run(path: str) -> None:
    with a_rank(path, "old", 2, 0, "ready"), a_rank(path, "old", 2, 1, "ready"):
        wait_until(
            lambda: all(state == "Ready" for state, _ in states(path).values()), timeout_s=HANG_S
        )


def test_what_an_earlier_run_left_does_not_count(path: str) -> None:
    _leave_a_ready_run(path)
    assert states(path) == {0: ("Ready", False), 1: ("Ready", False)}
    board = RankBoard.open(path, generation="new", world=2, rank=0)
    assert states(path) == {0: ("Joined", True)}
    board.close()


def test_without_the_check_of_generations_it_would(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave_a_ready_run(path)
    monkeypatch.setattr(board_join, "_is_of_run", lambda *_: True)
    # Its own slot is the earlier run's, and so would the other rank's be.
    with pytest.raises(BadInputError, match="has ended"):
        RankBoard.open(path, generation="new", world=2, rank=0)
    assert states(path)[1] == ("Ready", False)


def test_a_reader_waits_for_its_own_run(path: str) -> None:
    reader = BoardReader(path, generation="new")
    assert reader.read() is None
    _leave_a_ready_run(path)
    assert reader.read() is None
    board = RankBoard.open(path, generation="new", world=3, rank=1)
    view = reader.read()
    assert view is not None
    assert [rank.rank for rank in view.ranks] == [1]
    board.close()
    later = RankBoard.open(path, generation="later", world=3, rank=1)
    view = reader.read()
    assert view is not None
    assert view.removed
    reader.close()
    later.close()


def test_ranks_of_a_living_run_are_not_pushed_off(path: str) -> None:
    with a_rank(path, "first", 2, 0):
        with pytest.raises(BusyError, match="another run"):
            RankBoard.open(path, generation="second", world=2, rank=0, wait_s=0.1)
        wait_until(lambda: states(path) == {0: ("Initializing", True)}, timeout_s=HANG_S)
    RankBoard.open(path, generation="second", world=2, rank=0).close()


def test_a_rank_is_reported_once(path: str) -> None:
    with a_rank(path, "run", 2, 1), pytest.raises(BadInputError, match="process that lives"):
        RankBoard.open(path, generation="run", world=2, rank=1)
    with pytest.raises(BadInputError, match="process that has ended"):
        RankBoard.open(path, generation="run", world=2, rank=1)
    assert states(path)[1][1] is False


def test_one_process_is_a_rank_once_at_a_time(path: str) -> None:
    first = RankBoard.open(path, generation="run", world=2, rank=1)
    with pytest.raises(BadInputError, match="process that lives"):
        RankBoard.open(path, generation="run", world=2, rank=1)
    first.close()
    RankBoard.open(path, generation="run", world=2, rank=1).close()


def test_who_waited_for_the_old_board_does_not_remove_the_new_one(path: str) -> None:
    _leave_a_ready_run(path)
    joined: list[RankBoard] = []
    with open(path, "rb") as old:
        fcntl.flock(old, fcntl.LOCK_EX)  # as a rank that is about to replace it
        late = threading.Thread(
            target=lambda: joined.append(
                RankBoard.open(path, generation="new", world=2, rank=1, wait_s=HANG_S)
            )
        )
        late.start()
        time.sleep(0.2)
        os.unlink(path)
        joined.append(RankBoard.open(path, generation="new", world=2, rank=0))
    late.join(HANG_S)
    assert states(path) == {0: ("Joined", True), 1: ("Joined", True)}
    for board in joined:
        board.close()


def test_another_world_size_is_refused(path: str) -> None:
    board = RankBoard.open(path, generation="run", world=2, rank=1)
    before = Path(path).read_bytes()
    with pytest.raises(BadInputError, match="world of 4.*of 2.*same world size"):
        RankBoard.open(path, generation="run", world=4, rank=0)
    assert Path(path).read_bytes() == before
    board.close()


@pytest.mark.parametrize(
    ("world", "rank", "run"),
    [(0, 0, "r"), (-1, 0, "r"), (1025, 0, "r"), (2, 2, "r"), (2, -1, "r"), (2, 0, "")],
)
def test_what_cannot_be_is_refused_and_nothing_made(
    path: str, world: int, rank: int, run: str
) -> None:
    with pytest.raises(BadInputError):
        RankBoard.open(path, generation=run, world=world, rank=rank)
    assert not os.path.lexists(path)


def _cut_short(path: str) -> None:
    os.truncate(path, 700)


def _of_another_version(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(8)
        file.write((7).to_bytes(4, "little"))


def _empty(path: str) -> None:
    os.truncate(path, 0)


def _other_world(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(12)
        file.write((3).to_bytes(4, "little"))


@pytest.mark.parametrize("spoil", [_cut_short, _of_another_version, _empty, _other_world])
def test_a_board_that_cannot_be_understood(path: str, spoil: object) -> None:
    assert callable(spoil)
    with a_rank(path, "run", 2, 0):
        spoil(path)
        with pytest.raises(NotReadyError, match="rank board"):
            RankBoard.look(path)
        with pytest.raises(NotReadyError, match="rank board"):
            RankBoard.open(path, generation="run", world=2, rank=1)
    # Nobody lives in it: it is replaced.
    board = RankBoard.open(path, generation="run", world=2, rank=1)
    assert states(path) == {1: ("Joined", True)}
    board.close()


def test_a_board_cut_short_under_a_gate_degrades_it_and_kills_nobody(path: str) -> None:
    board = RankBoard.open(path, generation="run", world=2, rank=0)
    said: list[str] = []
    gate = Gate(2, board, on_degraded=said.append)
    os.truncate(path, 100)
    assert not gate.wait(HANG_S)
    assert "cut short" in gate.why
    wait_until(lambda: said == [gate.why], timeout_s=HANG_S)
    board.ready()
    board.close()


def test_links_and_other_things_in_its_place(path: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("not yours")
    os.symlink(precious, path)
    with pytest.raises(HostprepError):
        RankBoard.open(path, generation="run", world=1, rank=0)
    with pytest.raises(HostprepError):
        RankBoard.look(path)
    assert precious.read_text() == "not yours"
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(HostprepError):
        RankBoard.open(path, generation="run", world=1, rank=0)
    os.unlink(path)
    with pytest.raises(NotReadyError, match="no rank board"):
        RankBoard.look(path)


def test_a_damaged_slot_is_not_believed(path: str) -> None:
    board = RankBoard.open(path, generation="run", world=2, rank=0)
    board.initializing()
    with open(path, "r+b") as file:  # READY, without the sum that goes with it
        file.seek(board_layout.slot_offset(0) + 12)
        file.write(b"\x03")
    with pytest.raises(NotReadyError, match="rank 0"):
        RankBoard.look(path)
    board.ready()
    assert states(path)[0][0] == "Ready"
    board.close()


def test_readers_never_see_half_of_a_write(path: str) -> None:
    with a_rank(path, "run", 2, 0, "again"):
        for _ in range(2000):
            (rank,) = RankBoard.look(path).ranks
            assert rank.slot.done_bytes == rank.slot.size_bytes


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
