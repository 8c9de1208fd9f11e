"""The stand-in engines of examples/kubernetes on this machine: the group's right and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostprep.api.pool_spec import PoolSpec
from hostprep.errors import BadInputError
from hostprep.node.apply.service import Node
from testbed.engine_pods import GID, documents
from testbed.machine import POOL, pool_of
from testbed.processes import wait_for
from tests.support.processes import hostprep_as

pytestmark = pytest.mark.kernel

Start = Callable[..., "Engine"]


class Engine:
    """A process as in an engine's container, and what it has printed."""

    def __init__(self, log: Path, process: subprocess.Popen[bytes]) -> None:
        self._log = log
        self.process = process

    def line(self, words: str) -> str:
        def look() -> str | None:
            return next((x for x in self._log.read_text().splitlines() if words in x), None)

        return wait_for(look, 30, why=f"no line {words!r}; {self._log.read_text()}")

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        os.killpg(self.process.pid, how)
        return self.process.wait(30)


@pytest.fixture
def shared(node: Node) -> Node:
    """Two regions for the engines' group, below folders that let everybody pass."""
    Path(node.root).parent.chmod(0o755)
    node.prepare([_pool()])
    return node


def _pool() -> PoolSpec:
    return pool_of(regions=2, gid=GID)


@pytest.fixture
def start(shared: Node, tmp_path: Path) -> Iterator[Start]:
    """`start("engine.py", ...)`: uid 1000, the pool's group, the published zipapp."""
    (scripts,) = documents("engine-scripts.yaml")
    place = Path(shared.root).parent / "opt"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    for name, text in scripts["data"].items():
        (place / name).write_text(text)
    engines: list[Engine] = []
    keep = "-all,+dac_read_search"  # to read this machine's Python, wherever it lies
    right = [f"--inh-caps={keep}", f"--ambient-caps={keep}", f"--bounding-set={keep}"]
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{shared.root}/hostprep.pyz",
        "HOSTPREP_ROOT": shared.root,
        "ENGINE_POOL": POOL,
        "ENGINE_REPORT_S": "0.2",
        "ENGINE_PORT": "0",  # any: several engines share this machine
    }

    def begin(*arguments: str) -> Engine:
        command = ["setpriv", "--reuid=1000", "--regid=1000", f"--groups={GID}", *right]
        command += [sys.executable, "-B", *(a.replace("@", f"{place}/") for a in arguments)]
        log = tmp_path / f"{len(engines)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environ, stdout=output, stderr=output, start_new_session=True
            )
        engines.append(Engine(log, process))
        return engines[-1]

    yield begin
    for engine in engines:
        if engine.process.poll() is None:
            engine.end(signal.SIGKILL)


def _region_of(line: str) -> str:
    return line.partition("region ")[2].split()[0]


def test_two_engines_take_two_regions_and_the_third_waits_for_one(
    start: Start, shared: Node
) -> None:
    first, second = start("@engine.py"), start("@engine.py")
    regions = [_region_of(engine.line("attached")) for engine in (first, second)]
    assert sorted(regions) == ["node0-0", "node0-1"]
    third = start("@engine.py")
    assert "leased" in third.line("waiting for a region")
    assert first.end() == 0
    shared.prepare([_pool()])  # as the agent does within its interval
    assert _region_of(third.line("attached")) == regions[0]
    assert "all bytes as written" in third.line("rounds")


def test_a_rank_joins_and_goes_when_its_leader_was_replaced(start: Start) -> None:
    leader = start("@leader.py", "@lease", "2")
    rank = start("@rank.py", "@lease", "1", "2")
    assert _region_of(rank.line("joined")) == _region_of(leader.line("attached"))
    rank.line("all bytes as written")
    leader.end(signal.SIGKILL)
    start("@leader.py", "@lease", "2").line("attached")
    rank.line("the leader's lease is over")
    assert rank.process.wait(10) == 1


