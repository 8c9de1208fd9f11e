"""Turns of the dead and of forked children: past them, and none of theirs stays."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hostprep.cuda import turnstile_files as tickets
from hostprep.cuda.turnstile import Turnstile
from hostprep.errors import BusyError
from hostprep.linux.locks import try_lock
from hostprep.paths import TURNSTILE
from tests.kernel.cuda.turns import (
    CHECKOUT,
    HANG_S,
    WORKER,
    Turns,
    a_turn,
    entries,
    wait_for,
    workers,
)

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


def test_kill_in_a_turn_frees_it(root: Path) -> None:
    with workers(1, root, turns=1, turn_s=600) as (holder,):
        wait_for(root, "begin")
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
        wait_for(root, "ask")
        waiter.kill()
        waiter.wait()
        assert len(entries(root)) == 3, "the slot, our ticket, and the dead one's"


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
        "hostprep.cuda.turnstile_files._living",
        lambda folder, name: (name in os.listdir(folder), b""),
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
    real = tickets.open_plain

    def open_and_be_overtaken(folder: int, name: str) -> int:
        fd = real(folder, name)
        if not drawn:
            os.unlink(name, dir_fd=folder)
            monkeypatch.setattr(tickets, "open_plain", real)
            drawn.append(tickets.draw(folder))
        return fd

    monkeypatch.setattr(tickets, "open_plain", open_and_be_overtaken)
    tickets.living_ahead(folder, 2, limit=1)
    assert [ticket.name for ticket in drawn] == [name]
    assert [other.number for other in tickets.living_ahead(folder, 2, limit=1)] == [1]
    drawn[0].give_up(folder)
    os.close(folder)
    assert entries(root) == {"slot0"}


def test_killed_at_random_points_they_never_overlap_nor_block(root: Path) -> None:
    chance = random.Random(6)
    for _ in range(6):
        with workers(5, root, turns=100_000, turn_s=0.001) as started:
            wait_for(root, "begin")
            for process in started[:4]:
                time.sleep(chance.random() * 0.2)
                process.send_signal(signal.SIGKILL)
            before = Turns(root / "log").count("begin")
            wait_for(root, "begin", before + 20)  # the fifth goes on
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
        "from hostprep.cuda.turnstile import Turnstile\n"
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
