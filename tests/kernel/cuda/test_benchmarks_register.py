"""`python -m benchmarks.register` works, with the stand-in; no figure of it is looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.register.agenda import AGENDA
from benchmarks.register.pages import print_run, write_docs
from benchmarks.register.results import headlines
from testbed.standin import build, build_nvml, environment

REPOSITORY = Path(__file__).parents[3]
NAMES = [item.name for item in AGENDA]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.register", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("driver")
    build_nvml(build(folder, "copies.c"))
    environ = environment(folder, log=folder / "log", lock=folder / "lock", scale=0, devices=2)
    done = run("--short", "--size", "64Mi", "-o", "json", **environ)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.mark.kernel
def test_every_measurement_is_made(document: dict[str, Any]) -> None:
    assert {row["measurement"] for row in document["rows"]} == set(NAMES)
    # Pages of 1 GiB do not fit, and others may use the rest.
    expected = ("HugeTLB1Gi", "hugepages-")
    for left_out in document["left_out"]:
        assert any(word in str(left_out) for word in expected), left_out
    assert document["machine"]["gpus"] == 2


@pytest.mark.kernel
def test_every_way_has_its_row(document: dict[str, Any]) -> None:
    ways = {(row["measurement"], row.get("way")) for row in document["rows"]}
    assert ("handles", "second process imports and maps") in ways
    assert ("two ranks", "each its slice, in turns") in ways
    assert ("today", "cudaHostAlloc") in ways
    assert ("stalls", "one call over cold 4 KiB memory") in ways
    graphs = {row["way"]: row["graph"] for row in document["rows"] if row["measurement"] == "graph"}
    assert graphs["relaxed capture mode (ours)"] == "valid, and ran"
    assert graphs["no exchange (control)"] != "valid, and ran"
    assert {row["processes"] for row in document["rows"] if "processes" in row} == {1, 2, 3, 4}


@pytest.mark.kernel
def test_the_run_becomes_tables_and_charts(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_run(document)
    shown = capsys.readouterr().out
    assert "one call over cold 4 KiB memory" in shown
    assert any(result.reach is not None for result in headlines(document))
    page = tmp_path / "benchmarks-register.md"
    page.write_text(
        "# Before\n<!-- figures: begin -->\nthe figures before\n<!-- figures: end -->\nafter\n"
    )
    write_docs(document, tmp_path)
    text = page.read_text()
    assert text.startswith("# Before")
    assert text.endswith("after\n")
    assert "the figures before" not in text
    assert "Stand-in" in text
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == [
        "benchmarks-register-rates.svg",
        "benchmarks-register.svg",
    ]


@pytest.mark.kernel
def test_a_saved_run_is_shown_without_a_gpu(document: dict[str, Any], tmp_path: Path) -> None:
    saved = tmp_path / "register.json"
    saved.write_text(json.dumps(document))
    done = run("--from", str(saved))
    assert done.returncode == 0
    assert "one call over cold 4 KiB memory" in done.stdout


@pytest.mark.kernel
def test_the_plan_names_everything_and_ends_in_ten_minutes() -> None:
    done = run("--plan", "--size", "1Gi")
    assert done.returncode == 0
    assert all(f"  {name}" in done.stdout for name in NAMES)
    assert sum(item.allowed_s for item in AGENDA) <= 540


@pytest.mark.kernel
def test_without_a_driver_it_explains_itself(tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver")
    done = run("--size", "64Mi", LD_LIBRARY_PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing can be measured here" in done.stderr
    assert "python -m benchmarks.register -o json" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.kernel
@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("--size", "3x"),
        ("--size", "1Mi"),
        ("--from", "/nonexistent/register.json"),
        ("--from", "/proc/self/cmdline"),
    ],
)
def test_bad_input_ends_with_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr
