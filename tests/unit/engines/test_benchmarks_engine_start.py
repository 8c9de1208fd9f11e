"""The table of engines' starts, without an engine."""

from __future__ import annotations

import sys

import pytest

from benchmarks.engine_start import __main__ as engine_start
from benchmarks.engine_start.engines import ENGINES

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


def test_the_reaches_are_those_that_were_set() -> None:
    assert {engine.name: engine.reach for engine in ENGINES} == {
        "vLLM": 500,
        "SGLang": 50,
        "LMCache": 2,
        "LMCache-vLLM": None,
    }


def test_what_has_no_reach_is_neither_met_nor_missed(capsys: pytest.CaptureFixture[str]) -> None:
    engine_start.show([_ROW | {"reach": None, "ratio": 1.5}])
    said = capsys.readouterr().out
    assert "1.5" in said
    assert "yes" not in said
    assert "NO" not in said


@pytest.mark.parametrize(
    ("words", "told"), [(["tgi"], "no engine of the name tgi"), (["--size", "big"], "big")]
)
def test_bad_options_are_told(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["engine_start", *words])
    with pytest.raises(SystemExit) as ended:
        engine_start.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
