"""SGLang's own plugin loader and host pools over a prepared region.

No GPU: the pools copy nothing here, and the driver is the stand-in. Whole servers are not started:
their other packages are 2 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hostprep
from hostprep.apply.service import Node
from hostprep.backing import Backing
from tests.engines.sglang_times import play
from tests.engines.vllm_server import cuda_bindings
from tests.standin import build, environment
from tests.support.engine_environments import EnginePython, engine_python
from tests.support.machine import clean_node
from tests.support.pools import POOL, pool_of

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


@pytest.fixture(scope="module")
def seen(
    node: Node, python: EnginePython, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One start for all: SGLang's imports alone take half a minute."""
    folder = tmp_path_factory.mktemp("sglang")
    standin = build(folder)
    steering = environment(standin, log=folder / "calls", lock=folder / "lock", scale=0)
    libraries = f"{standin}:{python.variables.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    around = python.environ(
        **{name: text for name, text in steering.items() if name.startswith("STANDIN_")},
        PYTHONPATH=str(cuda_bindings(folder / "packages")),
        LD_LIBRARY_PATH=libraries,
    )
    done = subprocess.run(
        play(folder, python, node.root), env=around, cwd=folder,
        capture_output=True, text=True, check=False, timeout=_SLOW_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told | {"stderr": done.stderr}


def test_the_plugin_is_found_in_the_zipapp(node: Node, seen: dict[str, Any]) -> None:
    assert f"{node.root}/hostprep.pyz" in seen["ours"]
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


def test_the_next_owner_reads_zeros(node: Node, seen: dict[str, Any]) -> None:
    assert seen["first"]["path"]
    with hostprep.attach(POOL, root=node.root, wait_timeout_s=60) as memory:
        assert memory.path == seen["first"]["path"]
        assert not any(memory.buffer)
