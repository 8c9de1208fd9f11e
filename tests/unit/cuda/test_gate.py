"""The gate: closed until all are ready, and for good once one is not to be."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.cuda.board_layout import Holes, Slot
from hostprep.cuda.board_view import BoardView, RankView
from hostprep.cuda.gate import ALL, Gate, Report, common_holes, common_mark, judge
from hostprep.errors import BadInputError
from hostprep.linux.processes import ProcessId
from tests.support.processes import wait_until

pytestmark = pytest.mark.unit

HANG_S = 30.0
_STATES = ["Joined", "Initializing", "Ready", "Failed"]


def view(world: int, *ranks: tuple[int, str, bool], removed: bool = False) -> BoardView:
    return BoardView(
        world=world,
        generation=bytes(16),
        created_at_s=0.0,
        ranks=tuple(
            RankView(rank, Slot(1, state, ProcessId(1, 1, 1), 0.0, reason="no room"), alive)
            for rank, state, alive in ranks
        ),
        gate=None,
        removed=removed,
    )


@pytest.mark.parametrize(
    ("reports", "board", "state", "why"),
    [
        ({}, None, "Closed", "0 of 2 ranks ready; waiting for 0 (not reported), 1 (not reported)"),
        ({0: "Ready"}, None, "Closed", "1 of 2 ranks ready; waiting for 1 (not reported)"),
        ({0: "Ready", 1: "Ready"}, None, "Open", ""),
        ({}, view(2, (0, "Ready", True), (1, "Ready", True)), "Open", ""),
        ({1: "Ready"}, view(2, (0, "Ready", True)), "Open", ""),
        ({1: "Ready"}, view(2, (0, "Ready", True), (1, "Initializing", True)), "Closed", "1 of 2"),
        ({0: "Initializing", 1: "Ready"}, view(2, (0, "Ready", True)), "Closed", "1 of 2"),
        ({0: "Failed"}, None, "Degraded", "rank 0 failed: out of luck"),
        ({1: "Failed"}, view(2, (0, "Ready", True), (1, "Ready", True)), "Degraded", "rank 1"),
        ({}, view(2, (0, "Failed", True)), "Degraded", "rank 0 failed: no room"),
        ({}, view(2, (0, "Initializing", False)), "Degraded", "rank 0 ended before it was ready"),
        ({}, view(2, (0, "Ready", True), (1, "Ready", False)), "Degraded", "rank 1 ended after"),
        ({}, view(4, (0, "Ready", True)), "Degraded", "for 4 ranks, this gate for 2"),
        ({}, view(2, (0, "Ready", True), removed=True), "Degraded", "removed"),
        ({}, view(2, (0, "Ready", True), (1, "Ready", True), removed=True), "Open", ""),
    ],
)
def test_what_follows_from_what_is_known(
    reports: dict[int, str], board: BoardView | None, state: str, why: str
) -> None:
    said = {rank: Report(told, "out of luck") for rank, told in reports.items()}
    verdict = judge(2, said, board)
    assert verdict.state == state
    assert why in verdict.why
    assert bool(verdict.why) == (state != "Open")


@given(
    st.integers(1, 5),
    st.dictionaries(st.integers(0, 4), st.sampled_from(_STATES)),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(_STATES), st.booleans()), max_size=5),
)
def test_it_never_opens_unless_all_that_is_known_says_ready(
    world: int, reports: dict[int, str], ranks: list[tuple[int, str, bool]]
) -> None:
    reports = {rank: state for rank, state in reports.items() if rank < world}
    unique = {rank[0]: rank for rank in ranks if rank[0] < world}
    board = view(world, *(unique[rank] for rank in sorted(unique)))
    verdict = judge(world, {rank: Report(state) for rank, state in reports.items()}, board)
    all_ready = all(
        {reports.get(rank, "Ready"), unique.get(rank, (0, "Ready", True))[1]} == {"Ready"}
        and (rank in reports or rank in unique)
        and unique.get(rank, (0, "", True))[2]
        for rank in range(world)
    )
    assert (verdict.state == "Open") == all_ready


def test_it_opens_once_by_the_engines_own_channel() -> None:
    opened: list[int] = []
    gate = Gate(3, on_open=lambda: opened.append(1))
    for rank in range(3):
        assert (gate.is_open, gate.state) == (False, "Closed")
        gate.report(rank, "READY")
    assert (gate.is_open, gate.state, gate.why) == (True, "Open", "")
    assert gate.opened_after_s is not None
    gate.report(1, "Failed", "too late")
    gate.report(0, "Ready")
    gate.close()
    assert (gate.is_open, gate.state, opened) == (True, "Open", [1])


def test_degraded_it_stays_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(2)
    with caplog.at_level(logging.WARNING):
        gate.report(0, "failed", "CUDA_ERROR_OUT_OF_MEMORY")
        gate.report(1, "failed", "too")
        gate.report(0, "Ready")
        gate.report(1, "Ready")
    assert (gate.is_open, gate.state) == (False, "Degraded")
    assert gate.why == "rank 0 failed: CUDA_ERROR_OUT_OF_MEMORY"
    assert len(caplog.records) == 1
    assert "GPU memory alone" in caplog.text


def test_a_rank_that_began_again_is_not_ready() -> None:
    gate = Gate(2)
    gate.report(0, "Ready")
    gate.report(0, "Initializing")
    gate.report(1, "Ready")
    assert not gate.is_open
    gate.report(0, "Ready")
    assert gate.is_open


def test_the_engines_mistakes_do_not_become_the_gates(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(_: str) -> None:
        raise ZeroDivisionError

    gate = Gate(1, on_degraded=wrong)
    gate.report(0, "Failed", "x")
    assert gate.state == "Degraded"
    assert "callback" in caplog.text


@pytest.mark.parametrize(
    ("rank", "state"), [(2, "Ready"), (-1, "Ready"), (0, "Open"), (0, ""), (0, "Closed")]
)
def test_a_report_that_cannot_be_is_refused(rank: int, state: str) -> None:
    gate = Gate(2)
    with pytest.raises(BadInputError):
        gate.report(rank, state)
    assert gate.state == "Closed"


@pytest.mark.parametrize("world", [0, -1, 1025])
def test_a_world_that_cannot_be_is_refused(world: int) -> None:
    with pytest.raises(BadInputError):
        Gate(world)


def test_a_deadline_degrades_it_and_names_who_is_missing() -> None:
    gate = Gate(2, deadline_s=0.1)
    gate.report(1, "Ready")
    assert not gate.wait(HANG_S)
    assert gate.state == "Degraded"
    assert "no progress within 0.1 s" in gate.why
    assert "waiting for 0 (not reported)" in gate.why


def test_a_deadline_is_for_progress_and_not_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 TiB in short calls takes half an hour."""

    class Clock:
        now_s = 1000.0

        def monotonic(self) -> float:
            return self.now_s

    clock, board = Clock(), Shown(_at(("Initializing", 0), ("Initializing", 0)))
    monkeypatch.setattr("hostprep.cuda.gate.time", clock)
    gate = Gate(2, board, deadline_s=60)
    for done in range(1, 6):
        board.board = _at(("Initializing", done), ("Initializing", 0))
        wait_until(lambda done=done: gate._done_bytes == done)  # type: ignore[misc]
        clock.now_s += 50
        assert not gate.wait(0.05)
        assert gate.state == "Closed"
    clock.now_s += 11
    assert not gate.wait(HANG_S)
    assert gate.state == "Degraded"
    assert "no progress within 60 s" in gate.why


