"""Turns behind those who are alive and do not move, or who never let anybody through."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from hostprep.cuda import turnstile_files as tickets
from hostprep.cuda.turnstile import Turnstile
from hostprep.errors import BusyError
from hostprep.linux.files import give_name, open_tmpfile
from hostprep.linux.locks import try_lock
from hostprep.paths import TURNSTILE
from tests.kernel.cuda.turns import HANG_S, wait_for, workers

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


def _stop_one_in_its_turn(root: Path, stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    (holder,) = stack.enter_context(workers(1, root, turns=1, turn_s=600))
    wait_for(root, "begin")
    holder.send_signal(signal.SIGSTOP)
    return holder


def _is_let_in_at_once(turnstile: Turnstile) -> bool:
    """Tell whether there is a turn without a single pause."""
    try:
        with turnstile.turn(timeout_s=0):
            return True
    except BusyError:
        return False


def test_who_is_stopped_in_its_turn_is_waited_for_once_and_told_of_once(root: Path) -> None:
    said: list[str] = []
    ours = Turnstile(str(root), patience_s=0.3, say=said.append)
    with contextlib.ExitStack() as stack:
        holder = _stop_one_in_its_turn(root, stack)
        assert not _is_let_in_at_once(ours)
        with ours.turn():
            pass
        assert all(_is_let_in_at_once(ours) for _ in range(5)), "not a second for each chunk"
        assert len(said) == 1
        assert "nothing moved" in said[0]
        holder.kill()
        holder.wait()
        with ours.turn():
            assert not _is_let_in_at_once(Turnstile(str(root))), "the slot is ours"
    assert len(said) == 1


def test_the_others_take_turns_among_themselves_meanwhile(root: Path) -> None:
    first, second = (Turnstile(str(root), patience_s=0.3, say=lambda _: None) for _ in range(2))
    with contextlib.ExitStack() as stack:
        _stop_one_in_its_turn(root, stack)
        for ours in (first, second):
            with ours.turn():
                pass
        for one, other in ((first, second), (second, first)):
            with one.turn():
                assert not _is_let_in_at_once(other), "two at once, beside the stopped one"
            assert _is_let_in_at_once(other)


def test_a_holder_that_goes_on_is_waited_for_again(root: Path) -> None:
    ours = Turnstile(str(root), patience_s=0.3, say=lambda _: None)
    theirs = Turnstile(str(root))
    with theirs.turn():  # stands still, as far as anybody can tell
        with ours.turn():
            pass
        assert _is_let_in_at_once(ours)
    with theirs.turn():
        assert not _is_let_in_at_once(ours), "this is another turn of theirs"


def test_who_is_stopped_while_it_waits_costs_nobody_the_slot(root: Path) -> None:
    ours = Turnstile(str(root), patience_s=0.3, say=lambda _: None)
    with contextlib.ExitStack() as stack:
        with Turnstile(str(root)).turn():
            (waiter,) = stack.enter_context(workers(1, root, turns=1, turn_s=0))
            wait_for(root, "ask")
            waiter.send_signal(signal.SIGSTOP)
        with ours.turn():
            folder = os.open(root / TURNSTILE / "node", os.O_RDONLY)
            assert tickets.try_slots(folder, 1) is None, "the slot is ours"
            os.close(folder)
        assert _is_let_in_at_once(ours)


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
            fd = open_tmpfile(folder, 0o666)
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
