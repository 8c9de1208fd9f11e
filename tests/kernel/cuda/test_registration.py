"""Registering a slice: in order, in the background, and as the device says."""

from __future__ import annotations

import contextlib
import time

import pytest

from hostprep.backing import MIB, Backing
from hostprep.cuda.chunks import ChunkPolicy
from hostprep.cuda.driver import Driver, load_driver
from hostprep.errors import FailedError, NotReadyError
from hostprep.register import Registration
from testbed.processes import wait_for
from testbed.standin.children import Scene, in_child
from tests.kernel.cuda.parts import LONG_S, ONE_MIB, Notes, registration_of

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]


@in_child()
def test_all_is_registered_in_order_and_taken_back_in_reverse(scene: Scene) -> None:
    attachment, registration = registration_of(scene)
    with registration:
        registration.run()
        assert registration.state == "Registered"
        expected = [attachment.address + n * MIB for n in range(8)]
        assert scene.registered() == expected
        progress = registration.progress
        assert (progress.done_bytes, progress.size_bytes, progress.chunks) == (8 * MIB, 8 * MIB, 8)
        assert progress.elapsed_s >= progress.longest_chunk_s > 0
    assert scene.unregistered() == expected[::-1]
    assert registration.state == "Closed"
    assert registration.progress.done_bytes == 0
    registration.close()


@in_child()
def test_only_the_slice_is_registered_and_rows_stay_whole(scene: Scene) -> None:
    attachment, registration = registration_of(
        scene,
        offset_bytes=2 * MIB,
        size_bytes=5 * MIB,
        row_bytes=384 << 10,
    )
    registration.run()
    ranges = [(args[0] - attachment.address, args[1]) for _, args, _ in scene.calls("register")]
    assert ranges[0][0] == 2 * MIB
    assert sum(size for _, size in ranges) == 5 * MIB
    assert all((start - 2 * MIB) % (384 << 10) == 0 for start, _ in ranges)
    registration.close()


