"""The table of engines' starts, without an engine."""

from __future__ import annotations

import pytest

from benchmarks.engine_start import __main__ as engine_start

pytestmark = pytest.mark.unit

_ROW = {
    "engine": "vLLM",
    "timed": "its constructor",
    "size_bytes": 8 << 30,
    "cold_s": (5.0, 4.0),
    "prepared_s": (0.009, 0.008),
    "ratio": 500.0,
    "reach": 500,
    "load_average": [1.0, 2.0],
}


def test_the_second_runs_stand_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    engine_start.show([_ROW, _ROW | {"ratio": 499.0}])
    said = capsys.readouterr().out
    for words in ("4.00 s", "8 ms", "8 GiB", ">= 500", "yes", "NO"):
        assert words in said
