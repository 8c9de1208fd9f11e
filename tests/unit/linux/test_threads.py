"""Work in pieces: all of it, until somebody says stop, and Ctrl-C ends it whenever it comes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.linux.threads import Stopped, Workers, run_pieces, shielded, working

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


def _never() -> threading.Event:
    return threading.Event()


@given(
    crews=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    jobs=st.lists(st.integers(0, 20), max_size=4),
)
def test_every_crew_does_every_job_with_its_own_threads(crews: list[int], jobs: list[int]) -> None:
    made = [Workers(count) for count in crews]
    with working(made):
        for workers in made:
            for size in jobs:
                seen: list[int] = []
                by: set[threading.Thread] = set()

                def work(item: int, seen: list[int] = seen, by: set[Any] = by) -> None:
                    seen.append(item)
                    by.add(threading.current_thread())

                workers.run(work, range(size), _never())
                assert sorted(seen) == list(range(size))
                assert by <= set(workers.threads)
    assert not any(thread.is_alive() for workers in made for thread in workers.threads)


def test_no_thread_of_any_crew_starts_or_ends_while_one_works() -> None:
    """It would wait for the memory that the others are mapping, and they for it."""
    alive: list[set[bool]] = []
    prepared: list[int] = []

    def prepare() -> None:
        time.sleep(0.05)
        prepared.append(0)

    crews = [Workers(3, prepare), Workers(2, prepare)]

    def look(_: int) -> None:
        assert len(prepared) == 5
        alive.append({thread.is_alive() for crew in crews for thread in crew.threads})

    lanes = Workers(2)
    with working([lanes, *crews]):
        lanes.run(
            lambda crew: crew.run(look, range(9 if crew is crews[0] else 1), _never()),
            crews,
            _never(),
        )
    assert alive == [{True}] * 10


def test_a_crew_that_cannot_get_ready_does_nothing_and_says_why() -> None:
    done: list[int] = []

    def prepare() -> None:
        raise OSError("no such processor")

    workers = Workers(3, prepare)
    with working([workers]), pytest.raises(OSError, match="no such processor"):
        workers.run(done.append, range(5), _never())
    assert done == []


def test_the_cause_is_raised_not_that_it_stopped_the_others() -> None:
    cancelled = threading.Event()
    both = threading.Barrier(2)

    def lane(number: int) -> None:
        both.wait()
        if number:
            cancelled.wait()
            raise Stopped
        cancelled.set()
        time.sleep(0.1)  # the other one has raised before
        raise OSError("no pages")

    lanes = Workers(2)
    with working([lanes]), pytest.raises(OSError, match="no pages"):
        lanes.run(lane, range(2), cancelled)


# Stacks of 64 MiB in an address space with room for some: the kernel refuses a thread, as it does
# at pids.max. Prints how many of each crew could start, and how much of the work was done.
_FEW_THREADS = """
import resource, sys, threading
from hostprep.linux.threads import Workers, working
threading.stack_size(64 << 20)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]) * (64 << 20) + (16 << 20),) * 2)
crews, done = [Workers(50), Workers(50)], []
try:
    with working(crews):
        for crew in crews:
            crew.run(done.append, range(1000), threading.Event())
except Exception as error:
    print(getattr(error, "reason", error))
else:
    print(*(len(crew.started) for crew in crews), len(done))
"""


def _with_room_for(threads: int) -> str:
    command = [sys.executable, "-c", _FEW_THREADS, str(threads)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # each thread's own takes room as well
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=60, env=environment
    ).stdout.strip()


def test_where_no_more_threads_start_those_that_did_do_the_work() -> None:
    first, second, done = map(int, _with_room_for(7).split())
    assert 1 <= second <= first <= second + 1 < 10
    assert done == 2000


def test_without_a_thread_for_each_crew_nothing_begins() -> None:
    assert _with_room_for(1) == "NoThread"


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
