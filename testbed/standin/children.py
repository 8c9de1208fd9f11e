"""Tests that run in a child process, in which the real cuda-python loads the stand-in driver.

`python -m testbed.standin.children FILE NAME` is what such a child runs.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.backing import MIB, Backing
from hostprep.client.attach import Attachment
from hostprep.client.handoff import Handoff, Region
from hostprep.client.lease import Lease
from hostprep.paths import PoolPaths
from testbed.standin import build, environment
from testbed.standin.recorded import record_calls

_REPOSITORY = Path(__file__).parents[2]
_HANG_S = 120.0
_ON_GPU = os.environ.get("HOSTPREP_GPU") == "1"
_LOG = "calls"
_LOCK = "driver.lock"


@functools.cache
def _standin() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hostprep-standin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(folder)


def in_child(
    *, without_driver: bool = False, standin_only: bool = False, **settings: object
) -> Callable[[Callable[[Scene], None]], Callable[[Path], None]]:
    """Make a test of a function that is to run in a child, with these settings of the stand-in.

    It fails where the child fails, and shows what the child printed. With HOSTPREP_GPU=1 it is of
    tier `gpu` and runs on the real driver; those with settings, or the stand-in's only, skip.
    """
    needs_standin = standin_only or without_driver or bool(settings)

    def decorate(scene: Callable[[Scene], None]) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            if _ON_GPU:
                if needs_standin:
                    pytest.skip("orders something of the driver that only the stand-in does")
                child_environment = dict(os.environ)
            else:
                child_environment = environment(
                    tmp_path if without_driver else _standin(),
                    log=tmp_path / _LOG,
                    lock=tmp_path / _LOCK,
                    **({"scale": 0} | settings),
                )
            child_environment["HOSTPREP_SCENE"] = str(tmp_path)
            what = (scene.__code__.co_filename, scene.__name__)
            done = subprocess.run(
                [sys.executable, "-B", "-m", "testbed.standin.children", *what],
                cwd=_REPOSITORY,
                env=child_environment,
                capture_output=True,
                text=True,
                timeout=_HANG_S,
                check=False,
            )
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

        test.__name__ = scene.__name__
        test.__doc__ = scene.__doc__
        test.__module__ = scene.__module__
        vars(test)["scene"] = scene
        return pytest.mark.gpu(test) if _ON_GPU and not needs_standin else test

    return decorate


class Scene:
    """What a test has in its child: memory, a context, and the driver's log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if _ON_GPU:
            record_calls(folder / _LOG, folder / _LOCK)

    @property
    def api(self) -> Any:
        """The driver as an engine has it."""
        return importlib.import_module("cuda.bindings.driver")

    def context(self, device: int = 0) -> int:
        """Do as an engine does: make the device's context current in this thread."""
        assert int(self.api.cuInit(0)[0]) == 0
        code, context = self.api.cuDevicePrimaryCtxRetain(device)
        assert int(code) == 0
        assert int(self.api.cuCtxSetCurrent(context)[0]) == 0
        return int(context)

    def attachment(
        self, mib: int = 8, *, writable: bool = True, backing: Backing = Backing.BASE
    ) -> Attachment:
        """Return a real attachment to resident base pages, without a pool around it.

        With another `backing` its region says that it is of those pages.
        """
        fd, path = tempfile.mkstemp(prefix="hostprep-test-", dir="/dev/shm")
        os.unlink(path)
        os.posix_fallocate(fd, 0, mib * MIB)
        status = os.fstat(fd)
        region = Region(
            name="r0",
            path="mem/r0",
            st_dev=status.st_dev,
            st_ino=status.st_ino,
            size_bytes=mib * MIB,
            backing=backing,
            page_bytes=backing.page_bytes,
            placement="node:0",
            pinned=True,
        )
        handoff = Handoff("kv", "", 1, "", "test", (region,))
        paths = PoolPaths(str(self.folder), "kv")
        lease = Lease(paths, handoff, region, fd, "", is_leader=False)
        return Attachment(lease, writable=writable)

    @contextlib.contextmanager
    def busy_driver(self) -> Iterator[None]:
        """Hold the driver's lock, as another process does that registers."""
        with open(self.folder / _LOCK, "a", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def calls(self, *names: str, pid: int | None = None) -> list[tuple[str, list[int], int]]:
        """Return this process's calls to the driver, in order: name, arguments, result."""
        found = []
        for caller, text in self.lines():
            name, _, rest = text.partition("(")
            if caller != (pid or os.getpid()) or name not in names:
                continue
            arguments, _, result = rest.partition(")=")
            numbers = [int(number, 0) for number in arguments.split(",") if number]
            found.append((name, numbers, int(result)))
        return found

    def lines(self) -> list[tuple[int, str]]:
        """Return what all processes logged: the process, and its words."""
        log = self.folder / _LOG
        split = (line.split(" ", 2) for line in log.read_text("ascii").splitlines())
        return [(int(pid), text) for pid, _, text in split]

    def registered(self) -> list[int]:
        """Return the addresses that were registered, in order."""
        return [args[0] for _, args, result in self.calls("register") if result == 0]

    def unregistered(self) -> list[int]:
        """Return the addresses that were taken back, in order."""
        return [args[0] for _, args, result in self.calls("unregister") if result == 0]


def _main(file: str, name: str) -> None:
    spec = importlib.util.spec_from_file_location("scene", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scene"] = module
    spec.loader.exec_module(module)
    getattr(module, name).scene(Scene(Path(os.environ["HOSTPREP_SCENE"])))


if __name__ == "__main__":
    _main(*sys.argv[1:])
