"""Mooncake's own master, client and store service over a prepared region."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hostprep.backing import Backing
from hostprep.node.apply.service import Node
from testbed.engines.interpreters import EnginePython, engine_python
from testbed.engines.own_network import in_own_network
from testbed.machine import POOL, pool_of

pytestmark = pytest.mark.engines

_REPOSITORY = Path(__file__).parents[2]
_MIB = 64


@pytest.fixture(scope="module")
def python() -> EnginePython:
    return engine_python("mooncake")


@pytest.fixture
def huge(node: Node) -> Node:
    node.prepare([pool_of(mib=_MIB, backing=Backing.HUGETLB_2MI)])
    return node


def _play(python: EnginePython, way: str, node: Node) -> dict[str, Any]:
    # Where the engine's own modules are not needed, ours are.
    interpreter = sys.executable if way == "crash" else python.path
    command = [interpreter, "-m", "tests.engines.mooncake_scene", way, node.root]
    environment = python.environ(PYTHONPATH=str(_REPOSITORY), HOSTPREP_PYTHON=sys.executable)
    done = subprocess.run(
        in_own_network(command), env=environment, cwd=_REPOSITORY,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def _next_owner(node: Node) -> str:
    """Claim the same region, and count the bytes in it that are not zero."""
    count = "import os; print(sum(map(bool, open(os.environ['HOSTPREP_PATH'], 'rb').read())))"
    command = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", node.root]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", count],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.strip()


def test_a_segment_mounted_by_python_holds_what_is_put(huge: Node, python: EnginePython) -> None:
    seen = _play(python, "python", huge)
    assert seen["put"] == 0
    assert seen["same"]
    assert seen["offset"] >= 0, "its bytes are not in the region"
    assert seen["leased"] == "Leased"
    assert seen["after"] != "Leased"
    # Mooncake leaves the bytes there: taking them away is the claim's part.
    assert any(Path(seen["path"]).read_bytes())
    assert _next_owner(huge) == "0"


def test_the_store_service_is_started_over_a_region(huge: Node, python: EnginePython) -> None:
    seen = _play(python, "rest", huge)
    assert seen["same"]
    assert seen["offset"] >= 0, "its bytes are not in the region"
    assert seen["leased"] == "Leased"
    assert len(seen["links"]) == 1
    assert seen["after"] != "Leased"
    assert _next_owner(huge) == "0"
    assert not os.path.lexists(f"/dev/shm/{seen['links'][0]}"), "the next claim removes it"


def test_ended_while_it_starts_it_leaves_nothing_behind(huge: Node, python: EnginePython) -> None:
    seen = _play(python, "crash", huge)
    assert seen["ended"] in {0, -signal.SIGTERM}
