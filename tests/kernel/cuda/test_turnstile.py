"""Taking turns: in order, one at a time, among real processes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hostprep.backing import GIB, MIB
from hostprep.cuda import turnstile
from hostprep.cuda import turnstile_files as tickets
from hostprep.cuda.turnstile import PATIENCE_S, Turnstile, patience_for
from hostprep.cuda.turnstile_files import remove_turnstiles
from hostprep.errors import BadInputError, BusyError
from hostprep.linux.files import give_name, open_tmpfile
from hostprep.linux.locks import track_fd, try_lock
from tests.kernel.cuda.turns import HANG_S, a_turn, entries, run_all

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


@pytest.mark.parametrize("width", [1, 2])
def test_eight_processes_take_turns_in_order(root: Path, width: int) -> None:
    turns = run_all(8, root, turns=12, turn_s=0.002, width=width)
    print(f"longest wait: {turns.longest_wait()} turns; at once: {turns.most_at_once()}")
    assert turns.count("begin") == turns.count("end") == 8 * 12
    assert turns.count("overlap") == 0
    assert turns.most_at_once() <= width
    assert turns.longest_wait() <= 2 * 8
    assert entries(root) <= {f"slot{index}" for index in range(width)}


def test_without_order_the_same_witness_tells(root: Path) -> None:
    turns = run_all(8, root, turns=40, turn_s=0.002, mutant="no-order")
    print(f"longest wait: {turns.longest_wait()} turns; at once: {turns.most_at_once()}")
    assert turns.longest_wait() > 2 * 8


def _draw_the_first_number(folder: int) -> tickets.QueueTicket:
    """Draw as one does who looked at the queue while it was empty, and was held up since."""
    fd = track_fd(open_tmpfile(folder, 0o666))
    assert try_lock(fd, exclusive=True)
    assert give_name(folder, fd, "000000000000")
    return tickets.QueueTicket(0, "000000000000", fd)


def test_a_ticket_before_that_of_who_is_at_work_lets_nobody_in(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tickets alone would: it is the slots that keep two from being at work at once."""
    with Turnstile(str(root)).turn():
        monkeypatch.setattr(turnstile, "draw", lambda folder, _: _draw_the_first_number(folder))
        with pytest.raises(BusyError):
            a_turn(root, timeout_s=0.2)
        any_file = track_fd(os.open("/dev/null", os.O_RDONLY))
        monkeypatch.setattr(turnstile, "try_slots", lambda *_: any_file)
        a_turn(root, timeout_s=0.2)


@pytest.mark.parametrize("width", [1, 2])
def test_ranks_of_an_engine_have_turns_together_and_engines_one_after_the_other(
    root: Path, width: int
) -> None:
    turns = run_all(9, root, turns=12, turn_s=0.004, width=width, engines=3)
    print(f"longest wait: {turns.longest_wait()} turns; at once: {turns.most_at_once()}")
    assert turns.count("begin") == turns.count("end") == 9 * 12
    assert turns.most_engines_at_once() <= width
    assert turns.most_at_once() > width, "the ranks of an engine waited for each other"
    assert turns.longest_wait() <= 2 * 9
    assert entries(root) <= {f"slot{index}" for index in range(width)}


def test_without_the_engines_bytes_in_the_slot_two_engines_would_be_in_at_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may have a ticket before another engine's that is at work: see `draw`."""
    with Turnstile(str(root), engine="a").turn():
        monkeypatch.setattr(turnstile, "draw", lambda folder, _: _draw_the_first_number(folder))
        a_turn(root, engine="a", timeout_s=HANG_S)
        with pytest.raises(BusyError):
            a_turn(root, engine="b", timeout_s=0.2)
        with pytest.raises(BusyError):
            a_turn(root, timeout_s=0.2)
        monkeypatch.setattr(tickets, "_lock_slot", lambda fd, _: try_lock(fd, exclusive=False))
        a_turn(root, engine="b", timeout_s=0.2)


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
    assert len(said) <= 1  # none where the tickets went an instant before the folder did


def test_who_registers_by_one_long_call_waits_for_as_long_a_one() -> None:
    assert patience_for(0) == patience_for(480 * MIB) == PATIENCE_S
    assert patience_for(500 * GIB) > 500 * GIB / 5.6e9  # measured: LightLLM issue 1527
