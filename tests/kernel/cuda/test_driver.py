"""The adapter to CUDA: the real cuda-python, on the stand-in driver."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest

from hostprep.backing import GIB, MIB
from hostprep.cuda import driver as driver_module
from hostprep.cuda.driver import Driver, DriverError, load_driver
from hostprep.errors import FailedError, HostprepError, NotReadyError
from hostprep.linux.memory import address_of
from testbed.standin.children import Scene, in_child

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]

_MAP_NORESERVE = 0x4000  # asm-generic/mman.h


@in_child(devices=2, version=12080)
def test_it_tells_what_is_there(scene: Scene) -> None:
    driver = load_driver()
    assert driver.version() == 12080
    assert driver.device_count() == 2
    context = scene.context(device=1)
    assert driver.current_context() == context
    traits = driver.attributes(driver.device_of(context))
    assert traits.uuid == "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a001"
    assert traits.name == "Stand-in 1"
    assert traits.ordinal == 1
    assert traits.total_bytes == 141 * GIB
    assert traits.host_register_supported
    assert not traits.uses_host_page_tables
    assert traits.registration_flags(read_only=False) == 0
    assert traits.registration_flags(read_only=True) == 8


@in_child(standin_only=True)
def test_an_instance_of_mig_is_named_as_one(scene: Scene) -> None:
    """The kernel module lists whole GPUs only; CUDA gives the instance's UUID."""
    context = scene.context()
    driver = load_driver()

    def named(*whole: str) -> str:
        information = "".join(f"Model: \t\t NVIDIA H200\nGPU UUID:   \t {gpu}\n" for gpu in whole)
        for name, text in (("0000:01:00.0", information), ("0000:02:00.0", "")):
            folder = scene.folder / "gpus" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "information").write_text(text)
        listed = partial(driver_module._uuids_of_whole_gpus, str(scene.folder / "gpus"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver_module, "_uuids_of_whole_gpus", listed)
            return driver.attributes(driver.device_of(context)).uuid

    own = "a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a000"
    assert named(f"GPU-{own}") == f"GPU-{own}"
    assert named("GPU-c0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a000") == f"MIG-{own}"
    assert named() == f"GPU-{own}"


@in_child(fail="register:1:12345,unregister:1:54321")
def test_a_result_that_this_cuda_python_does_not_know_is_an_error_as_others(scene: Scene) -> None:
    scene.context()
    driver, memory = load_driver(), mmap.mmap(-1, MIB)
    with pytest.raises(DriverError, match="CUDA error 12345") as caught:
        driver.register(address_of(memory), MIB, 0)
    assert caught.value.code == 12345
    driver.register(address_of(memory), MIB, 0)
    with pytest.raises(DriverError, match="CUDA error 54321"):
        driver.unregister(address_of(memory))


@in_child(init=12345)
def test_also_at_the_first_call(scene: Scene) -> None:
    del scene
    with pytest.raises(FailedError, match="CUDA error 12345"):
        load_driver()


@pytest.mark.parametrize("error", [KeyError(12345), ValueError("12345 is not a valid CUresult")])
def test_as_the_releases_of_cuda_python_raise_it(error: Exception) -> None:
    def call() -> None:
        raise error

    assert driver_module._result(call) == (12345,)


def test_other_errors_of_a_call_are_not_taken_for_results() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        driver_module._result(int, "12x")


@in_child(devices=2)
def test_a_thread_gets_its_context_back(scene: Scene) -> None:
    other, own = scene.context(device=0), scene.context(device=1)
    driver = load_driver()
    assert driver.device_of(other) == 0
    assert driver.current_context() == own
    with driver.using(other):
        assert driver.current_context() == other
    assert driver.current_context() == own


@in_child()
def test_without_a_context_it_says_how_to_have_one(scene: Scene) -> None:
    with pytest.raises(NotReadyError, match="hand the context over") as caught:
        load_driver().current_context()
    assert caught.value.reason == "NoContext"


@in_child()
def test_registering_lets_go_of_the_gil(scene: Scene) -> None:
    scene.context()
    driver, memory = load_driver(), mmap.mmap(-1, MIB)
    _goes_on_meanwhile(
        scene, driver, "register", lambda: driver.register(address_of(memory), MIB, 0)
    )


@in_child(standin_only=True)
def test_cuda_python_lets_go_of_it_by_itself(scene: Scene) -> None:
    """As of 12.9.1: the one that is installed here."""
    scene.context()
    driver = load_driver()
    assert driver._long is scene.api
    _both_calls_let_go(scene, driver)


@in_child(standin_only=True)
def test_for_a_cuda_python_that_does_not_ctypes_does(scene: Scene) -> None:
    scene.context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuda.bindings.__version__", "12.9.0")
        patch.setattr("cuda.bindings.driver.cuMemHostRegister", None)
        patch.setattr("cuda.bindings.driver.cuMemHostUnregister", None)
        driver = load_driver()
        assert driver._long is not scene.api
        _both_calls_let_go(scene, driver)


@in_child(standin_only=True)
def test_a_call_that_keeps_it_stops_the_engine(scene: Scene) -> None:
    """The same witness, and calls without letting go: it hangs, until a thread of C ends it."""
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(3, exit=True)
        scene.context()
        driver = load_driver()
        driver._long = _KeepsTheGil()
        _both_calls_let_go(scene, driver)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert [text for caller, text in scene.lines() if caller == pid and "init" in text]


class _KeepsTheGil:
    """The calls by PyDLL, which does not let go (ctypes, PyDLL), as cuda-python up to 12.9.0."""

    def __init__(self) -> None:
        self._library = ctypes.PyDLL("libcuda.so.1")

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> tuple[int]:  # noqa: N802
        arguments = (ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), flags)
        return (self._library.cuMemHostRegister_v2(*arguments),)


