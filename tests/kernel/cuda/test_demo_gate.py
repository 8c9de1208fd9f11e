"""`hostprep demo --gate`: an engine of four real processes, the driver's calls simulated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hostprep.cli.demo_gate import DELAY_S_PER_GIB
from testbed.standin import build, environment

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("machine")]
"""Others count the machine's huge pages meanwhile."""

HAS_DRIVER = Path("/proc/driver/nvidia/version").exists()


def demo(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hostprep", "demo", "--gate", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def document(machine: None) -> dict[str, Any]:
    done = demo("--size", "32Mi", "-o", "json")
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def moments(run: dict[str, Any], who: str) -> list[dict[str, Any]]:
    return [moment for moment in run["moments"] if moment["who"] == who]


def test_the_tier_is_used_from_the_first_bytes_on_and_grows(document: dict[str, Any]) -> None:
    run = document["runs"][0]
    assert run["state"] == "Open"
    first = run["moments"][0]
    assert (first["at_s"], first["who"]) == (0.0, "engine")
    assert "decodes from GPU memory alone" in first["what"]
    ready = [moment for moment in run["moments"] if moment["what"].startswith("ready")]
    assert {moment["who"] for moment in ready} == {f"rank {number}" for number in range(4)}
    (opened,) = [moment for moment in run["moments"] if "gate open" in moment["what"]]
    assert 0 < run["opened_after_s"] < max(moment["at_s"] for moment in ready)
    assert opened["at_s"] < run["whole_after_s"]
    assert 0 < run["opened_with_bytes"] < document["size_bytes"]
    usable = [sample["usable_bytes"] for sample in run["samples"]]
    assert usable == sorted(usable)
    assert (usable[0], usable[-1]) == (0, document["size_bytes"])
    assert run["served_after"] > 0
    assert len(run["start_blocked_s"]) == 4


def test_the_decode_loops_go_on_beside_it(document: dict[str, Any]) -> None:
    """Far below what it keeps on an idle machine (docs/commands/demo.md)."""
    for run in document["runs"]:
        assert run["pace"] > 0.3
        assert len(run["samples"]) > 2


def test_a_rank_that_is_short_of_memory_comes_back_and_the_tier_goes_on_growing(
    document: dict[str, Any],
) -> None:
    run = document["runs"][1]
    assert run["state"] == "Open"
    trouble, back, ready = moments(run, "rank 2")
    assert "tried again in 1 s" in trouble["what"]
    assert "comes back" in back["what"]
    assert ready["what"].startswith("ready")
    assert run["opened_after_s"] < back["at_s"] < run["whole_after_s"]
    waiting = [s for s in run["samples"] if trouble["at_s"] < s["at_s"] < back["at_s"]]
    assert waiting[-1]["usable_bytes"] < document["size_bytes"]


def test_one_that_fails_for_good_keeps_the_gate_closed_and_the_engine_serving(
    document: dict[str, Any],
) -> None:
    run = document["runs"][2]
    assert run["state"] == "Degraded"
    assert "rank 2" in run["why"]
    assert run["opened_after_s"] is None
    assert any("failed" in moment["what"] for moment in moments(run, "rank 2"))
    assert all("gate open" not in moment["what"] for moment in run["moments"])
    assert any("gate stays closed: rank 2" in m["what"] for m in moments(run, "engine"))
    assert run["served_after"] > 0
    assert run["samples"][-1]["usable_bytes"] == 0


def test_with_a_driver_it_registers_for_real(tmp_path: Path) -> None:
    """The stand-in's: which calls, and that each is taken back."""
    folder = tmp_path / "bin"
    folder.mkdir()
    environ = environment(build(folder), log=tmp_path / "log", lock=tmp_path / "lock", locks=1)
    done = demo("--size", "32Mi", "-o", "json", **environ)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [run["simulated"] for run in runs] == [False] * 3
    assert [run["state"] for run in runs] == ["Open", "Open", "Degraded"]
    calls = (tmp_path / "log").read_text()
    assert calls.count(" register(") == calls.count(" unregister(") >= 11


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has a driver")
def test_what_is_simulated_is_called_so() -> None:
    done = demo("--size", "64Mi")
    assert done.returncode == 0, done.stderr
    assert f"Simulated: the driver's calls, by {DELAY_S_PER_GIB:g} s per GiB" in done.stdout
    assert "Real: memory, processes, pace, turns, rank board and gate." in done.stdout
    assert re.search(r"host tier +[▁▂▃].*█ +64 MiB after", done.stdout)
    assert len(re.findall(r"decode pace .* % of undisturbed", done.stdout)) == 3
    assert len(re.findall(r"start\(\) blocked", done.stdout)) == 3
    assert "All of it was given back." in done.stdout


def test_what_libraries_print_is_not_taken_for_a_ranks_words(tmp_path: Path) -> None:
    """At its start, before it can help it, and later: to the same standard output."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "if 'hostprep.cli.demo_gate' in ' '.join(sys.orig_argv):\n"
        "    print('a library is here', flush=True)\n"
        "    atexit.register(os.write, 1, b'and goes\\n')\n"
    )
    done = demo("--size", "16Mi", "-o", "json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [run["state"] for run in json.loads(done.stdout)["runs"]] == [
        "Open",
        "Open",
        "Degraded",
    ]
    assert done.stderr.count("a library is here") == done.stderr.count("and goes") == 12


def test_nothing_is_left(document: dict[str, Any]) -> None:
    assert document["world"] == 4
    assert not list(Path("/run" if os.geteuid() == 0 else "/dev/shm").glob("hostprep-demo*"))


@pytest.mark.parametrize("size", ["1Mi", "0", "much", "-1Gi"])
def test_a_size_that_cannot_be(size: str) -> None:
    done = demo(f"--size={size}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_more_than_there_is_changes_nothing() -> None:
    done = demo("--size", "1000Ti")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
