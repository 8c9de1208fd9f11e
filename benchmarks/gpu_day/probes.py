"""Questions to the driver that have a short answer; each in a process of its own.

A probe may break its context, or its process: that costs its row and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu_day.day import Case, Day, Figures
from benchmarks.gpu_day.probe import PROBES
from benchmarks.register.crew import MeasureError
from benchmarks.register.memory import NotHereError

_REPOSITORY = Path(__file__).parents[2]
_MOST_S = 60.0


def cases(day: Day) -> Iterator[Case]:
    """One of each."""
    for name in PROBES:
        yield Case(name.replace("_", " "), 10, partial(ask, name, limit_s=_MOST_S, day=day))


def ask(name: str, *, limit_s: float, day: Day) -> Figures:
    """Return the answer. Raises NotHereError and MeasureError."""
    limit_s = max(1.0, min(limit_s, day.left_s))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_day.probe", name],
            cwd=_REPOSITORY,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MeasureError(f"no answer within {limit_s:.0f} s") from error
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        answer: Figures = json.loads(last)
    except ValueError as error:
        said = done.stderr.strip().rpartition("\n")[2]
        raise MeasureError(f"the process ended with status {done.returncode}: {said}") from error
    if "not_here" in answer:
        raise NotHereError(answer["not_here"])
    if "error" in answer:
        raise MeasureError(answer["error"])
    return answer
