"""A real LMCache server over a region, started as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hostprep.engines.lmcache.server import Server
from testbed.engines.interpreters import EnginePython
from testbed.machine import POOL
from testbed.processes import free_port

_PAGE_BYTES = 4096
_UP_S = 300.0
"""A hang, whatever the machine: 4 s on two idle cores."""
_END_S = 60.0
_OPTIONS = (
    *("--supported-transfer-mode", "auto", "--eviction-policy", "LRU"),
    "--disable-observability",
)


class LMCache:
    """One server: its process, its two addresses, its log."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, api: Server, log: Path) -> None:
        self.process = process
        self.port = port
        self.api = api
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    @property
    def maps(self) -> str:
        return Path(f"/proc/{self.process.pid}/maps").read_text()

    def wait_until_healthy(self) -> None:
        """Return when it serves; fail with its log when it ends or never does."""
        self.api.wait(_UP_S)
        assert self.process.poll() is None, f"it ended:\n{self.log[-8000:]}"

    def end(self, number: int) -> int:
        """Send a signal as a container's runtime does; return how the server ended."""
        self.process.send_signal(number)
        return self.process.wait(_END_S)


def exec_command(root: str, *options: str) -> list[str]:
    """Return `hostprep exec kv --engine lmcache OPTIONS --`."""
    command = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", root]
    return [*command, "--engine", "lmcache", *options, "--"]


def connector(port: int) -> str:
    """Return the value of vLLM's --kv-transfer-config for the server at that port."""
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    config = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return json.dumps(config)


@contextlib.contextmanager
def serving(
    python: EnginePython, before: Sequence[str], log: Path, *options: str
) -> Iterator[LMCache]:
    """Run `before` with a server's command after it; nothing of it is left afterwards."""
    port, http_port = free_port(), free_port()
    command = [*before, "lmcache", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-port", str(http_port), *_OPTIONS, *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=python.environ(), start_new_session=True
        )
        try:
            yield LMCache(process, port, Server(f"http://127.0.0.1:{http_port}"), log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_END_S)


def non_zero_pages(path: str) -> int:
    """Count a file's 4 KiB pages that hold anything."""
    zeros = bytes(_PAGE_BYTES)
    count = 0
    with open(path, "rb") as file:
        while page := file.read(_PAGE_BYTES):
            count += page != zeros
    return count
