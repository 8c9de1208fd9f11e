"""exec and status warn of an engine that leaves most of a sized pool unused, without root too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.api.slot_layout import SlotLayout
from hostprep.backing import MIB, Backing
from hostprep.layout import Group
from hostprep.node.apply.service import Node
from testbed.machine import POOL, pool_of
from tests.support.processes import hostprep_as, wait_until

pytestmark = pytest.mark.kernel

_HANG_S = 60


def _sized(regions: int, per_engine: int | None, **more: Any) -> Any:
    sizing = SlotLayout.of(
        [Group(name="blocks", slots=16, slot_bytes=512 * 1024)],
        tokens_per_block=16,
        model="a-model",
        regions_per_engine=per_engine,
    )
    return pool_of(
        regions=regions, backing=Backing.HUGETLB_2MI, size_bytes=None, sizing=sizing, **more
    )


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[str]:
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho up\n[ -z $HOLD ] || exec sleep $HOLD\n")
    script.chmod(0o755)
    yield str(script)
    for name in os.listdir("/dev/shm"):
        if name.startswith("vllm_offload_") and not os.path.exists(f"/dev/shm/{name}"):
            os.unlink(f"/dev/shm/{name}")


def _exec(node: Node, *command: str, options: tuple[str, ...] = ()) -> list[str]:
    ours = ["exec", "--pool", POOL, "--root", node.root, *options]
    return [*ours, "--", *command]


def _engine(node: Node, vllm: str, *words: str) -> list[str]:
    return _exec(node, vllm, "serve", "m", *words, options=("--engine", "vllm-offloading"))


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hostprep", *arguments],
        capture_output=True, text=True, check=False, timeout=_HANG_S,
    )  # fmt: skip


def test_an_engine_that_claims_one_of_four_regions_is_warned_of(node: Node, vllm: str) -> None:
    node.prepare([_sized(4, 4)])
    done = _run(_engine(node, vllm))
    assert (done.returncode, done.stdout) == (0, "up\n")
    assert "warning: 24 MiB of the 32 MiB that pool kv has for this engine lie idle" in done.stderr
    assert "node0-1, node0-2, node0-3" in done.stderr
    assert "--integration vllm-offloading" in done.stderr


def test_nothing_is_said_of_one_that_claims_all_of_its_regions(node: Node, vllm: str) -> None:
    node.prepare([_sized(4, 4)])
    assert _run(_exec(node, vllm, options=("--count", "4"))).stderr == ""
    node.release([POOL])
    node.prepare([_sized(4, 1)])
    assert "idle" not in _run(_engine(node, vllm)).stderr
    node.release([POOL])
    node.prepare([_sized(4, 4)])
    assert _run(_exec(node, "true")).stderr == "", "no engine"
    node.release([POOL])
    node.prepare([_sized(4, None)])
    assert "idle" not in _run(_engine(node, vllm)).stderr


def test_one_that_is_told_to_use_a_half_is_warned_of(node: Node, vllm: str) -> None:
    node.prepare([_sized(1, 1)])
    key = "--kv-transfer-config.kv_connector_extra_config.cpu_bytes_to_use"
    done = _run(_engine(node, vllm, key, str(4 * MIB)))
    assert done.returncode == 0, done.stderr
    assert "warning: 4 MiB of the 8 MiB" in done.stderr
    assert "leave out the option that limits it" in done.stderr


def test_the_pools_group_is_warned_without_root(node: Node, vllm: str) -> None:
    Path(node.root).parent.chmod(0o755)
    for parent in Path(vllm).parents[:-2]:
        parent.chmod(0o755)
    node.prepare([_sized(4, 4, gid=4242)])
    done = hostprep_as(4321, 4242, *_engine(node, vllm))
    assert done.returncode == 0, done.stderr
    assert "warning: 24 MiB of the 32 MiB" in done.stderr


def test_status_tells_which_regions_lie_idle_while_the_engine_runs(node: Node, vllm: str) -> None:
    node.prepare([_sized(4, 4)])
    running = subprocess.Popen(
        [sys.executable, "-m", "hostprep", *_engine(node, vllm)],
        env={**os.environ, "HOLD": "100"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        (pool,) = json.loads(_status(node, "-o", "json").stdout)["pools"]
        (idle,) = pool["idle"]
        assert idle["claimed"] == ["node0-0"]
        assert idle["idle_regions"] == ["node0-1", "node0-2", "node0-3"]
        assert idle["idle_bytes"] == 24 * MIB
        assert "warning: 24 MiB of the 32 MiB" in _status(node).stderr

        # Another engine has the others: nothing of it is idle.
        other = _run(_exec(node, "true", options=("--count", "3")))
        assert "warning" not in other.stderr
    finally:
        running.kill()
        running.wait()
        assert running.stdout is not None
        running.stdout.close()
    wait_until(lambda: "Leased" not in _status(node).stdout)
    (pool,) = json.loads(_status(node, "-o", "json").stdout)["pools"]
    assert pool["idle"] == []


def _status(node: Node, *options: str) -> subprocess.CompletedProcess[str]:
    return _run(["status", "--root", node.root, *options])
