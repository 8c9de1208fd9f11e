"""The engine and its registration: joining, pausing, cancelling, deadlines, turns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hostprep.backing import MIB
from hostprep.cuda.board import RankBoard
from hostprep.cuda.driver import load_driver
from hostprep.cuda.gate import Gate
from hostprep.cuda.pace import Pace, Spacing
from hostprep.cuda.registration_state import Progress
from hostprep.cuda.turnstile import Turnstile
from hostprep.cuda.turnstile_files import make_turnstiles
from hostprep.errors import BadInputError, FailedError
from hostprep.register import Registration, register
from testbed.processes import wait_for
from testbed.standin.children import Scene, in_child
from tests.kernel.cuda.parts import LONG_S, ONE_MIB, Notes, is_mapped, registration_of

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


@in_child()
def test_ready_is_said_only_after_the_engine_has_joined(scene: Scene) -> None:
    notes = Notes()
    seen: list[object] = []

    def join() -> None:
        seen.append((list(notes.told), registration.state, len(scene.registered())))
        seen.append(load_driver().current_context() == context)

    context = scene.context()
    registration = Registration(scene.attachment(), policy=ONE_MIB, board=notes, on_registered=join)
    assert registration.start().wait(LONG_S)
    assert seen == [(["INITIALIZING"], "Registering", 8), True]
    assert notes.told == ["INITIALIZING", "READY"]
    assert notes.bytes == [n * MIB for n in range(1, 9)]
    registration.close()


@in_child()
def test_an_engine_that_fails_to_join_is_a_failure(scene: Scene) -> None:
    notes = Notes()

    def join() -> None:
        raise KeyError("no such stream")

    _, registration = registration_of(scene, board=notes, on_registered=join)
    assert registration.start().wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "OnRegisteredFailed"
    assert "KeyError: 'no such stream'" in notes.told[1]
    assert scene.unregistered() == scene.registered()[::-1]
    assert len(scene.registered()) == 8


@in_child()
def test_a_board_that_fails_is_a_failure(scene: Scene) -> None:
    notes = Notes(breaks=True)
    _, registration = registration_of(scene, board=notes)
    assert registration.start().wait(LONG_S)
    assert registration.state == "Failed"
    assert len(scene.unregistered()) == 8


@in_child()
def test_progress_is_told_and_a_display_that_fails_costs_nothing(scene: Scene) -> None:
    told: list[Progress] = []

    def show(progress: Progress) -> None:
        told.append(progress)
        if len(told) == 3:
            raise RuntimeError("no terminal")

    _, registration = registration_of(scene, on_progress=show)
    registration.run()
    assert [progress.done_bytes // MIB for progress in told] == [1, 2, 3]
    assert registration.state == "Registered"
    registration.close()


@in_child()
def test_a_callback_cannot_close_its_ownregistration_of(scene: Scene) -> None:
    def close() -> None:
        registration.close()

    _, registration = registration_of(scene, on_registered=close)
    with pytest.raises(FailedError, match="cannot be closed by its own callbacks"):
        registration.run()
    registration.close()


@in_child()
def test_memory_stays_mapped_while_it_is_registered(scene: Scene) -> None:
    attachment, registration = registration_of(scene)
    registration.run()
    address = attachment.address
    attachment.close()
    assert is_mapped(address)
    del registration
    assert is_mapped(address), "forgotten, and unmapped under the driver"


@in_child()
def test_a_rank_that_takes_all_back_is_not_ready_any_more(scene: Scene) -> None:
    path = str(scene.folder / "board")
    boards = [RankBoard.open(path, generation="run", world=2, rank=rank) for rank in range(2)]
    _, registration = registration_of(scene, board=boards[0])
    registration.run()
    assert boards[0].read().ranks[0].slot.state == "Ready"
    registration.close()
    slot = boards[0].read().ranks[0].slot
    assert (slot.state, slot.done_bytes) == ("Initializing", 0)
    gate = Gate(2, boards[1])
    boards[1].ready()
    assert not gate.wait(0.3), "it opens though rank 0 has nothing registered"
    boards[0].close()
    assert not gate.wait(LONG_S)
    assert gate.state == "Degraded"


def _when_busy(scene: Scene, act: Callable[[Registration], object], **options: Any) -> Registration:
    """Act while the first chunk is at the driver; return the registration, let go."""
    _, registration = registration_of(scene, **options)
    with scene.busy_driver():
        registration.start()
        wait_for(lambda: registration.progress.chunks == 1)
        act(registration)
    return registration


@in_child()
def test_cancelling_takes_all_back(scene: Scene) -> None:
    notes = Notes()
    registration = _when_busy(scene, Registration.cancel, board=notes)
    assert registration.wait(LONG_S)
    assert registration.state == "Cancelled"
    assert notes.told[1:] == ["FAILED the registration was cancelled"]
    assert scene.registered() == scene.unregistered()
    assert len(scene.registered()) == 1
    with pytest.raises(BadInputError, match="Cancelled already"):
        registration.run()


@in_child()
def test_cancelling_too_late_changes_nothing(scene: Scene) -> None:
    _, registration = registration_of(scene)
    registration.run().cancel()
    assert registration.state == "Registered"
    assert scene.unregistered() == []
    registration.close()


@in_child()
def test_a_pause_ends_with_resume(scene: Scene) -> None:
    registration = _when_busy(scene, Registration.pause)
    wait_for(lambda: registration.state == "Paused")
    assert len(scene.registered()) == 1
    assert not registration.wait(0.2)
    assert len(scene.registered()) == 1
    registration.resume()
    assert registration.wait(LONG_S)
    assert registration.state == "Registered"
    registration.close()


@in_child()
def test_closing_ends_a_pause(scene: Scene) -> None:
    registration = _when_busy(scene, Registration.pause)
    wait_for(lambda: registration.state == "Paused")
    registration.close()
    assert registration.state == "Closed"
    assert scene.unregistered() == scene.registered()


@in_child()
def test_a_deadline_ends_a_pause_too(scene: Scene) -> None:
    registration = _when_busy(scene, Registration.pause, deadline_s=3.0)
    assert registration.wait(LONG_S)
    assert registration.state == "Failed"
    assert registration.error is not None
    assert registration.error.reason == "DeadlineExceeded"
    assert scene.unregistered() == scene.registered()


@in_child()
def test_each_chunk_is_in_a_turn_of_its_own(scene: Scene) -> None:
    make_turnstiles(str(scene.folder))
    turns: list[int] = []

    class Counted(Turnstile):
        def turn(self, *args: Any, **named: Any) -> Any:
            turns.append(len(scene.registered()))
            return super().turn(*args, **named)

    _, registration = registration_of(scene, turnstile=Counted(str(scene.folder)))
    registration.run()
    assert turns == list(range(8))
    registration.close()
    assert turns == [*range(8), *[8] * 8], "undoing stalls others as registering does"


def _undoes_in_turns(scene: Scene) -> None:
    make_turnstiles(str(scene.folder))
    _, registration = registration_of(scene, turnstile=Turnstile(str(scene.folder)))
    registration.run()
    closing = threading.Thread(target=registration.close)
    with Turnstile(str(scene.folder)).turn():
        closing.start()
        closing.join(0.3)
        assert scene.unregistered() == [], "out of turn"
    closing.join(LONG_S)
    assert scene.unregistered() == scene.registered()[::-1]


@in_child()
def test_what_is_taken_back_waits_for_its_turn(scene: Scene) -> None:
    _undoes_in_turns(scene)


@in_child()
def test_without_turns_for_that_it_would_be_seen(scene: Scene) -> None:
    """A test of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registration, "_turn_to_undo", lambda _: contextlib.nullcontext())
        with pytest.raises(AssertionError, match="out of turn"):
            _undoes_in_turns(scene)