def _at(*ranks: tuple[str, int], alive: bool = True) -> BoardView:
    """Return the board of two ranks that have registered so much."""
    seen = view(2, *((rank, state, alive) for rank, (state, _) in enumerate(ranks)))
    marked = (
        replace(rank, slot=replace(rank.slot, done_bytes=done))
        for rank, (_, done) in zip(seen.ranks, ranks, strict=True)
    )
    return replace(seen, ranks=tuple(marked))


@pytest.mark.parametrize(
    ("board", "mark"),
    [
        (None, 0),
        (_at(("Initializing", 64)), 0),
        (_at(("Initializing", 64), ("Joined", 0)), 0),
        (_at(("Initializing", 64), ("Initializing", 48)), 48),
        (_at(("Ready", 64), ("Initializing", 48)), 48),
        (_at(("Failed", 16), ("Initializing", 48)), 16),
        (_at(("Ready", 64), ("Ready", 64)), ALL),
        (_at(("Ready", 0), ("Ready", 0)), ALL),
    ],
)
def test_what_can_be_used_is_what_all_ranks_have_registered(
    board: BoardView | None, mark: int
) -> None:
    assert common_mark(2, board) == mark


@given(st.lists(st.tuples(st.sampled_from(_STATES), st.integers(0, 99)), min_size=2, max_size=2))
def test_a_gate_that_grows_opens_with_the_first_bytes_of_all(ranks: list[tuple[str, int]]) -> None:
    board = _at(*ranks)
    grown, whole = judge(2, {}, board, grows=True), judge(2, {}, board)
    states = {state for state, _ in ranks}
    if "Failed" in states:
        assert grown.state == whole.state == "Degraded"
    elif states == {"Ready"}:
        assert grown.state == whole.state == "Open"
    else:
        assert whole.state == "Closed"
        assert (grown.state == "Open") == all(d or s == "Ready" for s, d in ranks)


def _with_holes(board: BoardView, *holes: Holes) -> BoardView:
    """Return the board on which each rank passed over so much."""
    ranks = (
        replace(rank, slot=replace(rank.slot, holes=passed))
        for rank, passed in zip(board.ranks, holes, strict=True)
    )
    return replace(board, ranks=tuple(ranks))


