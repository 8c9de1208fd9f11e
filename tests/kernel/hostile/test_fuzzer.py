"""The fuzzer over every file below the root, for some seconds: it finds nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.hostile_files.__main__ import show
from benchmarks.hostile_files.fuzzer import ENGINE, ROOT, Canaries, run
from benchmarks.hostile_files.operations import Operation, odd_texts, output_problems
from benchmarks.hostile_files.processes import CRASHED, Outcome, run_child
from testbed.machine import huge_pages_total

pytestmark = pytest.mark.kernel


@pytest.mark.timeout(240)
def test_no_file_below_the_root_stops_another_pool(
    machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    pages = huge_pages_total()

    begin_s = time.monotonic()
    report = run(seed=15, seconds=0, rounds=5)

    show(report, 15, time.monotonic() - begin_s)
    printed = capsys.readouterr().out
    assert not report.findings, printed
    assert report.rounds[ENGINE]
    assert report.rounds[ROOT]
    assert sum(report.moves.values()) > 100
    assert huge_pages_total() == pages


def _outcome(out: str = "", err: str = "", code: int = 0) -> Outcome:
    return Outcome(code, out, err, 0.0, 0, timed_out=False)


def test_it_sees_what_it_looks_for(tmp_path: Path) -> None:
    """What would let everything pass is seen here: each check finds what it is for."""
    shows = Operation("status", lambda: 0)
    as_json = Operation("status JSON", lambda: 0, is_json=True)
    assert list(output_problems(shows, _outcome("plain\n"))) == []
    assert list(output_problems(shows, _outcome("\x1b[2J")))
    assert list(output_problems(shows, _outcome(err="\udcff")))
    assert list(output_problems(as_json, _outcome('{"pools": [{"name": "bystander"}]}'))) == []
    assert list(output_problems(as_json, _outcome('{"pools": []}')))
    assert list(output_problems(as_json, _outcome('{"a": NaN}')))
    assert list(output_problems(as_json, _outcome('{"a": "\\ud800"}')))
    assert list(output_problems(as_json, _outcome("{}{}")))
    assert list(odd_texts({"a": [{"b": "\x07"}]}))

    def fails() -> int:
        raise ValueError("no error of ours")

    crashed = run_child(fails, user=None, limit_s=20)
    assert (crashed.code, "ValueError: no error of ours" in crashed.err) == (CRASHED, True)
    slow = run_child(lambda: os.read(os.pipe()[0], 1)[0], user=None, limit_s=0.2)
    assert slow.timed_out

    canaries = Canaries.make(str(tmp_path / "canaries"))
    assert canaries.changes() == []
    os.chmod(tmp_path / "canaries" / "folder", 0o700)
    assert len(canaries.changes()) == 1