def _both_calls_let_go(scene: Scene, driver: Driver) -> None:
    memory = mmap.mmap(-1, MIB)
    address = address_of(memory)
    _goes_on_meanwhile(scene, driver, "register", lambda: driver.register(address, MIB, 0))
    _goes_on_meanwhile(scene, driver, "unregister", lambda: driver.unregister(address))
    assert scene.registered() == scene.unregistered() == [address]


def _goes_on_meanwhile(scene: Scene, driver: Driver, name: str, call: Callable[[], object]) -> None:
    """While the driver is blocked by another process, this process goes on; else it would hang."""
    context = driver.current_context()

    def work() -> None:
        driver.set_current(context)
        call()

    with scene.busy_driver():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert scene.calls(name) == []
    thread.join()
    assert [result for _, _, result in scene.calls(name)] == [0]


@in_child()
def test_errors_carry_the_drivers_name_and_leave_nothing_behind(scene: Scene) -> None:
    scene.context()
    driver = load_driver()
    memory = mmap.mmap(-1, MIB)
    address = address_of(memory)
    driver.register(address, MIB, 0)
    with pytest.raises(DriverError, match="by another part of this process") as caught:
        driver.register(address + 4096, 4096, 0)
    assert (caught.value.code, caught.value.reason) == (712, "AlreadyRegistered")
    assert caught.value.name == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    with pytest.raises(DriverError, match="CUDA error 12345"):
        raise DriverError(12345, driver._error_name(12345), "cuNothing")
    driver.unregister(address)
    with pytest.raises(DriverError) as caught:
        driver.unregister(address)
    assert caught.value.is_gone


@in_child(standin_only=True)
def test_one_call_of_512_gib_fails_as_with_the_real_driver(scene: Scene) -> None:
    scene.context()
    driver = load_driver()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, 512 * GIB, flags, mmap.PROT_READ)
    with pytest.raises(DriverError) as caught:
        driver.register(address_of(memory), 512 * GIB, 8)
    assert (caught.value.code, caught.value.reason) == (2, "OutOfMemory")


@in_child()
def test_the_capture_mode_is_the_threads_own_again(scene: Scene) -> None:
    driver = load_driver()
    with driver.relaxed_capture():
        pass
    assert scene.calls("capture_mode") == [("capture_mode", [2], 0), ("capture_mode", [0], 2)]


def _refusal(kind: type[HostprepError], reason: str) -> HostprepError:
    with pytest.raises(kind) as caught:
        load_driver()
    assert caught.value.reason == reason
    assert caught.value.remedy
    return caught.value


@in_child(without_driver=True)
def test_a_missing_driver_is_named(scene: Scene) -> None:
    _refusal(NotReadyError, "DriverMissing")


@in_child(devices=0)
def test_a_missing_device_is_named(scene: Scene) -> None:
    assert "CUDA_VISIBLE_DEVICES" in str(_refusal(NotReadyError, "NoDevice"))


@in_child(version=11080)
def test_an_old_driver_is_refused(scene: Scene) -> None:
    assert "CUDA 11.8" in str(_refusal(FailedError, "DriverTooOld"))


@in_child(init=803)
def test_a_driver_of_another_version_than_the_kernels_is_named(scene: Scene) -> None:
    _refusal(FailedError, "DriverMismatch")


@in_child(init=999)
def test_any_other_refusal_of_the_driver_is_told_with_its_code(scene: Scene) -> None:
    assert "999" in str(_refusal(FailedError, "DriverFailed"))


def test_without_cuda_python_it_says_what_to_install() -> None:
    with pytest.raises(NotReadyError, match=r"cuda-bindings>=12\.8") as caught:
        load_driver("hostprep_has_no_such_module.driver")
    assert caught.value.reason == "CudaPythonMissing"


@in_child(without_driver=True)
def test_importing_brings_nothing_of_cuda(scene: Scene) -> None:
    import hostprep.register

    assert hostprep.register.__all__ == [
        name for name in hostprep.register.__all__ if callable(getattr(hostprep.register, name))
    ]
    assert not [name for name in sys.modules if name.partition(".")[0] == "cuda"]
