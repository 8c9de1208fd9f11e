"""SGLang's own plugin loader and host pools over a prepared region.

No GPU: the pools copy nothing here, and the driver is the stand-in. Whole servers are not started:
their other packages are 2 GB.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.backing import Backing
from hostprep.node.apply.service import Node
from testbed.engines.interpreters import EnginePython, engine_python
from testbed.engines.sglang_times import SCENE, play
from testbed.engines.vllm_server import cuda_bindings
from testbed.machine import POOL, base_pool, clean_node, pool_of
from testbed.standin import build, environment
from tests.engines.crashes import is_left_whole

pytestmark = [pytest.mark.engines, pytest.mark.long]

_MIB = 64
_SLOW_S = 900


@pytest.fixture(scope="module")
def python() -> EnginePython:
    return engine_python("sglang")


@pytest.fixture(scope="module")
def node(machine: None, python: EnginePython) -> Iterator[Node]:
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    with clean_node() as node:
        node.prepare([pool_of(mib=_MIB, backing=Backing.HUGETLB_2MI)])
        yield node


def _environ(folder: Path, python: EnginePython, **changes: str) -> dict[str, str]:
    """Return SGLang's environment with the stand-in driver in it."""
    standin = build(folder)
    steering = environment(standin, log=folder / "calls", lock=folder / "lock", scale=0)
    libraries = f"{standin}:{python.variables.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    packages = [str(cuda_bindings(folder / "packages")), *changes.pop("PYTHONPATH", "").split()]
    return python.environ(
        **{name: text for name, text in steering.items() if name.startswith("STANDIN_")},
        PYTHONPATH=":".join(packages),
        LD_LIBRARY_PATH=libraries,
        **changes,
    )


@pytest.fixture(scope="module")
def seen(
    node: Node, python: EnginePython, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One start for all: SGLang's imports alone take half a minute."""
    folder = tmp_path_factory.mktemp("sglang")
    around = _environ(folder, python)
    done = subprocess.run(
        play(folder, python, node.root), env=around, cwd=folder,
        capture_output=True, text=True, check=False, timeout=_SLOW_S,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stdout[-2000:] + done.stderr[-6000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told | {"stderr": done.stderr}


def test_the_plugin_is_found_in_the_zipapp(node: Node, seen: dict[str, Any]) -> None:
    assert any(re.fullmatch(rf"{node.root}/hostprep-[^/]+\.pyz", path) for path in seen["ours"])
    purelib = sysconfig.get_path("purelib")
    assert all(path != purelib for path in seen["ours"])
    assert "Failed" not in seen["stderr"]


def test_both_pools_lie_in_the_region_one_after_the_other(node: Node, seen: dict[str, Any]) -> None:
    (region,) = Path(node.root, POOL, "mem").iterdir()
    first, second = seen["first"], seen["second"]
    assert first["path"] == second["path"] == str(region)
    assert first["end"] <= second["begin"]
    assert first["end"] - first["begin"] == 20 << 20
    assert seen["bytes"] == "SGLang"
    assert seen["loaded"] == "803f803f"  # ones, as bfloat16


def test_the_preflight_counts_prepared_memory(seen: dict[str, Any]) -> None:
    assert seen["own_budget"] < 0, "SGLang by itself would have refused"
    assert seen["budget"] == (_MIB - 20 - 12) << 20
    assert "BadInputError RegionTooSmall" in seen["too_large"]
    for mib in (64, 32):
        assert f"{mib << 20} bytes" in seen["too_large"]


def test_buffers_are_registered_before_they_are_used_and_taken_back_while_mapped(
    seen: dict[str, Any],
) -> None:
    assert len(seen["registered"]) == 1
    assert seen["ranges"] == [], "nothing for SGLang itself to unregister"
    assert [" unregister(" in line for line in seen["taken_back"]] == [True, True]
    assert seen["mapped_meanwhile"]


def test_what_a_pool_had_is_had_again_after_its_end(seen: dict[str, Any]) -> None:
    assert seen["third"]["begin"] == seen["first"]["begin"]
    assert seen["third"]["path"] == seen["first"]["path"]
    assert seen["empty"] == ""


def test_a_rank_is_told_by_sglangs_own_context(seen: dict[str, Any]) -> None:
    assert seen["place"] == [0, 1, 3, 8]


def test_another_engine_under_the_same_lease_is_refused(seen: dict[str, Any]) -> None:
    assert "RankTaken" in seen["beside"]


def test_killed_it_leaves_the_region_whole(node: Node, seen: dict[str, Any]) -> None:
    name = Path(seen["first"]["path"]).name
    is_left_whole(node.root, {name: _MIB << 20})


def test_large_buffers_are_registered_by_chunks_between_their_rows(
    python: EnginePython, tmp_path: Path
) -> None:
    """In turns as everything is: hostprep's own registering, which has tests of that."""
    around = _environ(tmp_path, python, SCENE_CHUNKS="700")
    with base_pool(regions=1, mib=704) as root:
        done = subprocess.run(
            play(tmp_path, python, root), env=around, cwd=tmp_path,
            capture_output=True, text=True, check=False, timeout=_SLOW_S,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    told = json.loads(done.stdout.splitlines()[-1])
    token_bytes = 7 * 4 * 64 * 2
    layer_bytes = told["layer_first"]["size"] // (2 * 7)
    for layout, row_bytes in (("page_first", 16 * token_bytes), ("layer_first", layer_bytes)):
        seen = told[layout]
        numbers = [re.findall(r"register\((\w+),(\d+)", call)[0] for call in seen["registered"]]
        sizes = [int(size) for _, size in numbers]
        starts = [int(at, 0) - seen["start"] for at, _ in numbers]
        assert starts == [sum(sizes[:index]) for index in range(len(sizes))]
        assert sum(sizes) >= seen["size"]
        assert len(sizes) > 1
        assert max(sizes) <= 480 << 20
        assert not [start for start in starts if start % row_bytes]
        back = [re.findall(r"unregister\((\w+)", call)[0] for call in seen["taken_back"]]
        assert back == [at for at, _ in reversed(numbers)]


def test_ended_while_it_attaches_it_leaves_nothing_behind(
    node: Node, python: EnginePython, seen: dict[str, Any], tmp_path: Path
) -> None:
    """A rank that ended is not replaced under its lease: each of these has one of its own."""
    around = _environ(
        tmp_path, python, PYTHONPATH=f"{node.root}/hostprep.pyz", HOSTPREP_SGLANG="1",
        SCENE_CRASHES=node.root,
    )  # fmt: skip
    done = subprocess.run(
        [python.path, "-P", str(SCENE)], env=around, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=_SLOW_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    rounds = json.loads(done.stdout.splitlines()[-1])
    assert {ended for ended, *_ in rounds} == {-signal.SIGKILL, -signal.SIGTERM}
    assert [left for _, *left in rounds] == [[_MIB << 20, _MIB << 20, False]] * len(rounds)
    is_left_whole(node.root, {Path(seen["first"]["path"]).name: _MIB << 20})
