"""The program `vllm` that `make vllm-cpu` makes, over a package of that name that tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.engines.interpreters import EnginePython
from testbed.engines.quick_start import program

pytestmark = pytest.mark.unit

_SERVER = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['QUIET']]))\n"


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    server = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(_SERVER)
    path = tmp_path / "bin" / "vllm"
    path.parent.mkdir()
    path.write_text(program(EnginePython(sys.executable, {"QUIET": "it's quiet"})))
    path.chmod(0o755)
    return path


def _run(vllm: Path, *words: str) -> subprocess.CompletedProcess[str]:
    around = os.environ | {"PYTHONPATH": str(vllm.parents[1])}
    return subprocess.run(
        [str(vllm), *words], capture_output=True, text=True, env=around, timeout=60, check=False
    )


def test_it_becomes_the_server(vllm: Path) -> None:
    done = _run(vllm, "serve", "tiny", "--block-size", "32")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["--model", "tiny", "--block-size", "32"], "it's quiet"]


@pytest.mark.parametrize("words", [(), ("serve",), ("bench", "serve")])
def test_another_command_is_refused(vllm: Path, words: tuple[str, ...]) -> None:
    done = _run(vllm, *words)
    assert done.returncode == 1
    assert "usage: vllm serve MODEL" in done.stderr
