"""The neighbour that asks NVML for the GPU's memory, as nvidia-smi does; with a stand-in for NVML.

`benchmarks.register` times it while others register. Here: what it asks, what it waits for, and
what it says where NVML refuses.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.standin import build_nvml, environment
from tests.support.processes import wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]

REPOSITORY = Path(__file__).parents[3]
HANG_S = 30.0


class Neighbour:
    """A worker of the benchmark, asked by lines of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        self.begin(do, **arguments)
        return self.answer()

    def begin(self, do: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextlib.contextmanager
def neighbour(folder: Path, device: int = 0, **settings: object) -> Iterator[Neighbour]:
    settings = {"devices": 2, "nvml_log": folder / "nvml", **settings}
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.register.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment(folder, log=folder / "calls", lock=folder / "driver.lock", **settings),
    ) as process:
        ours = Neighbour(process)
        assert ours.ask("watch", action="nvml", device=device) == {}
        yield ours
        assert process.stdin is not None
        process.stdin.close()


def calls(folder: Path) -> list[str]:
    return [line.partition(" ")[2] for line in (folder / "nvml").read_text().splitlines()]


def refusal(folder: Path, **settings: Any) -> str:
    with neighbour(folder, **settings) as watcher:
        now_s = time.monotonic()
        return str(watcher.ask("watched", from_s=now_s, to_s=now_s)["error"])


def test_it_asks_the_device_that_it_watches(tmp_path: Path) -> None:
    build_nvml(tmp_path)
    with neighbour(tmp_path, device=1) as watcher:
        begin_s = time.monotonic()
        told = watcher.ask("watched", from_s=begin_s, to_s=begin_s + 0.1)
    assert told["calls"] >= 1
    assert told["worst_s"] >= told["p50_s"] > 0
    said = calls(tmp_path)
    assert said[:3] == ["init()=0", "handle(1)=0", "memory(1)=0"]
    assert set(said[2:]) == {"memory(1)=0"}
    assert len(said) > 3, "it asks again and again"


def test_a_call_that_waits_for_the_driver_counts_with_all_of_its_time(tmp_path: Path) -> None:
    build_nvml(tmp_path)
    with neighbour(tmp_path) as watcher:
        now_s = time.monotonic()
        watcher.ask("watched", from_s=now_s, to_s=now_s)  # it is under way
        with open(tmp_path / "driver.lock", "a", encoding="ascii") as driver:
            fcntl.flock(driver, fcntl.LOCK_EX)  # as a process that registers
            inode = os.fstat(driver.fileno()).st_ino
            wait_until(lambda: somebody_waits_for(inode), timeout_s=HANG_S)
            begin_s = time.monotonic()
            before = len(calls(tmp_path))
            watcher.begin("watched", from_s=begin_s, to_s=begin_s + 0.1)
            time.sleep(0.3)
            assert len(calls(tmp_path)) == before, "none gets past the lock"
            held_s = time.monotonic() - begin_s
        told = watcher.answer()
    assert (told["calls"], told["worst_s"] >= held_s) == (1, True)


def somebody_waits_for(inode: int) -> bool:
    """Tell whether anybody waits for a lock on that file: proc_locks(5), lines with an arrow."""
    lines = Path("/proc/locks").read_text("ascii").splitlines()
    return any("->" in line and f":{inode} " in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nvml": 9}, "nvmlInit: error 9"),
        ({"devices": 0}, "nvmlDeviceGetHandleByIndex: error 2"),
        ({"nvml_lost": 1}, "nvmlDeviceGetMemoryInfo: error 15"),
    ],
)
def test_what_nvml_refuses_is_named(tmp_path: Path, settings: dict[str, int], said: str) -> None:
    build_nvml(tmp_path)
    assert refusal(tmp_path, **settings) == said


def test_without_nvml_it_says_so(tmp_path: Path) -> None:
    if any(Path(folder, "libnvidia-ml.so.1").exists() for folder in ("/usr/lib", "/usr/lib64")):
        pytest.skip("this machine has NVML")
    assert "libnvidia-ml.so.1" in refusal(tmp_path)


def test_a_library_that_lacks_the_calls_is_named(tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=b"int nothing;\n", check=True, timeout=60)
    assert "nvmlInit_v2" in refusal(tmp_path)
    assert os.path.exists(library)
