"""The engine and its registration: joining, pausing, cancelling, deadlines, turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hostprep.backing import MIB
from hostprep.cuda.board import RankBoard
from hostprep.cuda.driver import load_driver
from hostprep.cuda.gate import Gate
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
    registration.run().close()
    assert turns == list(range(8))


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
