"""Taking turns: in order, one at a time, past the dead, among real processes."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostprep
from hostprep.errors import BadInputError, BusyError
from hostprep.kernel.locks import try_lock
from hostprep.kernel.nameless import give_name, new_nameless
from hostprep.paths import TURNSTILE
from hostprep.register import tickets
from hostprep.register.turnstile import Turnstile, make_turnstiles, remove_turnstiles
from tests.support.processes import wait_until

pytestmark = pytest.mark.kernel

CHECKOUT = Path(hostprep.__file__).parents[1]
WORKER = Path(__file__).with_name("taking_turns.py")
HANG_S = 30.0


class Turns:
    """What the workers wrote down."""

    def __init__(self, log: Path) -> None:
        self.events = [
            tuple(line.split(" ", 1)) for line in log.read_text().splitlines() if " " in line
        ]

    def count(self, what: str) -> int:
        return sum(event == what for event, _ in self.events)

    def most_at_once(self) -> int:
        at_work = most = 0
        for event, _ in self.events:
            at_work += {"begin": 1, "end": -1}.get(event, 0)
            most = max(most, at_work)
        return most

    def longest_wait(self) -> int:
        """Return how many turns of others anybody saw begin between asking and his own."""
        waiting: dict[str, int] = {}
        longest = 0
        for event, name in self.events:
            if event == "ask":
                waiting[name] = 0
            elif event == "begin":
                longest = max(longest, waiting.pop(name))
                waiting = {other: seen + 1 for other, seen in waiting.items()}
        return longest


@contextlib.contextmanager
def workers(
    number: int, root: Path, *, turns: int, turn_s: float, width: int = 1, mutant: str = "none",
    before: tuple[str, ...] = (),
) -> Iterator[list[subprocess.Popen[bytes]]]:  # fmt: skip
    started = [
        subprocess.Popen(
            [*before, sys.executable, str(WORKER), str(root), str(root / "log"), str(turns),
             str(turn_s), str(width), mutant],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        )
        for _ in range(number)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_all(number: int, root: Path, **how: object) -> Turns:
    with workers(number, root, **how) as started:  # type: ignore[arg-type]
        for process in started:
            assert process.wait(HANG_S * 2) == 0
    return Turns(root / "log")


@pytest.fixture
def root(memory_folder: Path) -> Path:
    memory_folder.chmod(0o755)
    make_turnstiles(str(memory_folder))
    return memory_folder


def a_turn(root: Path, *, timeout_s: float = HANG_S, **how: object) -> Turnstile:
    """Take one turn, or fail: nothing but a lock that is let go may end the wait."""
    turnstile = Turnstile(str(root), patience_s=1e9, **how)  # type: ignore[arg-type]
    with turnstile.turn(timeout_s):
        pass
    return turnstile


def entries(root: Path) -> set[str]:
    return set(os.listdir(root / TURNSTILE / "node"))


@pytest.mark.parametrize("width", [1, 2])
def test_eight_processes_take_turns_in_order(root: Path, width: int) -> None:
    turns = run_all(8, root, turns=12, turn_s=0.002, width=width)
    print(f"longest wait: {turns.longest_wait()} turns; at once: {turns.most_at_once()}")
    assert turns.count("begin") == turns.count("end") == 8 * 12
    assert turns.count("overlap") == 0
    assert turns.most_at_once() <= width
    assert turns.longest_wait() <= 2 * 8
    assert entries(root) <= {f"slot{index}" for index in range(width)}


@pytest.mark.parametrize(
    ("mutant", "defect"),
    [
        ("no-order", lambda turns: turns.longest_wait() > 2 * 8),
        ("no-slots", lambda turns: turns.count("overlap") > 0 and turns.most_at_once() > 1),
    ],
)
def test_without_order_or_slots_the_same_witnesses_tell(
    root: Path, mutant: str, defect: object
) -> None:
    turns = run_all(8, root, turns=40, turn_s=0.002, mutant=mutant)
    print(f"longest wait: {turns.longest_wait()} turns; at once: {turns.most_at_once()}")
    assert callable(defect)
    assert defect(turns)


def _wait_for(root: Path, what: str, number: int = 1) -> None:
    wait_until(
        lambda: (root / "log").exists() and Turns(root / "log").count(what) >= number,
        timeout_s=HANG_S,
    )


def test_kill_in_a_turn_frees_it(root: Path) -> None:
    with workers(1, root, turns=1, turn_s=600) as (holder,):
        _wait_for(root, "begin")
        with pytest.raises(BusyError) as refused:
            a_turn(root, timeout_s=0.2)
        assert refused.value.reason == "TurnTimeout"
        holder.kill()
        begun_s = time.monotonic()
        a_turn(root)
    print(f"free {time.monotonic() - begun_s:.3f} s after the kill")


def _kill_one_that_waits(root: Path) -> None:
    ours = Turnstile(str(root), patience_s=1e9)
    with ours.turn(), workers(1, root, turns=1, turn_s=0) as (waiter,):
        _wait_for(root, "ask")
        waiter.kill()
        waiter.wait()
        assert len(entries(root)) == 2, "the dead one's ticket is there"


def test_a_dead_ones_ticket_is_passed_over_and_removed(root: Path) -> None:
    _kill_one_that_waits(root)
    begun_s = time.monotonic()
    a_turn(root)
    print(f"past the dead in {time.monotonic() - begun_s:.3f} s")
    assert entries(root) == {"slot0"}


def test_without_passing_over_the_dead_nobody_gets_a_turn(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _kill_one_that_waits(root)
    monkeypatch.setattr(
        "hostprep.register.tickets._lives", lambda folder, name: name in os.listdir(folder)
    )
    with pytest.raises(BusyError, match="no turn"):
        a_turn(root, timeout_s=1)


def test_the_successor_of_a_dead_ones_number_keeps_its_ticket(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two find a ticket dead; before the second acts, the first removed it and another drew it."""
    folder = os.open(root / TURNSTILE / "node", os.O_RDONLY)
    name = "000000000001"
    (root / TURNSTILE / "node" / name).touch()
    drawn: list[tickets.QueueTicket] = []
    real = tickets._open

    def open_and_be_overtaken(folder: int, name: str) -> int:
        fd = real(folder, name)
        if not drawn:
            os.unlink(name, dir_fd=folder)
            monkeypatch.setattr(tickets, "_open", real)
            drawn.append(tickets.draw(folder))
        return fd

    monkeypatch.setattr(tickets, "_open", open_and_be_overtaken)
    tickets.living_ahead(folder, 2, limit=1)
    assert [ticket.name for ticket in drawn] == [name]
    assert tickets.living_ahead(folder, 2, limit=1) == (1,)
    drawn[0].give_up(folder)
    os.close(folder)
    assert entries(root) == set()


