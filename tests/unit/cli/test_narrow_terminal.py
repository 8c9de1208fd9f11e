"""Output on a terminal of 80 columns, and rates that mean something."""

from __future__ import annotations

import sys

import pytest
from rich.console import Console
from rich.progress import Progress

from hostprep import console
from hostprep.backing import GIB
from hostprep.cli import demo
from hostprep.cli.main import main
from hostprep.cli.progress import _GibPerSecond
from hostprep.engines.main import main as engine_main

pytestmark = pytest.mark.unit
MODEL = "examples/models/deepseek-v4-pro.json"


@pytest.fixture
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_console", lambda: Console(width=80))


@pytest.mark.usefixtures("_narrow")
def test_the_sizing_table_has_every_number_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", MODEL, "--max-batch-size", "64", "--host-memory", "300Gi"]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.startswith("compressed-128")]
    assert row.split() == [
        "compressed-128",
        "none",
        "31",
        "18104",
        "8192",
        "452800",
        "7.8",
        "GiB",
        "2.6",
        "%",
        "55",
    ]
    (head,) = [line for line in out.splitlines() if line.startswith("GROUP")]
    assert len(row.rstrip()) <= 80
    assert len(head.rstrip()) <= 80
    assert head.split()[-1] == "REQUESTS"
    assert max(map(len, out.splitlines())) <= 80


def test_the_engines_table_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, and in a pipe where COLUMNS says how wide."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)  # no terminal, wherever the tests run
    assert engine_main(["engines"]) == 0
    assert "LAST TEST" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    assert engine_main(["engines"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "lmcache-inprocess LMCache" in out
    assert "BACKGROUND" in out


@pytest.mark.usefixtures("_narrow")
def test_a_remedy_can_be_copied_from_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("         -> ") for line in lines)
    assert "         -> nothing to do" not in lines, "a line about nothing"
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines)


def test_in_a_pipe_no_word_of_a_wide_table_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    long = "l" * 150
    console.print_table("", ("CHECK", "FOUND", "REMEDY"), [("root-folder", long, long)])
    (_, row) = capsys.readouterr().out.splitlines()
    assert row.split() == ["root-folder", long, long]


def test_in_a_pipe_the_doctors_columns_share_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["SEVERITY", "CHECK", "FOUND", "REMEDY"]
    assert max(map(len, lines)) <= 200


@pytest.mark.usefixtures("_narrow")
def test_a_holder_is_cut_by_an_ellipsis_and_keeps_its_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    columns = ("POOL", "REGION", "SIZE", "BACKING", "PLACEMENT", "STATE", "HOLDER")
    holder = "1162 python -m vllm.entrypoints.openai.api_server (52.9 s)"
    row = ("kv", "node0-0", "1 GiB", "HugeTLB2Mi", "node:0", "Leased", holder)
    console.print_table("", columns, [row], flexible=("STATE",), elided="HOLDER")
    _, line = (each.rstrip() for each in capsys.readouterr().out.splitlines())
    assert len(line) <= 80
    assert line.endswith("… (52.9 s)")
    assert "1162 python" in line
    assert "HugeTLB2Mi  node:0     Leased" in line


@pytest.mark.usefixtures("_narrow")
def test_the_demos_bars_fit_and_an_attach_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    demo._show({"size_bytes": 4 * GIB, "cold_s": 4.1, "attach_s": 0.0061, "ratio": 672})
    cold, attach = [line for line in capsys.readouterr().out.splitlines() if "█" in line]
    assert len(cold.rstrip()) <= 80
    assert "1.0 GiB/s" in cold
    assert "GiB/s" not in attach
    assert cold.count("█") > attach.count("█")


def test_a_bar_has_no_rate_before_it_means_something() -> None:
    now_s = 100.0
    progress = Progress(get_time=lambda: now_s)
    progress.add_task("populate", total=8 * GIB)
    (task,) = progress.tasks
    column = _GibPerSecond()
    for _ in range(2):  # two pieces within one instant
        now_s += 0.0002
        progress.advance(task.id, 64 << 20)
    assert column.render(task).plain == ""
    now_s += 1.0
    progress.advance(task.id, 2 * GIB - (128 << 20))
    assert column.render(task).plain == "2.0 GiB/s"
    now_s += 2.0
    progress.advance(task.id, 6 * GIB)
    assert column.render(task).plain == "2.7 GiB/s"