def test_a_group_takes_both_regions_in_one_step(start: Start) -> None:
    group = start("@group.py", "2")
    group.line("2 regions")
    for region in ("node0-0", "node0-1"):
        group.line(f"region {region}")
    assert group.end() != -signal.SIGKILL


def test_an_engine_that_was_killed_finds_its_own_link_and_starts_again(
    start: Start, shared: Node
) -> None:
    """In a container that is started anew: the link is there, its region not yet scrubbed."""
    command = (f"{shared.root}/hostprep.pyz", "exec", "--pool", POOL, "--link", "@kv.bin", "--")
    engine = start(*command, "sh", "-c", "readlink @kv.bin; sleep 100")
    engine.line("node0-0@")
    refused = start(*command, "true")
    refused.line("leads to a region that is leased")
    assert refused.process.wait(10) == 2
    engine.end(signal.SIGKILL)
    start(*command, "sh", "-c", "readlink @kv.bin; sleep 100").line("node0-1@")


def test_wait_can_leave_the_regions_alone(shared: Node) -> None:
    """With user namespaces an init container cannot enter mem/, which no volume maps for it."""
    Path(shared.root, POOL, "mem").chmod(0o700)
    command = ("wait", "--pool", POOL, "--root", shared.root, "--wait", "0")
    refused = _wait_as_engine(*command)
    assert refused.returncode == 2
    assert "no permission" in refused.stderr
    done = _wait_as_engine(*command, "--handoff-only")
    assert done.returncode == 0, done.stderr


def _wait_as_engine(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["setpriv", "--reuid=1000", f"--regid={GID}", "--clear-groups", "--bounding-set=-all",
         "--inh-caps=-all", "/usr/bin/python3", "-B", f"{command[4]}/hostprep.pyz", *command],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_wait_says_what_it_waits_for(shared: Node) -> None:
    done = hostprep_as(1000, GID, "wait", "--pool", "other", "--root", shared.root, "--wait", "0.2")
    assert done.returncode == 1
    assert done.stderr.count("waiting: pool other is not prepared on this node") == 1


@pytest.mark.parametrize("inside", [(), ("mem",)])
def test_a_folder_that_a_pod_mounted_early_becomes_the_pools(
    node: Node, inside: tuple[str, ...]
) -> None:
    """Kubelet (DirectoryOrCreate) and containerd make missing host paths: pods have them open."""
    place = Path(node.root, POOL)
    for name in ("", *inside):
        os.makedirs(place / name)
    seen_by_the_pod = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        node.prepare([_pool()])
        assert "handoff.json" in os.listdir(seen_by_the_pod)
    finally:
        os.close(seen_by_the_pod)


def test_a_folder_of_somebody_else_is_refused(node: Node) -> None:
    place = Path(node.root, POOL)
    place.mkdir(parents=True)
    os.chown(place, 1000, 1000)
    with pytest.raises(BadInputError, match="is no pool"):
        node.prepare([_pool()])
    assert os.listdir(place) == []
    place.rmdir()


def test_the_folder_is_the_groups_from_its_first_instant(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting engine that looked in before would be told "no permission", and fail."""
    seen: list[tuple[int, int]] = []

    def rename(before: str, after: str) -> None:
        status = os.stat(before)
        seen.append((status.st_gid, status.st_mode & 0o777))
        os.replace(before, after)

    monkeypatch.setattr(os, "rename", rename)
    node.prepare([_pool()])
    assert (GID, 0o750) in seen


def test_wait_as_process_1_of_a_container_ends_when_told(shared: Node) -> None:
    command = [sys.executable, "-B", "-m", "hostprep.engines.main", "wait", "--pool", "other"]
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", *command, "--root", shared.root],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert outer.stderr is not None
    try:
        assert "waiting" in outer.stderr.readline()
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert outer.wait(10) == 128 + signal.SIGTERM
    finally:
        outer.kill()
        outer.wait()
        outer.stderr.close()