_ENDS = st.lists(st.integers(0, 40), max_size=8, unique=True).map(
    lambda ends: tuple(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


def _bytes_of(mark: int, holes: Holes) -> set[int]:
    return set(range(mark)).difference(*(range(*hole) for hole in holes))


@given(_ENDS, _ENDS, st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_no_byte_is_used_that_one_rank_has_not_registered(
    first: Holes, second: Holes, done: tuple[int, int]
) -> None:
    board = _with_holes(_at(("Initializing", done[0]), ("Initializing", done[1])), first, second)
    holes = common_holes(board)
    used = _bytes_of(common_mark(2, board), holes)
    for rank in board.ranks:
        assert used <= _bytes_of(rank.slot.mark_bytes, rank.slot.holes)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(holes))


def test_holes_are_known_before_what_lies_behind_them_is_used() -> None:
    start = _at(("Initializing", 8), ("Initializing", 8))
    board = Shown(start)
    gate = Gate(2, board, grows=True)
    assert gate.wait(HANG_S)
    assert (gate.usable_bytes, gate.holes) == (8, ())
    board.board = _with_holes(_at(("Initializing", 20), ("Initializing", 8)), ((10, 12),), ())
    board.board = _with_holes(_at(("Ready", 60), ("Initializing", 20)), ((10, 12),), ((11, 16),))
    wait_until(lambda: gate.usable_bytes == 25)
    assert gate.holes == ((10, 16),)
    board.board = _with_holes(_at(("Ready", 60), ("Ready", 57)), ((10, 12),), ((11, 16),))
    wait_until(lambda: gate.usable_bytes == ALL)
    assert gate.holes == ((10, 16),)
    gate.close()


class Shown:
    """A board that shows what a test puts there."""

    def __init__(self, board: BoardView) -> None:
        self.board = board

    def read(self) -> BoardView | None:
        return self.board

    def announce(self, state: str, why: str = "") -> None:
        pass


def test_it_goes_on_growing_until_all_are_ready_whatever_fails_meanwhile() -> None:
    board = Shown(_at(("Initializing", 0), ("Initializing", 9)))
    gate = Gate(2, board, grows=True)
    assert (gate.is_open, gate.usable_bytes) == (False, 0)
    board.board = _at(("Initializing", 5), ("Initializing", 9))
    assert gate.wait(HANG_S)
    assert gate.usable_bytes == 5
    board.board = _at(("Initializing", 8), ("Failed", 9))
    wait_until(lambda: gate.usable_bytes == 8)
    board.board = _at(("Initializing", 3), ("Failed", 9))  # one that ends takes its part back
    board.board = _at(("Ready", 20), ("Failed", 9))
    wait_until(lambda: gate.usable_bytes == 9)
    assert (gate.is_open, gate.state) == (True, "Open")
    wait_until(gate._closed.is_set)  # it comes no further
    gate.close()
    assert gate.is_open


def test_it_has_grown_once_all_ranks_are_ready() -> None:
    board, told = Shown(_at(("Initializing", 5), ("Ready", 20))), []
    gate = Gate(2, board, grows=True, on_grown=lambda: told.append("all"))
    assert gate.wait(HANG_S)
    assert (gate.usable_bytes, told) == (5, [])
    board.board = _at(("Ready", 20), ("Ready", 20))
    wait_until(lambda: gate.usable_bytes == ALL)
    wait_until(lambda: told == ["all"])
    assert Gate(2, board, grows=True, on_grown=lambda: told.append("at once")).wait(HANG_S)
    wait_until(lambda: told == ["all", "at once"])


def test_a_mark_of_one_rank_that_is_taken_for_all_would_be_seen() -> None:
    """A test of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hostprep.cuda.gate.min", max, raising=False)
        assert common_mark(2, _at(("Initializing", 64), ("Initializing", 48))) != 48


def test_without_growing_it_is_all_or_nothing() -> None:
    board = Shown(_at(("Initializing", 5), ("Initializing", 9)))
    gate = Gate(2, board)
    assert not gate.wait(0.2)
    assert gate.usable_bytes == 0
    board.board = _at(("Ready", 20), ("Ready", 20))
    assert gate.wait(HANG_S)
    assert gate.usable_bytes == ALL


def test_a_board_that_cannot_be_read_degrades_it() -> None:
    class Lost:
        def read(self) -> BoardView | None:
            raise OSError(errno.ENOLCK, "No locks available")

        def announce(self, state: str, why: str = "") -> None:
            pass

    gate = Gate(1, Lost())
    assert not gate.wait(HANG_S)
    assert gate.state == "Degraded"
    assert "No locks available" in gate.why


def test_without_a_thread_to_watch_it_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    said: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    gate = Gate(1, deadline_s=600, on_degraded=said.append)
    assert (gate.is_open, gate.state, len(said)) == (False, "Degraded", 1)
    assert "can't start new thread" in gate.why


def test_closing_it_ends_the_watching() -> None:
    gate = Gate(1, deadline_s=600)
    gate.close()
    wait_until(
        lambda: not any(thread.name == "hostprep-gate" for thread in threading.enumerate()),
        timeout_s=HANG_S,
    )
    gate.report(0, "Ready")
    assert not gate.is_open
