"""Work in pieces: all of it, until somebody says stop, and Ctrl-C ends it whenever it comes."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.linux.threads import Stopped, run_pieces, shielded

if TYPE_CHECKING:
    from hostprep.linux.threads import Stop

# By a thread: the other way has the signal that these tests use.
pytestmark = [pytest.mark.unit, pytest.mark.timeout(120, method="thread")]


@given(size=st.integers(0, 500), piece=st.integers(1, 50), threads=st.integers(1, 5))
def test_every_byte_is_in_one_piece(size: int, piece: int, threads: int) -> None:
    seen: list[int] = []
    done: list[int] = []
    run_pieces(
        lambda offset, length: seen.extend(range(offset, offset + length)),
        size_bytes=size,
        piece_bytes=piece,
        threads=threads,
        on_done=done.append,
    )
    assert sorted(seen) == list(range(size))
    assert sum(done) == size


def test_the_first_error_ends_it_and_is_raised() -> None:
    done: list[int] = []

    def work(offset: int, length: int) -> None:
        if offset == 3:
            raise OSError("no pages")
        time.sleep(0.001)
        done.append(offset)

    with pytest.raises(OSError, match="no pages"):
        run_pieces(work, size_bytes=10_000, piece_bytes=1, threads=2)
    assert len(done) < 100


def test_stop_ends_it_after_the_pieces_in_flight() -> None:
    stop = threading.Event()
    done: list[int] = []

    def work(offset: int, length: int) -> None:
        done.append(offset)
        stop.set()

    with pytest.raises(Stopped):
        run_pieces(work, size_bytes=100, piece_bytes=1, threads=2, stop=stop)
    assert 1 <= len(done) <= 2


class CtrlC:
    """Raises KeyboardInterrupt in the main thread, once, a given time from now."""

    def after(self, delay_s: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, delay_s)

    def handle(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def ctrl_c() -> Iterator[CtrlC]:
    """Ctrl-C's signal may be ignored here; another one raises the same."""
    ctrl_c = CtrlC()
    handler = signal.signal(signal.SIGALRM, ctrl_c.handle)
    yield ctrl_c
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("threads", [1, 3])
def test_ctrl_c_waits_for_the_pieces_in_flight(ctrl_c: CtrlC, threads: int) -> None:
    """What they work on is unmapped after it."""
    in_flight: set[int] = set()

    def work(offset: int, length: int) -> None:
        in_flight.add(offset)
        time.sleep(0.5)
        in_flight.discard(offset)

    ctrl_c.after(0.1)
    with pytest.raises(KeyboardInterrupt):
        run_pieces(work, size_bytes=100, piece_bytes=1, threads=threads)
    assert in_flight == set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_neither_hangs_nor_leaves_anybody_at_work(ctrl_c: CtrlC) -> None:
    """In threading's own code it left locks held: a hang within some thousand times."""
    chance = random.Random(1)
    at_work: list[int] = []

    def work(offset: int, length: int) -> None:
        at_work.append(offset)
        time.sleep(0.0003)
        at_work.remove(offset)

    interrupted = 0
    for _ in range(1000):
        try:
            ctrl_c.after(chance.uniform(1e-5, 2e-3))
            run_pieces(work, size_bytes=6, piece_bytes=1, threads=3)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        assert at_work == []
    assert interrupted > 100


def test_what_the_work_raises_comes_out() -> None:
    def fail(stop: Stop) -> None:
        raise ValueError("in there")

    with pytest.raises(ValueError, match="in there"):
        shielded(fail)


def test_undisturbed_work_is_told_of_ctrl_c(ctrl_c: CtrlC) -> None:
    seen: list[bool] = []

    def work(stop: Stop) -> None:
        for _ in range(100):
            if stop.is_set():
                break
            time.sleep(0.01)
        seen.append(stop.is_set())

    ctrl_c.after(0.05)
    with pytest.raises(KeyboardInterrupt):
        shielded(work)
    assert seen == [True]
