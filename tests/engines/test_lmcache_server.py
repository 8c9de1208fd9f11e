"""LMCache's own server and its own client over prepared regions.

`lmcache bench server` stores blocks, retrieves them, and compares their checksums.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.backing import MIB, Backing
from hostprep.errors import FailedError
from hostprep.node.apply.service import Node
from testbed.engines.interpreters import EnginePython, engine_python
from testbed.engines.lmcache_server import LMCache, exec_command, non_zero_pages, serving
from testbed.machine import POOL, base_pool, pool_of
from testbed.processes import free_port, wait_for
from tests.engines.crashes import is_left_whole, killed_at, moments

pytestmark = pytest.mark.engines

_MIB = 64
_STORED_BYTES = 8 << 20
"""4 requests of 512 tokens, each 2 x 4 layers x 4 heads x 64 x 2 bytes."""
_START_S = 5.0
"""About as long as a start: later on it serves already, and is killed all the same."""
_SHAPE = "(2,256,16,4,64):bfloat16:4"


@pytest.fixture(scope="module")
def python() -> EnginePython:
    return engine_python("lmcache")


@pytest.fixture
def huge(node: Node) -> str:
    """The root of a region of huge pages."""
    node.prepare([pool_of(mib=_MIB, backing=Backing.HUGETLB_2MI)])
    return str(node.root)


@pytest.fixture
def base() -> Iterator[str]:
    """The root of three small regions."""
    with base_pool(regions=3, mib=8) as root:
        yield root


def _region(root: str, index: int = 0) -> str:
    return f"{root}/{POOL}/mem/node0-{index}"


def _bench(
    python: EnginePython, server: LMCache, *, requests: int = 4, mode: str = "lmcache_driven"
) -> str:
    done = subprocess.run(
        [
            python.program("lmcache"), "bench", "server", "--mode", "cpu", "--transfer-mode", mode,
            "--rpc-url", f"tcp://127.0.0.1:{server.port}", "--url", server.api.url,
            "--num-tokens", "512", "--start", "0", "--end", str(requests), "--interval", "0.1",
            "--kvcache-shape-spec", _SHAPE, "--flamegraph", "off",
        ],
        capture_output=True, text=True, check=False, timeout=300, env=python.environ(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def _run(root: str, *words: str, told: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*exec_command(root, *told), *words],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def _states(root: str) -> dict[str, str]:
    command = [sys.executable, "-m", "hostprep", "status", "--root", root, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (pool,) = json.loads(done.stdout)["pools"]
    return {region["name"]: region["state"] for region in pool["regions"]}


def test_its_objects_lie_in_the_region_and_nowhere_else(
    huge: str, python: EnginePython, tmp_path: Path
) -> None:
    assert non_zero_pages(_region(huge)) == 0
    told = exec_command(huge, "--region", "node0-0")
    with serving(python, told, tmp_path / "log") as server:
        server.wait_until_healthy()
        (arena,) = server.api.arenas()
        assert (arena.path, arena.size_bytes) == (_region(huge), _MIB * MIB)
        assert arena.is_primary
        assert re.search(rf"rw-s .* {re.escape(_region(huge))}$", server.maps, re.MULTILINE)

        said = _bench(python, server)
        assert said.count("MATCH") >= 4, said[-4000:]
        assert "MISMATCH" not in said
        (arena,) = server.api.arenas()
        assert arena.used_bytes == _STORED_BYTES
        assert non_zero_pages(_region(huge)) * 4096 == _STORED_BYTES

        _is_refused_to_a_second_server(huge, python)
        _cannot_drain_its_first(server)
        server.end(signal.SIGKILL)
    # Killed: the lease is gone with it, and the next owner reads zeros.
    assert non_zero_pages(_region(huge)) * 4096 == _STORED_BYTES
    assert _states(huge)["node0-0"] != "Leased"
    is_left_whole(huge, {"node0-0": _MIB * MIB})


def _is_refused_to_a_second_server(root: str, python: EnginePython) -> None:
    done = _run(root, python.program("lmcache"), "server", told=("--region", "node0-0"))
    assert done.returncode == 1
    assert "node0-0" in done.stderr
    assert "lease" in done.stderr


def _cannot_drain_its_first(server: LMCache) -> None:
    with pytest.raises(FailedError, match="primary"):
        server.api.drain(server.api.arenas()[0].path)


def test_several_regions_are_one_cache_and_one_more_is_lent_to_it(
    base: str, python: EnginePython, tmp_path: Path
) -> None:
    root = base
    told = exec_command(root, "--region", "node0-0", "--region", "node0-1")
    with serving(python, told, tmp_path / "log") as server:
        server.wait_until_healthy()
        wait_for(lambda: len(server.api.arenas()) == 2, 30)
        paths = [arena.path for arena in server.api.arenas()]
        assert paths == [_region(root, 0), _region(root, 1)]
        assert _states(root) == {"node0-0": "Leased", "node0-1": "Leased", "node0-2": "Free"}

        lender = _lend(root, server)
        try:
            lent = wait_for(lambda: server.api.arena(_region(root, 2)), 60)
            assert lent.size_bytes == 8 * MIB
            assert _states(root)["node0-2"] == "Leased"
            _fill(python, server, root)
            assert _asked_back(lender, server, root)
        finally:
            lender.kill()
            lender.wait()
        assert server.api.arena(_region(root, 2)) is None
        assert server.end(signal.SIGTERM) in {0, -signal.SIGTERM}
    is_left_whole(root, dict.fromkeys(("node0-0", "node0-1", "node0-2"), 8 * MIB))


def test_ended_while_it_starts_it_leaves_nothing_behind(
    base: str, python: EnginePython, tmp_path: Path
) -> None:
    port, http_port = free_port(), free_port()
    command = [*exec_command(base, "--region", "node0-0", "--region", "node0-1"), "lmcache"]
    command += ["server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)]
    ends = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL)
    for moment_s, number in zip(moments(len(ends), _START_S), ends, strict=True):
        killed_at(moment_s, command, python.environ(), tmp_path / "log", number=number)
        is_left_whole(base, dict.fromkeys(("node0-0", "node0-1"), 8 * MIB))


def _lend(root: str, server: LMCache) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hostprep.engines.lmcache.lend", "--pool", POOL]
    command += ["--root", root, "--region", "node0-2", "--server", server.api.url]
    return subprocess.Popen(command)


def _fill(python: EnginePython, server: LMCache, root: str) -> None:
    """Store 18 MiB: the third region has the last two, and nothing is evicted yet."""
    _bench(python, server, requests=9, mode="engine_driven")
    assert sum(arena.used_bytes for arena in server.api.arenas()) == 18 * MIB
    assert non_zero_pages(_region(root, 1)) * 4096 == 8 * MIB
    assert non_zero_pages(_region(root, 2)) * 4096 == 2 * MIB


def _asked_back(lender: subprocess.Popen[bytes], server: LMCache, root: str) -> bool:
    """End the lender as Kubernetes does; empty the cache, and it gives the region back."""
    lender.terminate()

    def drains() -> bool:
        arena = server.api.arena(_region(root, 2))
        return arena is None or arena.state == "draining"

    wait_for(drains, 60)
    request = urllib.request.Request(f"{server.api.url}/cache/clear", b"{}", method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    return lender.wait(60) == 0


def test_a_server_that_is_not_there_is_said_before_vllm_waits_for_it(
    python: EnginePython,
) -> None:
    del python
    command = [sys.executable, "-m", "hostprep.engines.lmcache", "http://127.0.0.1:1"]
    done = subprocess.run(
        [*command, "--wait", "0.5"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "no LMCache server answers at http://127.0.0.1:1" in done.stderr


def test_a_region_smaller_than_the_server_asks_is_refused_with_both_numbers(
    base: str, python: EnginePython
) -> None:
    done = _run(base, python.program("lmcache"), "server", "--l1-size-gb", "0.125")
    assert done.returncode == 2
    assert "--l1-size-gb is 0.125" in done.stderr
    assert "node0-0 8 MiB" in done.stderr
    assert set(_states(base).values()) == {"Free"}
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("lmcache")]
