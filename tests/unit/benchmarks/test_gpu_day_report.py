"""The page and its charts from the rows of a day; the rows here are made up."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day.journal import Row
from benchmarks.gpu_day.rates import COLD, VLLM_33
from benchmarks.gpu_day.report import ReportError, headlines, lines, main, write_page
from benchmarks.measure import AtLeast
from hostprep.backing import GIB, MIB

pytestmark = pytest.mark.unit

_AT = {"gpu": "NVIDIA H200", "standin": False, "short": False, "at_s": 1_790_000_000}
_PAGE = "# Before\n<!-- figures: begin -->\nthe figures before\n<!-- figures: end -->\nafter\n"


def _durations(worst_s: float) -> dict[str, float]:
    return {"p50_s": worst_s / 100, "p99_s": worst_s / 2, "worst_s": worst_s, "calls": 500}


def _row(part: str, case: str, **figures: Any) -> Row:
    return Row(part, case, "measured", figures, machine=dict(_AT))


def _rows() -> list[Row]:
    rows = [
        _row("facts", "machine", kernel="6.8.0", is_gvisor=False, buddyinfo="long"),
        _row("probes", "straddling copy", across_two="CUDA_ERROR_INVALID_VALUE", took_s=0.25),
        _row("tier", "test_driver", passed=4, failed=0),
        _row("rates", "from birth: HugeTLB2Mi, steered", size_bytes=8 * GIB, took_s=[0.5, 0.4]),
        _row("rates", f"from birth: {COLD}", size_bytes=8 * GIB, took_s=[4.0, 5.0]),
        _row("rates", f"from birth: {VLLM_33}", size_bytes=8 * GIB, took_s=[3.0]),
        _row("kill", "Base, round 1", last_change_s=0.0005, is_written_after_lock=False),
    ]
    for backing in ("Base", "HugeTLB2Mi"):
        for chunk in (16 * MIB, 64 * MIB):
            rows.append(
                _row(
                    "stalls",
                    f"inside: {backing}, {chunk}, gaps of none",
                    backing=backing,
                    chunk=chunk,
                    gap="none",
                    inside={"graph": _durations(0.02), "mmap": {"failed": "errno 12"}},
                )
            )
            rows.append(
                _row(
                    "rates",
                    f"calls: {backing}, {chunk}",
                    backing=backing,
                    chunk=f"{chunk // MIB} MiB",
                    processes=1,
                    gib_s=12.5,
                )
            )
        rows.append(
            _row(
                "decode",
                f"torch: {backing}, hostprep",
                loop="torch",
                backing=backing,
                way="hostprep",
                alone=_durations(0.011),
                meanwhile=_durations(0.02),
                pace=0.934,
            )
        )
    for way, worst_s in (("HugeTLB2Mi, steered", 0.1), (COLD, 2.0)):
        neighbours = {"nvml": _durations(worst_s), "context": _durations(worst_s)}
        rows.append(_row("stalls", f"neighbours: {way}", lasted_s=2.0, neighbours=neighbours))
    left_out = replace(rows[0], part="decode", case="torch: x", outcome="left out", figures={})
    rows.append(replace(left_out, why="torch is not installed"))
    rows.append(replace(left_out, case="torch: y", why="torch is not installed"))
    return rows


def test_the_page_has_tables_charts_and_what_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks-register.md"
    page.write_text(_PAGE)
    write_page(_rows(), tmp_path)
    text = page.read_text()
    assert text.startswith("# Before")
    assert text.endswith("<!-- figures: end -->\nafter\n")
    assert "the figures before" not in text
    assert "REHEARSAL" not in text
    assert "2026-09-21; NVIDIA H200." in text
    assert (
        "| Base, 16777216, gaps of none | 200 µs · 10.0 ms · 20.0 ms | failed: errno 12 |" in text
    )
    assert "across two: CUDA_ERROR_INVALID_VALUE; took: 250.0 ms" in text
    assert "93 %" in text
    assert "- decode: torch: x and 1 more: torch is not installed" in text
    assert "buddyinfo" not in text
    charts = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert charts == [
        f"benchmarks-register{kind}.svg" for kind in ("-decode", "-rates", "-stalls", "")
    ]
    assert all(f"]({name})" in text for name in charts)


def test_a_page_is_written_twice_alike(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks-register.md"
    page.write_text(_PAGE)
    write_page(_rows(), tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_page(_rows(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


@pytest.mark.parametrize(("key", "said"), [("standin", "stand-in driver"), ("short", "short run")])
def test_one_row_that_is_no_result_prevents_the_page(tmp_path: Path, key: str, said: str) -> None:
    page = tmp_path / "benchmarks-register.md"
    page.write_text(_PAGE)
    rows = _rows()
    rows[3] = replace(rows[3], machine=_AT | {key: True})
    with pytest.raises(ReportError, match=said):
        write_page(rows, tmp_path)
    assert page.read_text() == _PAGE
    assert not list(tmp_path.glob("*.svg"))
    assert next(iter(lines(rows))).startswith("**REHEARSAL")


def test_without_figures_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="nothing was measured"):
        write_page([replace(_rows()[0], outcome="failed")], tmp_path)


def test_the_goals_are_judged_where_their_figures_are_there() -> None:
    found = {result.number: result for result in headlines(_rows()) if result.reach}
    assert found["register resident 2 MiB pages, 8 GiB"].ratio.median == pytest.approx(10)
    assert isinstance(found["register resident 2 MiB pages, 8 GiB"].reach, AtLeast)
    assert found["decode pace meanwhile, Base"].met is True
    assert found["worst stall of a neighbour: nvml"].met is True
    assert "worst stall of a neighbour: context" not in found, "it takes as long by itself"
    assert headlines([]) == []


def test_rows_of_two_gpus_say_which(tmp_path: Path) -> None:
    rows = _rows()
    rows[3] = replace(rows[3], machine=_AT | {"gpu": "NVIDIA H100"})
    text = "\n".join(lines(rows))
    assert "NVIDIA H200, NVIDIA H100." in text
    assert "| HugeTLB2Mi, steered | 8 GiB | 500.0 ms, 400.0 ms | NVIDIA H100 |" in text


def test_the_command_refuses_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    unreal = replace(_rows()[3], machine=_AT | {"standin": True})
    path.write_text(json.dumps(asdict(unreal)) + "\n")
    assert main([str(path), "--write-docs"]) == 2
    assert "1 of 1 rows are of the stand-in driver" in capsys.readouterr().err
    assert main([str(path)]) == 0
    assert "**REHEARSAL" in capsys.readouterr().out
