"""Mooncake's own master and client over regions: run inside a network of their own.

`python -m tests.engines.mooncake_scene WAY ROOT FILE`; prints what happened as one JSON document.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MASTER = "127.0.0.1:50061"
_REST = 50073
_VALUE = b"these bytes are Mooncake's" * 40000
_UP_S = 120.0
_START_S = 4.0
"""About as long as a start: later on it serves already, and is killed all the same."""


@contextlib.contextmanager
def master() -> Iterator[None]:
    """Run the master, on this network's loopback."""
    host, _, port = _MASTER.partition(":")
    command = ["mooncake_master", "--rpc_address", host, "--rpc_port", port]
    command += ["--metrics_host", host, "--metrics_port", "50062"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def python_way(root: str) -> dict[str, Any]:
    """Mount a region by our function, store something, and end as an engine does."""
    from mooncake.store import MooncakeDistributedStore

    from hostprep import attach
    from hostprep.engines.mooncake.segments import mount

    store = MooncakeDistributedStore()
    until(lambda: store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", _MASTER) == 0)
    seen: dict[str, Any] = {}
    memory = attach("kv", root=root)
    path = memory.path
    before_s = time.perf_counter()
    with mount(store, memory):
        seen["mount_s"] = time.perf_counter() - before_s
        seen["path"] = path
        seen["put"] = store.put("key", _VALUE)
        seen["same"] = store.get("key") == _VALUE
        seen["offset"] = Path(path).read_bytes().find(_VALUE)
        seen["leased"] = _state(root)
    seen["after"] = _state(root)
    store.close()
    return seen


def rest_way(root: str) -> dict[str, Any]:
    """Start the store service by `hostprep exec`, store something, and kill it."""
    command, environment = _service(root)
    seen: dict[str, Any] = {}
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as service:
        until(lambda: _is_mounted(service.pid))
        text = _VALUE[:1000].decode()
        seen["put"] = _ask("PUT", "/api/put", {"key": "key", "value": text})
        seen["same"] = _ask("GET", "/api/get/key").decode() == text
        (path,) = set(Path(root, "kv", "mem").iterdir())
        seen["offset"] = path.read_bytes().find(text.encode())
        seen["leased"] = _state(root)
        links = [link for link in Path("/dev/shm").iterdir() if link.is_symlink()]
        seen["links"] = [link.name for link in links if os.readlink(link).startswith(root)]
        service.send_signal(signal.SIGKILL)
        service.wait()
    seen["after"] = _state(root)
    return seen


def crash_way(root: str) -> dict[str, Any]:
    """End the service again and again while it starts, and once when it has the region."""
    from tests.engines.crashes import is_left_whole, killed_at, moments

    command, environment = _service(root)
    (path,) = Path(root, "kv", "mem").iterdir()
    sizes = {path.name: path.stat().st_size}
    ends = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL)
    log = Path(root).with_name("log")
    for moment_s, number in zip(moments(len(ends), _START_S), ends, strict=True):
        killed_at(moment_s, command, environment, log, number=number)
        is_left_whole(root, sizes)
    ended = killed_at(_UP_S, command, environment, log, number=signal.SIGTERM, is_ready=_is_mounted)
    is_left_whole(root, sizes)
    return {"ended": ended}


def _service(root: str) -> tuple[list[str], dict[str, str]]:
    """Return the store service's command over a region, and its environment."""
    command = [os.environ["HOSTPREP_PYTHON"], "-m", "hostprep", "exec", "--pool", "kv"]
    command += ["--root", root, "--engine", "mooncake", "--"]
    command += ["mc_store_rest_server", "--port", str(_REST)]
    where = {"MOONCAKE_MASTER": _MASTER, "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1"}
    return command, {**os.environ, **where}


def _is_mounted(process_id: int) -> bool:
    return "kv/mem" in Path(f"/proc/{process_id}/maps").read_text()


def until(look: Any) -> None:
    """Return once it comes true."""
    deadline_s = time.monotonic() + _UP_S
    while not look():
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def _ask(method: str, path: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{_REST}{path}", data, method=method)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        body_back: bytes = answer.read()
    return body_back


def _state(root: str) -> str:
    command = [os.environ["HOSTPREP_PYTHON"], "-m", "hostprep", "status", "--root", root]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=True)
    state: str = json.loads(done.stdout)["pools"][0]["regions"][0]["state"]
    return state


def main(way: str, root: str) -> None:
    """Run one of them."""
    with master():
        seen = {"python": python_way, "rest": rest_way, "crash": crash_way}[way](root)
    print(json.dumps({key: _plain(value) for key, value in seen.items()}))


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
