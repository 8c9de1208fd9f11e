"""A rank board that is cut short, forged, torn, or no board at all."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.cuda import board_layout
from hostprep.cuda.board import RankBoard
from hostprep.cuda.board_view import BoardReader, read_board
from hostprep.cuda.gate import Gate
from hostprep.errors import HostprepError, NotReadableError, NotReadyError
from tests.kernel.cuda.ranks import HANG_S, a_rank, states
from tests.support.processes import wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


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


def test_a_board_with_a_second_name_is_another_files(path: str) -> None:
    with a_rank(path, "run", 1, 0):
        os.link(path, f"{path}.second")
        with pytest.raises(NotReadableError, match="2 names"):
            read_board(path)
        os.unlink(f"{path}.second")
        assert read_board(path).world == 1


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


@contextlib.contextmanager
def _torn(path: str, rank: int) -> Iterator[None]:
    """Have a rank's slot as it is in the middle of a write, and finish that at the end."""
    at = board_layout.slot_offset(rank)
    with open(path, "r+b") as file:
        whole = os.pread(file.fileno(), board_layout.SLOT_BYTES, at)
        os.pwrite(file.fileno(), bytes(100), at + 100)
        os.pwrite(file.fileno(), b"\x07", at + 12)
        yield
        os.pwrite(file.fileno(), whole, at)


def test_a_writer_that_loses_its_cpu_in_the_middle_does_not_cost_the_gate(path: str) -> None:
    boards = [RankBoard.open(path, generation="run", world=2, rank=rank) for rank in range(2)]
    boards[1].ready()
    with _torn(path, 1):
        gates = [Gate(2, boards[0]), Gate(2, BoardReader(path, generation="run"))]
        time.sleep(0.3)
        assert [gate.state for gate in gates] == ["Closed", "Closed"]
    boards[0].ready()
    assert all(gate.wait(HANG_S) for gate in gates)
    for board in boards:
        board.close()


def test_one_that_stays_torn_degrades_it(path: str) -> None:
    boards = [RankBoard.open(path, generation="run", world=2, rank=rank) for rank in range(2)]
    with _torn(path, 1):
        gate = Gate(2, boards[0], on_degraded=lambda _: None)
        assert not gate.wait(HANG_S)
    assert "rank 1 is damaged" in gate.why
    for board in boards:
        board.close()


def test_readers_never_see_half_of_a_write(path: str) -> None:
    with a_rank(path, "run", 2, 0, "again"):
        for _ in range(2000):
            (rank,) = RankBoard.look(path).ranks
            assert rank.slot.done_bytes == rank.slot.size_bytes
