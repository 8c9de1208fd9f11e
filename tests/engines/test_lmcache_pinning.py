"""LMCache's server registers regions by chunks and in turns, and no copy of its crosses their ends.

No GPU: the driver is the stand-in, and copies are this CPU's; where they are cut is LMCache's own
native code's doing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.backing import MIB
from hostprep.cuda.turnstile import Turnstile
from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_server import cuda_bindings
from testbed.machine import POOL, base_pool
from testbed.standin import build, build_copies, environment
from tests.engines.crashes import is_left_whole

pytestmark = pytest.mark.engines

_MIB = 900
"""The second chunk would be the largest there is, whose end is no place where LMCache cuts."""
_CUT_BYTES = 64 * MIB
_MOST_BYTES = 480 * MIB
_SCENE = Path(__file__).with_name("lmcache_pinning_scene.py")
_SLOW_S = 300


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    with base_pool(regions=2, mib=_MIB) as root:
        yield root


@pytest.fixture(scope="module")
def seen(root: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run for all; it begins while another process has its turn."""
    python = engine_python("lmcache")
    folder = tmp_path_factory.mktemp("lmcache")
    program = folder / "lmcache"
    program.write_text(
        f"#!{python.path} -P\nimport sys, runpy\n"
        f"runpy.run_path({str(_SCENE)!r}, run_name='__main__')\n"
    )
    program.chmod(0o755)
    command = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", root]
    command += ["--engine", "lmcache", "--region", "node0-0", "--region", "node0-1", "--"]
    standin = build(folder)
    steering = environment(standin, log=folder / "calls", lock=folder / "lock", scale=0)
    (folder / "calls").touch()
    libraries = f"{standin}:{python.variables.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    around = python.environ(
        **{name: text for name, text in steering.items() if name.startswith("STANDIN_")},
        PYTHONPATH=str(cuda_bindings(folder / "packages")),
        LD_LIBRARY_PATH=libraries,
        LD_PRELOAD=str(build_copies(folder)),
        STANDIN_COPIES_LOG=str(folder / "copies"),
    )
    with (folder / "log").open("w") as log, Turnstile(root).turn():
        process = subprocess.Popen(
            [*command, str(program), "server"],
            env=around, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        begins = process.stdout.readline()
        time.sleep(1.0)
        waited = "register(" not in (folder / "calls").read_text()
    told = process.communicate(timeout=_SLOW_S)[0]
    said = (folder / "log").read_text()
    assert process.returncode == -signal.SIGKILL, begins + told[-2000:] + said[-6000:]
    copies = [line.split() for line in (folder / "copies").read_text().splitlines()]
    return {
        **json.loads(told.splitlines()[-1]),
        "stderr": said,
        "waited": waited,
        "copies": [[int(number, 16) for number in copy] for copy in copies],
    }


def _ranges(calls: list[list[str]]) -> list[tuple[int, int]]:
    """Return what was registered: begin and end."""
    assert all((name, result) == ("register", "0") for name, *_, result in calls)
    return [(int(at, 0), int(at, 0) + int(size, 0)) for _, at, size, *_ in calls]


def test_lmcache_finds_the_plugin_by_itself(seen: dict[str, Any]) -> None:
    assert seen["backend"] == "hostprep.engines.lmcache.pinning.RegionPinning"


def test_it_is_registered_by_chunks_that_end_where_copies_are_cut(seen: dict[str, Any]) -> None:
    ranges = _ranges(seen["registered"])
    start, end = seen["start"], seen["start"] + seen["size"]
    assert len(ranges) > 1
    assert [begin for begin, _ in ranges] == [start, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == end
    assert all((begin - start) % _CUT_BYTES == 0 for begin, _ in ranges)
    assert max(end - begin for begin, end in ranges) <= _MOST_BYTES
    assert f"registered with CUDA by {len(ranges)} calls" in seen["stderr"]


def test_no_copy_crosses_the_end_of_a_registration(seen: dict[str, Any]) -> None:
    assert len(seen["same"]) == 2 * (seen["size"] // (20 * MIB)), "staged, and directly"
    assert all(seen["same"])
    ranges = _ranges(seen["registered"])
    ends = {end for _, end in ranges[:-1]}
    whole = [
        (side, side + size)
        for to, source, size in seen["copies"]
        for side in (to, source)
        if seen["start"] <= side < seen["start"] + seen["size"]
    ]
    assert sum(end - begin for begin, end in whole) == 2 * len(seen["same"]) * 20 * MIB
    assert not [(begin, end) for begin, end in whole for at in ends if begin < at < end]
    assert ends & {end for _, end in whole}, "no object lay across one: the test shows nothing"


def test_it_waits_for_its_turn(seen: dict[str, Any]) -> None:
    assert seen["waited"]


def test_a_region_that_is_added_comes_and_goes_the_same_way(seen: dict[str, Any]) -> None:
    added = _ranges(seen["added"])
    assert len(added) > 1
    assert seen["removed"] == "removed"
    back = [(name, int(at, 0)) for name, at, *_ in seen["taken_back"]]
    assert back == [("unregister", begin) for begin, _ in reversed(added)]
    closed = [int(at, 0) for name, at, *_ in seen["closed"] if name == "unregister"]
    assert closed == [begin for begin, _ in reversed(_ranges(seen["registered"]))]


def test_a_failure_leaves_it_pageable_and_is_said(seen: dict[str, Any]) -> None:
    assert seen["pageable"] == "removed"
    assert "could not be registered" in seen["stderr"]
    assert "LMCache copies from there at the speed of pageable memory" in seen["stderr"]
    assert "falling back to pageable host copies" in seen["stderr"], "LMCache's own words"


def test_what_is_no_region_or_cannot_be_ours_is_lmcaches_own(seen: dict[str, Any]) -> None:
    assert seen["not_by_us"] == []
    assert "cuda-python cannot be imported" in seen["stderr"]
    assert seen["stderr"].count("LMCache registers this memory itself, by one call") == 1


def test_killed_it_leaves_the_regions_whole(root: str, seen: dict[str, Any]) -> None:
    is_left_whole(root, dict.fromkeys(("node0-0", "node0-1"), _MIB * MIB))
