"""The rank board: one run's, one writer a slot."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from hostprep.cuda import board as board_join
from hostprep.cuda.board import RankBoard
from hostprep.cuda.board_view import BoardReader
from hostprep.errors import BadInputError, BusyError, FailedError
from tests.kernel.cuda.ranks import HANG_S, a_rank, leave_a_ready_run, states
from tests.support.processes import wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


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


def test_what_an_earlier_run_left_does_not_count(path: str) -> None:
    leave_a_ready_run(path)
    assert states(path) == {0: ("Ready", False), 1: ("Ready", False)}
    board = RankBoard.open(path, generation="new", world=2, rank=0)
    assert states(path) == {0: ("Joined", True)}
    board.close()


def test_without_the_check_of_generations_it_would(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_a_ready_run(path)
    monkeypatch.setattr(board_join, "_is_of_run", lambda *_: True)
    # Its own slot is the earlier run's, and so would the other rank's be.
    with pytest.raises(BadInputError, match="has ended"):
        RankBoard.open(path, generation="new", world=2, rank=0)
    assert states(path)[1] == ("Ready", False)


def test_a_reader_waits_for_its_own_run(path: str) -> None:
    reader = BoardReader(path, generation="new")
    assert reader.read() is None
    leave_a_ready_run(path)
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
    leave_a_ready_run(path)
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
