"""Demos at the same time, ended and killed ones: none disturbs another, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostprep.node.observe.host import read_mounts
from testbed.machine import huge_pages_total
from testbed.processes import wait_for

pytestmark = pytest.mark.kernel

PARENT = Path("/run" if os.geteuid() == 0 else "/dev/shm")


def _left() -> list[str]:
    """Return the roots and mounts of demos."""
    mounts = [entry.path for entry in read_mounts() if entry.path.startswith(f"{PARENT}/hostprep-")]
    return [*map(str, PARENT.glob("hostprep-demo*")), *mounts]


@pytest.fixture(autouse=True)
def nothing_is_left(machine: None) -> Iterator[None]:
    before = huge_pages_total()
    assert not _left()
    yield
    assert not _left()
    assert huge_pages_total() == before


@contextmanager
def _demo(*options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "hostprep", "demo", "--size", "64Mi", "-o", "json", *options]
    # As from a terminal: what a shell starts in the background ignores Ctrl-C.
    with subprocess.Popen(
        ["env", "--default-signal=INT,HUP", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for_its_pool(demo: subprocess.Popen[str]) -> None:
    pattern = f"hostprep-demo-{demo.pid}-*/root/demo/handoff.json"
    wait_for(lambda: list(PARENT.glob(pattern)), 60, why="the demo prepared nothing")


def test_demos_at_once_succeed_each_with_pages_of_its_own() -> None:
    with _demo() as alone:
        backing = json.loads(alone.communicate(timeout=120)[0])["backing"]
    with _demo() as first, _demo() as second, _demo("--gate") as gate:
        for demo in (first, second, gate):
            out, err = demo.communicate(timeout=240)
            assert demo.returncode == 0, err
            document = json.loads(out)
            assert document["size_bytes"] == 64 << 20
            if demo is not gate:
                assert (document["backing"], document["passed_over"]) == (backing, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_gives_back(number: signal.Signals) -> None:
    with _demo("--gate", "--size", "512Mi") as demo:
        _wait_for_its_pool(demo)
        demo.send_signal(number)
        out, err = demo.communicate(timeout=60)
    assert (demo.returncode, out) == (130, ""), err
    assert "hostprep: interrupted" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("options", [(), ("--gate",)])
def test_a_demo_in_a_container_that_does_not_see_the_hosts_processes(options: tuple[str]) -> None:
    command = [sys.executable, "-m", "hostprep", "demo", "--size", "64Mi", "-o", "json", *options]
    own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    done = subprocess.run(
        [*own, *command], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["size_bytes"] == 64 << 20


def test_the_next_demo_gives_back_what_a_killed_one_left_and_no_running_ones() -> None:
    size = ("--size", "512Mi")
    with _demo("--gate", *size) as killed, _demo("--gate", *size) as running:
        _wait_for_its_pool(killed)
        _wait_for_its_pool(running)
        time.sleep(random.random())  # its ranks start, attach or register
        killed.kill()
        killed.wait()
        assert any(f"-{killed.pid}-" in path for path in _left())
        with _demo() as following:
            out, err = following.communicate(timeout=120)
            assert following.returncode == 0, err
        assert not any(f"-{killed.pid}-" in path for path in _left())
        assert running.poll() is None or running.returncode == 0
        out, err = running.communicate(timeout=120)
        assert running.returncode == 0, err
        assert json.loads(out)["runs"]


def test_memory_that_a_process_still_has_is_given_back_when_it_ends() -> None:
    """As the ranks of a demo that was killed have it, for the moment in which they end."""
    with _demo("--gate", "--size", "512Mi") as killed:
        _wait_for_its_pool(killed)
        killed.kill()
        killed.wait()
        (region,) = PARENT.glob(f"hostprep-demo-{killed.pid}-*/root/demo/mem*/*")
        code = "import sys, time; f = open(sys.argv[1]); print(flush=True); time.sleep(3)"
        command = [sys.executable, "-c", code, str(region)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"\n"
            with _demo() as following:
                _, err = following.communicate(timeout=120)
            assert following.returncode == 0, err
            assert not any(f"-{killed.pid}-" in path for path in _left())


def test_a_demo_gives_back_what_one_left_that_was_killed_in_a_system_call() -> None:
    """Before it marked its root, or after it took that out of the way to remove it."""
    made = PARENT / "hostprep-demo-1-made"
    removed = PARENT / "hostprep-demo-1-removed"
    made.joinpath("root").mkdir(parents=True)
    removed.joinpath(".root.removed").mkdir(parents=True)
    removed.joinpath(".root.removed", ".made").touch()
    with _demo() as demo:
        _, err = demo.communicate(timeout=120)
    assert demo.returncode == 0, err
    assert not made.exists()
    assert not removed.exists()


def test_another_users_demo_is_neither_opened_nor_named() -> None:
    theirs = Path(PARENT, "hostprep-demo-1-theirs")
    theirs.mkdir(mode=0o700)
    try:
        os.chown(theirs, 4321, 4321)
        with _demo() as ours:
            _, err = ours.communicate(timeout=120)
        assert ours.returncode == 0, err
        assert "theirs" not in err
        assert theirs.is_dir()
    finally:
        theirs.rmdir()
