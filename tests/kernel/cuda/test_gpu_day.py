"""`python -m benchmarks.gpu_day` end to end with the stand-in driver; no figure is looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu_day.journal import Row, last_rows, read_rows
from benchmarks.gpu_day.parts import PARTS
from testbed.machine import huge_pages_total
from testbed.processes import wait_for
from testbed.standin import build, build_nvml, environment

pytestmark = pytest.mark.kernel

_REPOSITORY = Path(__file__).parents[3]
_LEFT_OUT = ("torch", "nvidia-smi", "stand-in", "pages of 1 GiB", "too little memory", "hugepages-")
"""What this machine may lack."""
_FAILED = ("cuMemHostGetDevicePointer", "status -11")
"""What the stand-in lacks: a function, and the batch copies of CUDA 13, whose call ends a probe."""

_MISSED = '"failed": "no call met that time"'
"""Registering takes no time here, and a thread of a busy machine may sleep through all of it."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("driver")
    build_nvml(build(folder, "copies.c", "batch_copies.c"))
    return environment(folder, log=Path(os.devnull), lock=folder / "lock", scale=0)


def command(folder: Path, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "benchmarks.gpu_day", str(folder), *arguments]
    return [*program, "--short", "--size", "64Mi"]


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_day.report", *arguments],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def begun(path: Path, case: str) -> bool:
    return path.is_file() and any(
        row.case.startswith(case) and row.outcome == "begun" for row in read_rows([path])
    )


@pytest.fixture(scope="module")
def rows(
    driver: dict[str, str], machine: None, tmp_path_factory: pytest.TempPathFactory
) -> list[Row]:
    """The rows of a day that was killed while it had huge pages, and went on."""
    folder = tmp_path_factory.mktemp("day")
    path = folder / "rows.jsonl"
    pages = huge_pages_total()
    with subprocess.Popen(command(folder), cwd=_REPOSITORY, env=driver) as first:
        wait_for(lambda: begun(path, "inside: HugeTLB2Mi, one call"), timeout_s=60)
        first.send_signal(signal.SIGKILL)
    with path.open("ab") as file:
        file.write(b'{"part": "stalls", "case": "torn')
    done = subprocess.run(
        command(folder), cwd=_REPOSITORY, env=driver, timeout=120, check=False
    ).returncode
    assert done == 0
    assert huge_pages_total() == pages
    assert not list(Path("/dev/shm").glob("hostprep-bench-pages-*"))
    return read_rows([path])


def test_a_day_that_was_killed_goes_on_and_loses_and_doubles_nothing(rows: list[Row]) -> None:
    ended = Counter((row.part, row.case) for row in rows if row.has_ended)
    assert set(ended.values()) == {1}
    twice = [
        case
        for case, times in Counter(
            (row.part, row.case) for row in rows if row.outcome == "begun"
        ).items()
        if times > 1
    ]
    assert len(twice) <= 1, "only the case that was killed began again"
    assert {part for part, _ in ended} == {part.name for part in PARTS}


def test_every_case_is_measured_or_says_why_not(rows: list[Row]) -> None:
    for row in last_rows(rows):
        if row.outcome == "left out":
            assert any(word in row.why for word in _LEFT_OUT), row
        elif row.outcome == "failed":
            assert any(word in row.why for word in _FAILED), row
        else:
            assert row.figures, row
        inside = json.dumps(row.figures).replace(_MISSED, "")
        assert "failed" not in inside, row


def test_rows_of_the_standin_are_labelled_and_make_no_page(rows: list[Row], tmp_path: Path) -> None:
    assert all(row.is_standin for row in rows)
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({name: getattr(row, name) for name in Row.__slots__}) + "\n" for row in rows
        )
    )
    page = _REPOSITORY / "docs" / "benchmarks-register.md"
    before = page.read_text()
    refused = report(str(path), "--write-docs")
    assert refused.returncode == 2
    assert "stand-in" in refused.stderr
    assert page.read_text() == before
    shown = report(str(path))
    assert shown.returncode == 0
    assert shown.stdout.startswith("**REHEARSAL")


def test_without_time_all_is_left_for_a_later_call(driver: dict[str, str], tmp_path: Path) -> None:
    program = [sys.executable, "-m", "benchmarks.gpu_day", str(tmp_path), "probes", "--limit-s=0"]
    done = subprocess.run(
        program,
        cwd=_REPOSITORY,
        env=driver,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "left for a later call: 14" in done.stderr
    assert read_rows([tmp_path / "rows.jsonl"]) == []
