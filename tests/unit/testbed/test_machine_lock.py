"""Test runs and benchmarks take turns with the machine, and nobody waits in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import machine

pytestmark = pytest.mark.unit

_REPOSITORY = Path(__file__).parents[3]
_HANG_S = 60.0


def test_who_waits_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = str(tmp_path / "lock")
    monkeypatch.setattr(machine, "_LOCK", lock)
    monkeypatch.delenv(machine._HELD, raising=False)
    program = (
        f"from testbed import machine; machine._LOCK = {lock!r}\n"
        "with machine.machine_lock(): print('alone')"
    )
    with machine.machine_lock():
        around = {name: text for name, text in os.environ.items() if name != machine._HELD}
        other = subprocess.Popen(
            [sys.executable, "-c", program], cwd=_REPOSITORY, env=around, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert other.stderr is not None
        assert other.stderr.readline().startswith(f"waiting for {lock}, held by {os.getpid()} ")
        assert other.poll() is None
    out, _ = other.communicate(timeout=_HANG_S)
    assert (out, other.returncode) == ("alone\n", 0)