def test_killed_at_random_points_they_never_overlap_nor_block(root: Path) -> None:
    chance = random.Random(6)
    for _ in range(6):
        with workers(5, root, turns=100_000, turn_s=0.001) as started:
            _wait_for(root, "begin")
            for process in started[:4]:
                time.sleep(chance.random() * 0.2)
                process.send_signal(signal.SIGKILL)
            before = Turns(root / "log").count("begin")
            _wait_for(root, "begin", before + 20)  # the fifth goes on
    assert Turns(root / "log").count("overlap") == 0
    a_turn(root)
    assert entries(root) == {"slot0"}


def test_a_child_that_was_forked_in_a_turn_does_not_keep_it(root: Path) -> None:
    assert not _child_keeps_turn(root, "none")
    assert _child_keeps_turn(root, "children-keep")


def _child_keeps_turn(root: Path, mutant: str) -> bool:
    """Tell whether the turn outlives its killed holder in a child that was forked meanwhile."""
    code = (
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(WORKER.parent)!r})\n"
        "import taking_turns\n"
        f"taking_turns.mutate({mutant!r})\n"
        "from hostprep.register.turnstile import Turnstile\n"
        f"with Turnstile({str(root)!r}).turn():\n"
        "    child = os.fork()\n"
        "    if child: print(child, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    try:
        a_turn(root, timeout_s=2 if mutant != "none" else HANG_S)
    except BusyError:
        return True
    else:
        return False
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_leaves_the_block_ends_nothing(root: Path) -> None:
    other = root / "other"
    other.touch()
    turn = Turnstile(str(root)).turn()
    turn.__enter__()
    pid = os.fork()
    if pid == 0:
        held = os.open(other, os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
        _ = [os.dup(held) for _ in range(16)]  # one gets the number that the slot had
        turn.__exit__(None, None, None)
        kept = not try_lock(os.open(other, os.O_RDWR), exclusive=True)
        os._exit(0 if kept else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(BusyError):
        a_turn(root, timeout_s=0.1)
    turn.__exit__(None, None, None)
    a_turn(root)


def test_told_to_stop_it_leaves_the_queue(root: Path) -> None:
    stop = threading.Event()
    ours, ran = Turnstile(str(root)), []
    with Turnstile(str(root)).turn():
        threading.Timer(0.1, stop.set).start()
        with pytest.raises(BusyError) as refused, ours.turn(stop=stop):
            ran.append(1)
    assert refused.value.reason == "TurnStopped"
    assert not ran
    assert entries(root) == {"slot0"}


def test_behind_a_stopped_process_it_goes_on_without_and_says_so_once(root: Path) -> None:
    said: list[str] = []
    with workers(1, root, turns=1, turn_s=600) as (holder,):
        _wait_for(root, "begin")
        holder.send_signal(signal.SIGSTOP)
        ours = Turnstile(str(root), patience_s=0.3, say=said.append)
        for _ in range(3):
            with ours.turn():
                pass
    assert len(said) == 1
    assert "nothing moved" in said[0]
    with ours.turn(HANG_S):
        assert entries(root) == {"slot0"}


def test_who_keeps_drawing_tickets_before_ours_does_not_hold_us_up(root: Path) -> None:
    """The queue moves all the time, and never lets us through."""
    folder = os.open(root / TURNSTILE / "node", os.O_RDONLY)
    enough = threading.Event()
    one_is_there = threading.Event()

    def draw_before_others() -> None:
        held: list[tuple[int, str]] = []
        number = 0
        while not enough.is_set():
            number += 1
            fd = new_nameless(folder, 0o666)
            assert try_lock(fd, exclusive=True)
            name = f"{number:012d}"
            assert give_name(folder, fd, name)
            held.append((fd, name))
            one_is_there.set()
            if len(held) > 2:
                old, name = held.pop(0)
                os.unlink(name, dir_fd=folder)
                os.close(old)
            time.sleep(0.01)
        for fd, _ in held:
            os.close(fd)

    # Ours is drawn behind this one, far behind all of theirs.
    far = os.open(f"{1_000_000:012d}", os.O_RDWR | os.O_CREAT, 0o666, dir_fd=folder)
    assert try_lock(far, exclusive=True)
    theirs = threading.Thread(target=draw_before_others)
    theirs.start()
    assert one_is_there.wait(HANG_S)
    said: list[str] = []
    try:
        with Turnstile(str(root), patience_s=0.3, say=said.append).turn(HANG_S):
            pass
    finally:
        enough.set()
        theirs.join()
        os.close(far)
        os.close(folder)
    assert len(said) == 1


def test_an_error_in_the_block_ends_the_turn(root: Path) -> None:
    with pytest.raises(ZeroDivisionError), Turnstile(str(root)).turn():
        raise ZeroDivisionError
    a_turn(root)


@pytest.mark.parametrize("key", ["", "..", "a/b", ".hidden", "x" * 200, "GPU 1", "a\n"])
def test_a_key_that_names_no_folder_is_refused(key: str) -> None:
    with pytest.raises(BadInputError, match="UUID"):
        Turnstile("/nowhere", key)


@pytest.mark.parametrize("width", [0, -1, 65])
def test_a_width_that_cannot_be_is_refused(width: int) -> None:
    with pytest.raises(BadInputError, match="at a time"):
        Turnstile("/nowhere", width=width)


def test_removing_the_folders_while_somebody_waits_lets_him_go_on(root: Path) -> None:
    said: list[str] = []
    ours = Turnstile(str(root), patience_s=1e9, say=said.append)
    with Turnstile(str(root)).turn():
        timer = threading.Timer(0.2, remove_turnstiles, [str(root)])
        timer.start()
        with ours.turn(HANG_S):
            pass
        timer.join()
    assert len(said) == 1
