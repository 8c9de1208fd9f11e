"""What must not be registered: taken ranges, in forked children, bad slices."""

from __future__ import annotations

import os

import pytest

from hostprep.backing import MIB
from hostprep.cuda.driver import load_driver
from hostprep.cuda.registration_state import RegisteredRange
from hostprep.errors import BadInputError, FailedError
from hostprep.register import Registration, register
from testbed.standin.children import Scene, in_child
from tests.kernel.cuda.parts import LONG_S, ONE_MIB, registration_of

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


def _refuses_overlap(scene: Scene) -> None:
    scene.context()
    attachment = scene.attachment()
    first = Registration(attachment, size_bytes=4 * MIB, policy=ONE_MIB).run()
    beside = Registration(attachment, offset_bytes=4 * MIB, policy=ONE_MIB).run()
    second = Registration(
        attachment, offset_bytes=3 * MIB, size_bytes=MIB + 4096 * 2, policy=ONE_MIB
    )
    with pytest.raises(BadInputError, match=f"{attachment.address + 3 * MIB:#x}") as caught:
        second.start()
    assert caught.value.reason == "Overlap"
    assert second.state == "Idle"
    first.close()
    beside.close()
    second.run().close()


@in_child()
def test_overlapping_slices_are_refused_by_name(scene: Scene) -> None:
    _refuses_overlap(scene)


@in_child()
def test_without_the_refusal_of_overlaps_that_would_be_seen(scene: Scene) -> None:
    """A test of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegisteredRange, "claim", lambda _: None)
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            _refuses_overlap(scene)


@in_child()
def test_what_the_engine_registered_itself_is_named(scene: Scene) -> None:
    attachment, registration = registration_of(scene)
    load_driver().register(attachment.address + 5 * MIB, 4096, 0)
    assert registration.start().wait(LONG_S)
    assert registration.error is not None
    assert registration.error.reason == "AlreadyRegistered"
    assert f"{attachment.address + 5 * MIB:#x}" in str(registration.error)
    assert scene.unregistered() == [attachment.address + n * MIB for n in range(4, -1, -1)]


def _refuses_in_a_child(scene: Scene) -> None:
    attachment, registration = registration_of(scene)
    running = Registration(scene.attachment(1)).run()

    def attempts() -> None:
        for attempt in (registration.start, registration.run, running.close, registration.wait):
            with pytest.raises(FailedError, match="forked") as caught:
                attempt()
            assert caught.value.reason == "ForkedChild"
        with running:
            pass
        with pytest.raises(FailedError) as caught:
            load_driver()
        assert caught.value.reason == "ForkedChild"

    child = os.fork()
    if child == 0:
        try:
            attempts()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child was let in"
    assert scene.calls("register", "unregister", "init", pid=child) == []
    assert registration.state == "Idle"
    registration.run().close()
    running.close()
    assert attachment.buffer


@in_child()
def test_a_forked_child_is_refused(scene: Scene) -> None:
    _refuses_in_a_child(scene)


@in_child()
def test_without_the_refusal_of_children_that_would_be_seen(scene: Scene) -> None:
    """A test of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registration, "_refuse_child", lambda _: None)
        with pytest.raises(AssertionError, match="the child was let in"):
            _refuses_in_a_child(scene)


@in_child()
def test_a_fork_leaves_the_childs_own_ranges_free(scene: Scene) -> None:
    """A child's new mapping may lie where its parent's was: that one is not in its hands."""
    attachment, registration = registration_of(scene)
    registration.run()
    child = os.fork()
    if child == 0:
        try:
            RegisteredRange("child", attachment.buffer, attachment.address, MIB).claim()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(BadInputError):
        RegisteredRange("parent", attachment.buffer, attachment.address, MIB).claim()


@in_child()
def test_bad_input_changes_nothing(scene: Scene) -> None:
    scene.context()
    attachment = scene.attachment()
    for offset, size in ((9 * MIB, None), (0, 0), (100, MIB), (MIB, 8 * MIB)):
        with pytest.raises(BadInputError) as caught:
            Registration(attachment, offset_bytes=offset, size_bytes=size)
        assert (caught.value.reason, bool(caught.value.remedy)) == ("BadSlice", True)
    with pytest.raises(BadInputError, match="background or sync"):
        register(attachment, mode="later")
    registration = Registration(attachment, policy=ONE_MIB).run()
    with pytest.raises(BadInputError, match="Registered already"):
        registration.start()
    registration.close()
    with pytest.raises(BadInputError, match="Closed already"):
        registration.run()
    attachment.close()
    with pytest.raises(BadInputError, match="attach again"):
        Registration(attachment)
