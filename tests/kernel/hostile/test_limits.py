"""Limits that root's command line inherits are named before anything is changed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence

import pytest

from hostprep.backing import MIB
from hostprep.node.apply.service import Node
from testbed.machine import POOL, pool_of
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel


def _limited(limit: int, size_bytes: int, arguments: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "hostprep", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(limit, (size_bytes, size_bytes)),
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("limit", "size_bytes", "name"),
    [
        (resource.RLIMIT_FSIZE, 32 * MIB, "RLIMIT_FSIZE"),
        (resource.RLIMIT_FSIZE, 0, "RLIMIT_FSIZE"),
        (resource.RLIMIT_AS, 768 * MIB, "RLIMIT_AS"),
    ],
)
def test_prepare_names_the_limit_and_changes_nothing(
    node: Node, limit: int, size_bytes: int, name: str
) -> None:
    prepare = ["prepare", POOL, "--size", "64Mi", "--regions", "1", "--backing", "Base"]
    code, error = _limited(limit, size_bytes, [*prepare, "--root", node.root])
    assert code == 2, error
    assert name in error
    assert "ulimit" in error
    assert not os.path.exists(node.root)


def test_release_under_a_limit_leaves_the_pool_whole(node: Node) -> None:
    node.prepare([pool_of()])
    code, error = _limited(resource.RLIMIT_FSIZE, 1, ["release", POOL, "--root", node.root])
    assert code == 2, error
    assert "RLIMIT_FSIZE" in error
    assert os.path.exists(f"{node.root}/{POOL}/handoff.json")


@pytest.mark.parametrize("text", ["1e999", "nan"])
@pytest.mark.parametrize(
    "command",
    [
        "prepare kv --size=8Mi --wait={}",
        "release kv --wait={}",
        "attach kv --wait={}",
        "prepare kv --size={}",
        "attach kv --size={}",
        "prepare kv --size=8Mi --gid={}",
        "attach kv --numa-node={}",
        "demo --size={}",
    ],
)
def test_numbers_that_are_none_are_bad_input(node: Node, command: str, text: str) -> None:
    words = command.format(text).split()
    root = [] if words[0] == "demo" else ["--root", node.root]
    done = run_hostprep(*words, *root)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert not os.path.exists(node.root)
