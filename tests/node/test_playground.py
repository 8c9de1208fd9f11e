"""`make cluster NODE=1`, broken off while its virtual machine boots: no trace is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.control_plane import runs
from testbed.node import NodeParts
from testbed.processes import MARK, wait_for
from testbed.runs import carries_mark

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]


@pytest.fixture
def person(parts: NodeParts, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `up --node`; what it says is in the file `said`."""
    command = [sys.executable, "-m", "testbed", "up", "--node"]
    with (
        open(tmp_path / "said", "wb") as said,
        subprocess.Popen(command, stdout=said, stderr=said) as process,
    ):
        yield process
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _processes() -> Iterator[Path]:
    return (Path("/proc") / entry for entry in os.listdir("/proc") if entry.isdecimal())


def _run_of(person: subprocess.Popen[bytes]) -> str:
    """The name of the run whose virtual machine is this person's; empty while there is none."""
    for process in _processes():
        with contextlib.suppress(OSError):
            name, _, rest = (process / "stat").read_text().rpartition(")")
            if "qemu" in name and int(rest.split()[1]) == person.pid:
                variables = (process / "environ").read_bytes().split(b"\0")
                marks = [v for v in variables if v.startswith(f"{MARK}=".encode())]
                return marks[0].decode().partition("=")[2]
    return ""


def _is_running(run: str) -> bool:
    for process in _processes():
        with contextlib.suppress(OSError):
            if carries_mark((process / "environ").read_bytes(), run):
                return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_broken_off_while_booting_it_leaves_no_trace(
    person: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    run = wait_for(lambda: _run_of(person), 300, why="no virtual machine was started")
    folder = next(folder for folder in runs().alive_folders() if folder.name == run)
    person.send_signal(number)
    status = person.wait(timeout=60)
    if number == signal.SIGKILL:
        # The machine goes with its starter; files are for the next start.
        wait_for(lambda: not _is_running(run), 30, why="the virtual machine outlived its starter")
        assert run in runs().sweep()
    else:
        assert status == 0, (tmp_path / "said").read_text()
    assert not _is_running(run)
    assert not folder.exists()
