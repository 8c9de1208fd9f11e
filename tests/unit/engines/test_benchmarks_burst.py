"""Burst to ready without an engine: its options, its load, its table and its picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.burst import __main__ as burst
from benchmarks.burst.scene import BASE_PAGE_NS, HUGE_PAGE_NS

pytestmark = pytest.mark.unit

_STANDIN = Path(__file__).parents[3] / "testbed" / "standin" / "libcuda.c"
_RUN = {
    "made": "2026-01-02 03:04 UTC",
    "machine": "2 CPUs, 8 GiB, Linux 6.18",
    "simulated": {
        "stands_for_bytes": 512 << 30,
        "base_page_ns": 512.0,
        "huge_page_ns": 61680.0,
        "scale": 256.0,
    },
    "size_bytes": 2 << 30,
    "backing": "HugeTLB2Mi,Base",
    "prepare_s": 1.5,
    "lanes": [
        {
            "name": "today",
            "healthy_s": 120.0,
            "first_token_s": 121.0,
            "host_tier_s": 123.0,
            "end_s": 138.0,
            "steps": [
                {"name": "populate", "begin_s": 40.0, "end_s": 42.5},
                {"name": "register", "begin_s": 42.5, "end_s": 111.5},
            ],
            "tokens_s": [121.0, 121.5, 130.0],
            "completed": 1,
            "turned_away": 119,
            "load_average_before": 1.0,
            "load_average_after": 2.0,
        },
        {
            "name": "prepared",
            "healthy_s": 50.0,
            "first_token_s": 51.0,
            "host_tier_s": 69.0,
            "end_s": 84.0,
            "steps": [{"name": "register", "begin_s": 49.0, "end_s": 65.0}],
            "tokens_s": [51.0, 52.0, 60.0, 83.0],
            "completed": 2,
            "turned_away": 50,
            "load_average_before": 1.0,
            "load_average_after": 2.0,
        },
    ],
}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(_RUN), "utf-8")
    return path


def _called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["burst", *words])
    return burst.main()


def test_a_recorded_run_is_shown_and_drawn(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = recorded.with_suffix(".svg")

    assert _called(monkeypatch, "--from", str(recorded), "--picture", str(picture)) == 0

    said = capsys.readouterr().out
    assert "2.4" in said  # 121 s against 51 s
    assert "simulated" in said
    assert "512 ns" in said
    assert "61.7 us" in said
    drawn = picture.read_text("utf-8")
    for words in ("simulated", "first token 121 s", "first token 51 s", "register 16 s", "69 s"):
        assert words in drawn
    for words in ("vLLM's own start", "register with CUDA (simulated)", "host tier in use"):
        assert words in drawn, "a colour has no legend"
    assert _called(monkeypatch, "--from", str(recorded), "--picture", str(picture)) == 0
    assert picture.read_text("utf-8") == drawn


def test_the_times_it_states_are_those_of_the_stand_in() -> None:
    source = _STANDIN.read_text("utf-8")
    assert f"BASE_NS_PER_MIB {BASE_PAGE_NS * 256:.0f}L" in source
    assert f"HUGE_NS_PER_MIB {HUGE_PAGE_NS / 2:.0f}L" in source