@in_child()
def test_who_gets_no_turn_takes_all_back_without(scene: Scene) -> None:
    """As from a stopped process: not once more for each of thousands of chunks."""
    make_turnstiles(str(scene.folder))
    _, registration = registration_of(scene, turnstile=Turnstile(str(scene.folder)))
    registration.run()
    waits: list[object] = []
    real = Turnstile.turn

    def counted(turnstile: Turnstile, *args: Any, **named: Any) -> Any:
        waits.append(named)
        return real(turnstile, *args, **named)

    with Turnstile(str(scene.folder)).turn(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hostprep.cuda.registration._UNDO_TURN_S", 0.05)
        patch.setattr(Turnstile, "turn", counted)
        registration.close()
    assert len(waits) == 1
    assert scene.unregistered() == scene.registered()[::-1]


def _leaves_gaps(scene: Scene) -> None:
    _, registration = registration_of(scene)
    registration.step()
    ended = threading.Event()

    def serve() -> None:
        while not ended.wait(0.005):
            registration.step()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        assert registration.start().wait(LONG_S)
    finally:
        ended.set()
        serving.join()
    assert registration.state == "Registered"
    # 8 calls that take no time are a place on the grid apart; the first place may come at once.
    assert registration.progress.elapsed_s > 6 * Spacing().period_s, "no gaps"
    registration.close()


@in_child()
def test_an_engine_that_works_has_gaps_between_calls(scene: Scene) -> None:
    _leaves_gaps(scene)


@in_child()
def test_without_the_gaps_that_would_be_seen(scene: Scene) -> None:
    """A test of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "wait", lambda *_: None)
        with pytest.raises(AssertionError, match="no gaps"):
            _leaves_gaps(scene)


@in_child()
def test_a_pause_and_a_cancellation_come_through_a_gap(scene: Scene) -> None:
    _, registration = registration_of(scene, pace=Pace(duty_cycle=0.01))
    registration.step()
    registration.start()
    wait_for(lambda: registration.progress.done_bytes)
    registration.pause()
    wait_for(lambda: registration.state == "Paused")
    registration.cancel()
    assert registration.wait(LONG_S)
    assert registration.state == "Cancelled"


@in_child()
def test_a_deadline_is_for_each_chunk(scene: Scene) -> None:
    class Slow:
        def turn(self, *_: Any, **__: Any) -> Any:
            time.sleep(0.8 if registration.state != "Registered" else 0)
            return contextlib.nullcontext()

    _, registration = registration_of(scene, turnstile=Slow(), deadline_s=5.0)
    registration.run()
    assert registration.progress.elapsed_s > 5.0
    registration.close()


@in_child()
def test_waiting_for_a_turn_can_be_paused_and_cancelled(scene: Scene) -> None:
    make_turnstiles(str(scene.folder))
    turnstile = Turnstile(str(scene.folder))
    _, registration = registration_of(scene, turnstile=Turnstile(str(scene.folder)))
    with turnstile.turn():
        registration.start()
        wait_for(lambda: registration.state == "Waiting")
        registration.pause()
        wait_for(lambda: registration.state == "Paused")
        registration.resume()
        wait_for(lambda: registration.state == "Waiting")
        registration.cancel()
        assert registration.wait(LONG_S)
    assert registration.state == "Cancelled"
    assert scene.calls("register") == []


@in_child()
def test_a_turn_that_does_not_come_ends_with_the_deadline(scene: Scene) -> None:
    make_turnstiles(str(scene.folder))
    turnstile = Turnstile(str(scene.folder))
    _, registration = registration_of(scene, turnstile=Turnstile(str(scene.folder)), deadline_s=0.3)
    with turnstile.turn():
        assert registration.start().wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "DeadlineExceeded"


@in_child()
def test_a_deadline_ends_the_building_of_page_tables_too(scene: Scene) -> None:
    """Of base pages: minutes, where there are many and few threads."""
    _, registration = registration_of(scene, mib=256, deadline_s=0.1)
    late = threading.Event()
    built: list[int] = []

    def populate_slowly(address: int, size_bytes: int, *, write: bool) -> None:
        built.append(size_bytes)
        late.wait(0.2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hostprep.client.attach.populate", populate_slowly)
        assert registration.start().wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "DeadlineExceeded"
    assert len(built) == 1, "it went on to the next piece"
    assert scene.calls("register") == []


@in_child()
def test_many_threads_may_close_and_cancel_at_once(scene: Scene) -> None:
    _, registration = registration_of(scene, mib=32)
    registration.start()
    threads = [threading.Thread(target=registration.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registration.state == "Closed"
    assert sorted(scene.unregistered()) == sorted(scene.registered())


@in_child()
def test_the_call_of_engines_does_both_modes(scene: Scene) -> None:
    scene.context()
    attachment = scene.attachment()
    with register(attachment, size_bytes=4 * MIB, turnstile=None) as background:
        assert background.wait(LONG_S)
        assert background.state == "Registered"
    with register(attachment, mode="sync") as sync:
        assert sync.state == "Registered"
    assert not (scene.folder / "turnstile").exists(), "it would take turns with nobody"
    make_turnstiles(str(scene.folder))
    register(attachment, mode="sync").close()
    assert (scene.folder / "turnstile" / "node" / "slot0").exists()
