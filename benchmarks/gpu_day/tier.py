"""The tests of tier `gpu`, a file at a time, with the real driver."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu_day.day import Case, Day, Figures
from benchmarks.register.crew import MeasureError
from benchmarks.register.memory import NotHereError

_REPOSITORY = Path(__file__).parents[2]
_TESTS = _REPOSITORY / "tests" / "kernel" / "cuda"
_SETTINGS = Path(__file__).with_name("pytest.ini")
_MOST_S = 240.0
_NO_TEST = 5
"""pytest's status where it was given none that it may run."""


def cases(day: Day) -> Iterator[Case]:
    """All files that have tests of the tier; they mark themselves when HOSTPREP_GPU is set."""
    for path in sorted(_TESTS.glob("test_*.py")):
        if "in_child" in path.read_text(encoding="utf-8"):
            yield Case(path.stem, 60, partial(_run, day, path))


def _run(day: Day, path: Path) -> Figures:
    """Run one file without this repository's conftest, which needs more than pytest."""
    if day.machine["standin"]:
        raise NotHereError("the driver is the stand-in: tier `kernel` runs these tests with it")
    if importlib.util.find_spec("pytest") is None:
        raise NotHereError("pytest is not installed")
    limit_s = max(1.0, min(_MOST_S, day.left_s))
    options = ["--noconftest", "-c", str(_SETTINGS), f"--rootdir={_REPOSITORY}", "-m", "gpu"]
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", *options, "-ra", str(path)],
            cwd=_REPOSITORY,
            env={**os.environ, "HOSTPREP_GPU": "1"},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MeasureError(f"did not end within {limit_s:.0f} s") from error
    with (day.folder / "tests.txt").open("a", encoding="utf-8") as file:
        file.write(f"{path.name}\n{done.stdout}{done.stderr}\n")
    counts = counts_of(done.stdout)
    if not counts and done.returncode != _NO_TEST:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise MeasureError(lines[-1] if lines else f"pytest ended with {done.returncode}")
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {**counts, "names": [name.rpartition("::")[2] for name in names]}


def counts_of(output: str) -> dict[str, int]:
    """Return how many tests passed, failed and so on, from the last line that says so."""
    for line in reversed(output.splitlines()):
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed)\b", line)
        if found:
            return {word: int(count) for count, word in found}
    return {}