@in_child()
def test_chunks_grow_while_calls_are_short(scene: Scene) -> None:
    policy = ChunkPolicy(first_bytes=MIB, least_bytes=MIB, most_bytes=8 * MIB, target_s=60)
    _, registration = registration_of(scene, mib=32, policy=policy)
    registration.run().close()
    sizes = [args[1] // MIB for _, args, _ in scene.calls("register")]
    assert sizes == [1, 2, 4, 8, 8, 8, 1]


@in_child(scale=30)
def test_chunks_shrink_while_calls_are_long(scene: Scene) -> None:
    policy = ChunkPolicy(first_bytes=8 * MIB, least_bytes=MIB, most_bytes=8 * MIB, target_s=1e-4)
    _, registration = registration_of(scene, mib=32, policy=policy)
    registration.run().close()
    sizes = [args[1] // MIB for _, args, _ in scene.calls("register")]
    assert sizes[:5] == [8, 4, 2, 1, 1]


@in_child()
def test_start_returns_while_the_driver_is_busy_and_the_engine_goes_on(scene: Scene) -> None:
    notes = Notes()
    _, registration = registration_of(scene, board=notes)
    with scene.busy_driver():
        began_s = time.perf_counter()
        registration.start()
        took_s = time.perf_counter() - began_s
        wait_for(lambda: scene.calls("capture_mode"))
        assert registration.state == "Registering"
        assert not registration.wait(0.2)
        assert notes.told == ["INITIALIZING"]
        assert scene.registered() == []
    assert registration.wait(LONG_S)
    assert (registration.state, notes.told) == ("Registered", ["INITIALIZING", "READY"])
    print(f"start() took {1000 * took_s:.3f} ms")
    registration.close()


@in_child(devices=2)
def test_it_registers_for_the_context_that_was_current_when_it_was_made(scene: Scene) -> None:
    scene.context(device=1)
    registration = Registration(scene.attachment(), policy=ONE_MIB)
    scene.context(device=0)
    assert registration.start().wait(LONG_S)
    registration.close()
    assert [args[3] for _, args, _ in scene.calls("register")] == [1] * 8


@in_child()
def test_the_main_threads_context_and_capture_mode_stay(scene: Scene) -> None:
    context = scene.context()
    driver = load_driver()
    registration = Registration(scene.attachment(), driver=driver, context=context, policy=ONE_MIB)
    driver.set_current(0)
    registration.run()
    with pytest.raises(NotReadyError):
        driver.current_context()
    assert [args for _, args, _ in scene.calls("capture_mode")] == [[2], [0]]
    registration.close()


@in_child(ats=1)
def test_nothing_is_registered_where_the_device_uses_the_hosts_page_tables(scene: Scene) -> None:
    notes = Notes()
    called: list[int] = []
    _, registration = registration_of(scene, board=notes, on_registered=lambda: called.append(1))
    assert registration.start().wait(LONG_S)
    assert registration.state == "Skipped"
    assert "host's page tables" in registration.progress.note
    assert (called, notes.told) == ([1], ["INITIALIZING", "READY"])
    assert scene.calls("register") == []
    registration.close()


@in_child(ats=1)
def test_huge_pages_are_registered_there_all_the_same(scene: Scene) -> None:
    """For CUDA to say that they are pinned, which copies ask."""
    _, registration = registration_of(scene, backing=Backing.HUGETLB_2MI)
    assert registration.run().state == "Registered"
    assert len(scene.registered()) == 8
    registration.close()


@in_child(ats=1, fail="register:3:801")
def test_and_what_the_driver_does_not_take_there_is_no_failure(scene: Scene) -> None:
    notes = Notes()
    _, registration = registration_of(scene, board=notes, backing=Backing.HUGETLB_2MI)
    assert registration.run().state == "Skipped"
    assert notes.told == ["INITIALIZING", "READY"]
    assert "NOT_SUPPORTED" in registration.progress.note
    assert scene.unregistered() == scene.registered()[::-1]
    assert len(scene.registered()) == 2
    registration.close()


@in_child()
def test_chunks_of_huge_pages_are_no_larger_than_others(scene: Scene) -> None:
    """The driver pins base pages: a chunk may end within a page of 1 GiB."""
    _, registration = registration_of(scene, backing=Backing.HUGETLB_2MI, row_bytes=384 << 10)
    registration.run().close()
    sizes = [args[1] for _, args, _ in scene.calls("register")]
    assert set(sizes[:-1]) == {768 << 10}
    assert sum(sizes) == 8 * MIB


@in_child(same_addresses=0)
def test_a_device_with_addresses_of_its_own_gets_no_registrations(scene: Scene) -> None:
    _, registration = registration_of(scene)
    with pytest.raises(FailedError, match="by other addresses") as caught:
        registration.run()
    assert caught.value.reason == "OtherAddresses"
    assert scene.calls("register") == []


@in_child()
def test_a_read_only_attachment_is_registered_as_such(scene: Scene) -> None:
    scene.context()
    attachment = scene.attachment(1, writable=False)
    with Registration(attachment) as registration:
        registration.run()
    assert [args[2] for _, args, _ in scene.calls("register")] == [8]


@in_child(read_only=0)
def test_a_device_that_cannot_is_not_asked_to_register_read_only(scene: Scene) -> None:
    scene.context()
    registration = Registration(scene.attachment(1, writable=False))
    with pytest.raises(FailedError, match="attach without read_only"):
        registration.run()
    assert scene.calls("register") == []


@in_child()
def test_a_graph_captured_meanwhile_stays_valid(scene: Scene) -> None:
    assert _captured_while(scene) == 0


@in_child()
def test_without_the_relaxed_mode_the_graph_would_be_lost(scene: Scene) -> None:
    """A test of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "relaxed_capture", lambda _: contextlib.nullcontext())
        assert _captured_while(scene) == 901


def _captured_while(scene: Scene) -> int:
    """Register while a graph is captured; return the result of the capture."""
    _, registration = registration_of(scene)
    stream = scene.api.cuStreamCreate(0)[1]
    scene.api.cuStreamBeginCapture(
        stream, scene.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    )
    assert registration.start().wait(LONG_S)
    result = int(scene.api.cuStreamEndCapture(stream)[0])
    assert (registration.state == "Registered") == (result == 0)
    registration.close()
    return result
