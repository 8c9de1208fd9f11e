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
