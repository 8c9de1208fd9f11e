"""Failures of a registration: all is taken back, and the engine serves on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import pytest

from hostprep.backing import MIB, Backing
from hostprep.cuda.chunks import ChunkPolicy
from hostprep.cuda.driver import DriverError
from hostprep.cuda.registration_state import Progress, RegisteredRange
from hostprep.errors import BadInputError
from hostprep.register import Registration
from testbed.processes import wait_for
from testbed.standin.children import Scene, in_child
from tests.kernel.cuda.parts import LONG_S, ONE_MIB, Notes, is_mapped, registration_of

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]

_SEEN = "not taken back in reverse"


def _fails_and_rolls_back(scene: Scene) -> None:
    notes = Notes()
    attachment, registration = registration_of(scene, board=notes)
    registration.start()
    assert registration.wait(LONG_S)
    assert registration.state == "Failed"
    error = registration.error
    assert isinstance(error, DriverError)
    assert error.reason == "OutOfMemory"
    assert f"1 MiB at its byte 3145728 ({attachment.address + 3145728:#x}) could not" in str(error)
    assert "single call" not in str(error)
    assert notes.told[0] == "INITIALIZING"
    assert notes.told[1].startswith("FAILED region r0")
    assert len(notes.told) == 2
    assert scene.registered() == [attachment.address + n * MIB for n in range(3)]
    assert scene.unregistered() == scene.registered()[::-1], _SEEN
    attachment.buffer[:4] = b"used"
    registration.close()


@in_child(fail="register:4:2")
def test_a_failure_takes_all_back_in_reverse_and_leaves_the_memory(scene: Scene) -> None:
    _fails_and_rolls_back(scene)
    with Registration(scene.attachment(), policy=ONE_MIB) as again:
        again.run()


def _growing(scene: Scene, **options: Any) -> tuple[Notes, Registration]:
    notes = Notes()
    _, registration = registration_of(scene, board=notes, grows=True, **options)
    registration.start()
    return notes, registration


@in_child(fail="register:4:2,register:5:999")
def test_a_chunk_that_fails_is_tried_again_where_the_engine_uses_the_rest(scene: Scene) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hostprep.cuda.registration._FIRST_RETRY_S", 0.05)
        notes, registration = _growing(scene)
        wait_for(lambda: "tried again in 0.1 s" in registration.progress.note)
        assert notes.bytes == [MIB, 2 * MIB, 3 * MIB]
        assert registration.wait(LONG_S)
    assert registration.state == "Registered"
    assert notes.told == ["INITIALIZING", "READY"]
    assert len(scene.registered()) == 8
    assert scene.unregistered() == []
    registration.close()
    assert scene.unregistered() == scene.registered()[::-1]


@in_child(fail="register:4:2,register:5:2,register:6:2,register:7:2")
def test_and_given_up_at_the_deadline_while_what_is_registered_stays(scene: Scene) -> None:
    """The engine may be copying to it in this moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hostprep.cuda.registration._FIRST_RETRY_S", 60.0)
        notes, registration = _growing(scene, deadline_s=3.0)
        assert registration.wait(LONG_S)
    assert registration.state == "Failed"
    assert registration.error is not None
    assert registration.error.reason == "OutOfMemory"
    assert notes.told[1].startswith("FAILED region r0")
    assert registration.progress.done_bytes == 3 * MIB
    assert scene.unregistered() == []
    registration.close()
    assert scene.unregistered() == scene.registered()[::-1]


@in_child(fail="register:4:801")
def test_what_will_not_pass_is_not_tried_again_and_keeps_the_rest(scene: Scene) -> None:
    _, registration = _growing(scene)
    assert registration.wait(LONG_S)
    assert registration.state == "Failed"
    assert len(scene.calls("register")) == 4
    assert scene.unregistered() == []
    registration.close()


@in_child(fail="register:4:1")
def test_a_chunk_that_the_driver_refuses_is_passed_over(scene: Scene) -> None:
    """The engine uses what is beyond it, too."""
    notes, registration = _growing(scene, mib=16)
    assert registration.wait(LONG_S)
    assert (registration.state, notes.told[-1]) == ("Registered", "READY")
    assert notes.holes == registration.progress.holes == ((3 * MIB, 4 * MIB),)
    assert (registration.progress.done_bytes, registration.progress.mark_bytes) == (
        15 * MIB,
        16 * MIB,
    )
    assert notes.bytes == [MIB, 2 * MIB, 3 * MIB, *(n * MIB for n in range(3, 16))]
    assert registration.progress.note.endswith("1 MiB in 1 place could not be registered")
    registration.close()
    assert scene.unregistered() == scene.registered()[::-1]
    assert not registration.progress.holes


@in_child(fail=",".join(f"register:{n}:712" for n in (3, 4, 5, 6)))
def test_of_a_large_chunk_only_what_fails_is_passed_over(scene: Scene) -> None:
    """Halves tell where it is; what follows a hole and fails is one with it."""
    policy = ChunkPolicy(first_bytes=8 * MIB, least_bytes=MIB, most_bytes=8 * MIB, target_s=60)
    _, registration = _growing(scene, mib=64, policy=policy)
    assert registration.wait(LONG_S)
    sizes = [args[1] // MIB for _, args, _ in scene.calls("register")]
    assert sizes == [8, 8, 8, 4, 2, 2, 2, 4, 8, 8, 8, 8, 6]
    assert registration.progress.holes == ((16 * MIB, 20 * MIB),)
    registration.close()


_REFUSED = ",".join(f"register:{n}:1" for n in range(2, 40))


@in_child(fail=_REFUSED)
def test_where_much_is_refused_the_tier_stays_as_large_as_it_is(scene: Scene) -> None:
    notes, registration = _growing(scene, mib=32)
    assert registration.wait(LONG_S)
    assert registration.state == "Failed"
    assert len(scene.calls("register")) == 5
    assert notes.told[-1].startswith("FAILED region r0")
    assert registration.progress.mark_bytes == 5 * MIB
    assert scene.unregistered() == []
    registration.close()


@in_child(fail="register:4:1")
def test_what_is_used_as_a_whole_has_no_holes(scene: Scene) -> None:
    _, registration = registration_of(scene)
    with pytest.raises(DriverError):
        registration.run()
    assert scene.unregistered() == scene.registered()[::-1]


@in_child(fail="register:1:801")
def test_with_nothing_registered_it_fails_as_others_do(scene: Scene) -> None:
    notes, registration = _growing(scene)
    assert registration.wait(LONG_S)
    assert (registration.state, len(notes.told)) == ("Failed", 2)
    registration.close()


@in_child(fail="register:3:2,register:4:2")
def test_it_is_tried_again_with_less(scene: Scene) -> None:
    policy = ChunkPolicy(first_bytes=8 * MIB, least_bytes=MIB, most_bytes=8 * MIB, target_s=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hostprep.cuda.registration._FIRST_RETRY_S", 0.05)
        _, registration = _growing(scene, mib=32, policy=policy)
        assert registration.wait(LONG_S)
    sizes = [args[1] // MIB for _, args, _ in scene.calls("register")]
    assert sizes == [8, 8, 8, 4, 2, 4, 8, 2]
    registration.close()


@in_child(ats=1, fail="register:3:801")
def test_with_ats_what_is_in_use_stays_registered(scene: Scene) -> None:
    notes, registration = _growing(scene, backing=Backing.HUGETLB_2MI)
    assert registration.wait(LONG_S)
    assert (registration.state, notes.told[-1]) == ("Skipped", "READY")
    assert scene.unregistered() == []
    registration.close()
    assert scene.unregistered() == scene.registered()[::-1]
    assert len(scene.registered()) == 2


@in_child(fail="register:4:2")
def test_in_the_foreground_nothing_is_in_use_and_all_is_taken_back(scene: Scene) -> None:
    _, registration = registration_of(scene, grows=True)
    with pytest.raises(DriverError):
        registration.run()
    assert scene.unregistered() == scene.registered()[::-1]


@in_child()
def test_an_engines_part_that_comes_afterwards_does_not_go_with_it(scene: Scene) -> None:
    with pytest.raises(BadInputError, match="leave grows out"):
        registration_of(scene, grows=True, on_registered=lambda: None)


@in_child(fail="register:4:801")
def test_others_learn_of_a_failure_before_all_is_taken_back(scene: Scene) -> None:
    notes = Notes()
    _, registration = registration_of(scene, board=notes)
    told: list[int] = []
    real = RegisteredRange.undo

    def undo(registered: RegisteredRange, *arguments: Any) -> Any:
        told.append(len(notes.told))
        return real(registered, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegisteredRange, "undo", undo)
        registration.start()
        assert registration.wait(LONG_S)
    assert told == [2]
    assert len(notes.told) == 2


@in_child(fail="register:any:2")
def test_a_wait_to_try_again_ends_when_it_is_closed(scene: Scene) -> None:
    _, registration = _growing(scene)
    wait_for(lambda: "tried again" in registration.progress.note)
    registration.close()
    assert registration.state == "Closed"


@in_child(fail="register:4:2")
def test_without_the_rollback_that_would_be_seen(scene: Scene) -> None:
    """A test of the tests: nothing is taken back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegisteredRange, "undo", lambda *_: None)
        with pytest.raises(AssertionError, match=_SEEN):
            _fails_and_rolls_back(scene)


@in_child(fail="register:4:2")
def test_without_the_reverse_that_would_be_seen(scene: Scene) -> None:
    """A test of the tests: all is taken back, the first chunk first."""
    undo = RegisteredRange.undo

    def forwards(registered: RegisteredRange, *arguments: Any) -> Any:
        registered._chunks.reverse()
        return undo(registered, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegisteredRange, "undo", forwards)
        with pytest.raises(AssertionError, match=_SEEN):
            _fails_and_rolls_back(scene)


@in_child(fail="register:1:2")
def test_run_raises_what_made_it_fail(scene: Scene) -> None:
    _, registration = registration_of(scene)
    with pytest.raises(DriverError, match="doctor --gpu"):
        registration.run()
    assert registration.state == "Failed"


@in_child(fail="register:base:801")
def test_a_kind_of_memory_that_the_driver_refuses_is_a_failure(scene: Scene) -> None:
    _, registration = registration_of(scene)
    assert registration.start().wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "NotSupported"


@in_child(fail="register:3:700:sticky")
def test_a_broken_context_keeps_mapped_what_cannot_be_taken_back(scene: Scene) -> None:
    attachment, registration = registration_of(scene)
    address = attachment.address
    assert registration.start().wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "ContextBroken"
    assert "2 chunks could not be unregistered" in registration.progress.note
    with pytest.raises(DriverError):
        registration.close()
    attachment.close()
    del registration, attachment
    assert is_mapped(address)


@in_child()
def test_a_context_that_is_destroyed_takes_its_registrations_along(scene: Scene) -> None:
    attachment, registration = registration_of(scene)
    registration.run()
    assert int(scene.api.cuDevicePrimaryCtxReset(0)[0]) == 0
    registration.close()
    address = attachment.address
    attachment.close()
    assert not is_mapped(address)


@in_child()
def test_a_dead_context_is_a_failure(scene: Scene) -> None:
    _, registration = registration_of(scene)
    assert int(scene.api.cuDevicePrimaryCtxReset(0)[0]) == 0
    assert registration.start().wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "ContextGone"


@in_child(without_driver=True)
def test_without_a_driver_an_engine_serves_on(scene: Scene) -> None:
    notes = Notes()
    attachment = scene.attachment()
    registration = Registration(attachment, board=notes)
    assert registration.state == "Idle"
    assert registration.start().wait(LONG_S)
    assert registration.state == "Failed"
    assert registration.error is not None
    assert registration.error.reason == "DriverMissing"
    assert "install the NVIDIA driver" in notes.told[1]
    attachment.buffer[:4] = b"used"
    registration.close()


@in_child(unsupported=1)
def test_a_device_that_cannot_register_is_a_failure(scene: Scene) -> None:
    _, registration = registration_of(scene)
    assert registration.start().wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "RegisterUnsupported"


@in_child()
def test_without_a_thread_an_engine_serves_on(scene: Scene) -> None:
    notes = Notes()
    _, registration = registration_of(scene, board=notes)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        registration.start()
    assert registration.wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "NoThread"
    assert len(notes.told) == 1
    registration.close()


@in_child()
def test_ctrl_c_takes_all_back_and_goes_on_its_way(scene: Scene) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    _, registration = registration_of(scene, on_registered=interrupt)
    with pytest.raises(KeyboardInterrupt):
        registration.run()
    assert registration.state == "Failed"
    assert len(scene.registered()) == 8
    assert scene.unregistered() == scene.registered()[::-1]
    registration.close()


@in_child()
def test_ctrl_c_during_a_call_takes_its_chunk_back_too(scene: Scene) -> None:
    """The signal's handler runs as soon as the call has returned: the chunk is registered."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    _, registration = registration_of(scene)

    def interrupt() -> None:
        with scene.busy_driver():
            at_the_driver.set()
            wait_for(lambda: registration.progress.chunks == 1)
            time.sleep(0.2)  # from there to the driver's lock
            os.kill(os.getpid(), signal.SIGINT)

    at_the_driver = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    at_the_driver.wait(LONG_S)
    with pytest.raises(KeyboardInterrupt):
        registration.run()
    thread.join()
    assert scene.unregistered() == scene.registered()
    registration.close()


@in_child()
def test_ctrl_c_in_a_display_does_not_make_close_wait_for_ever(scene: Scene) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.state == "Registered":
            raise KeyboardInterrupt

    _, registration = registration_of(scene, on_progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        registration.run()
    closing = threading.Thread(target=registration.close, daemon=True)
    closing.start()
    closing.join(LONG_S)
    assert registration.state == "Closed"
    assert scene.unregistered() == scene.registered()[::-1]


@in_child()
def test_what_is_not_an_error_of_ours_is_told_all_the_same(scene: Scene) -> None:
    notes = Notes()

    class Broken:
        def turn(self, **_: object) -> contextlib.AbstractContextManager[None]:
            raise ZeroDivisionError("by mistake")

    _, registration = registration_of(scene, board=notes, turnstile=Broken())
    assert registration.start().wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "RegistrationFailed"
    assert "ZeroDivisionError: by mistake" in notes.told[1]
