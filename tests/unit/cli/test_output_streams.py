"""Standard output that is closed, full, or that nobody reads: one line, and an exit code."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit
HOSTPREP = f"{shlex.quote(sys.executable)} -m hostprep"


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("command", ["status --root /run/hp-none", "engines", "wait kv"])
def test_a_closed_output_is_refused_before_anything_is_done(command: str) -> None:
    done = _shell(f"{HOSTPREP} {command} >&-")
    assert done.stderr == ("hostprep: standard output is closed; redirect it, as by >/dev/null\n")
    assert done.returncode == 2


def test_without_standard_error_a_message_is_lost_and_no_output_polluted() -> None:
    done = _shell(f"{HOSTPREP} wait kv --wait 0 --root /run/hp-none 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("command", ["--help", "status --root /run/hp-none", "engines"])
def test_a_full_disk_is_one_line(command: str) -> None:
    done = _shell(f"{HOSTPREP} {command} >/dev/full")
    assert done.stderr == "hostprep: cannot write standard output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("command", ["--help", "status --root /run/hp-none", "engines"])
def test_a_pipe_that_nobody_reads_ends_it_as_the_signal_would(command: str) -> None:
    done = _shell(f"{{ sleep 0.1; {HOSTPREP} {command}; echo $? >&2; }} | true")
    assert done.stderr.split() == ["141"]
