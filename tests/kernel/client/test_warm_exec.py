"""`hostprep exec --warm`: an owner gets its bytes back after kill -9, and no other process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hostprep
from hostprep.client.claim import draw_ticket
from hostprep.client.owner import Owner, read_token_file
from hostprep.client.sidecar import read_sidecar
from hostprep.errors import BusyError
from hostprep.node.apply.service import Node
from hostprep.node.plan.actions import ScrubRegion
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

_WRITE = """
import os, signal, hostprep
for region in os.environ["HOSTPREP_REGIONS"].split(":"):
    memory = hostprep.join(region=region)
    memory.buffer[:32] = (region + " " + os.environ["HOSTPREP_WARM"]).encode().ljust(32)
    globals()[region] = memory
os.kill(os.getpid(), signal.SIGKILL)
"""
_READ = """
import os, hostprep
print(os.environ.get("HOSTPREP_WARM"))
for region in os.environ["HOSTPREP_REGIONS"].split(":"):
    with hostprep.join(region=region) as memory:
        print(memory.buffer[:32].tobytes().strip(b"\\0 ").decode())
"""


def _exec(node: Node, code: str, *options: str, count: int = 1) -> subprocess.CompletedProcess[str]:
    return run_hostprep("exec", POOL, "--root", node.root, "--count", str(count), *options, "--",
                        sys.executable, "-c", code)  # fmt: skip


def _warm(file: Path, name: str = "chat") -> tuple[str, ...]:
    return ("--warm", name, "--owner-file", str(file))


def test_the_same_owner_finds_its_bytes_after_a_kill(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(regions=2)])
    token = tmp_path / "token"
    killed = _exec(node, _WRITE, *_warm(token), count=2)
    assert killed.returncode == -signal.SIGKILL
    assert "with a random token" in killed.stderr
    assert token.stat().st_mode & 0o777 == 0o600
    node.prepare([pool_of(regions=2)])  # which leaves alone what an owner may come back for

    again = _exec(node, _READ, *_warm(token), count=2)

    assert again.stdout.splitlines() == ["chat", "node0-0 chat", "node0-1 chat"]
    assert "as it was left" in again.stderr


@pytest.mark.parametrize("stranger", ["none", "other token", "other name"])
def test_no_other_claimer_gets_the_bytes(node: Node, tmp_path: Path, stranger: str) -> None:
    node.prepare([pool_of()])
    _exec(node, _WRITE, *_warm(tmp_path / "token"))
    options = {
        "none": (),
        "other token": _warm(tmp_path / "other"),
        "other name": _warm(tmp_path / "token", "code"),
    }[stranger]

    read = _exec(node, _READ, *options)

    assert read.returncode == 0
    assert read.stdout.splitlines()[1:] == [""]
    # The stranger's claim zeroed them: they do not come back to the owner either.
    assert _exec(node, _READ, *_warm(tmp_path / "token")).stdout.splitlines() == ["chat", ""]


def test_each_rank_gets_the_region_that_it_had(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(regions=3)])
    with hostprep.attach(POOL, region="node0-0", root=node.root):
        _exec(node, _WRITE, *_warm(tmp_path / "token"), count=2)  # node0-1, node0-2

    again = _exec(node, _READ, *_warm(tmp_path / "token"), count=2)

    assert again.stdout.splitlines()[1:] == ["node0-1 chat", "node0-2 chat"]


def test_a_batch_without_one_of_its_regions_starts_empty(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(regions=3)])
    _exec(node, _WRITE, *_warm(tmp_path / "token"), count=2)

    with hostprep.attach(POOL, region="node0-0", root=node.root):
        again = _exec(node, _READ, *_warm(tmp_path / "token"), count=2)

    assert again.stdout.splitlines() == ["chat", "", ""]
    assert "all are kept, or none" in again.stderr


def test_the_record_names_the_contents_and_since_when(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of()])
    since = []
    for _ in range(2):
        _exec(node, _WRITE, *_warm(tmp_path / "token"))
        sidecar = read_sidecar(PoolPaths(node.root, POOL), "node0-0")
        assert sidecar is not None
        assert sidecar.owner is not None
        assert sidecar.owner.name == "chat"
        since.append(sidecar.owner.since_s)
    assert 0 < since[0] == since[1]


def test_what_was_kept_longest_gives_way_first(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(regions=2)])
    for region in ("node0-1", "node0-0"):
        _exec(node, _WRITE, "--region", region, *_warm(tmp_path / "token", region))

    with hostprep.attach(POOL, root=node.root) as memory:
        assert memory.region.name == "node0-1"


def test_the_variable_of_a_surrounding_exec_is_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare([pool_of()])
    monkeypatch.setenv("HOSTPREP_WARM", "outer")
    assert _exec(node, _READ).stdout.splitlines()[0] == "None"


def test_a_refused_owner_claims_nothing(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of()])
    short, shared = tmp_path / "short", tmp_path / "shared"
    short.write_text("short")
    short.chmod(0o600)
    shared.write_text("a" * 32)
    shared.chmod(0o604)
    os.mkfifo(tmp_path / "fifo")
    for options, said in (
        (("--warm", "chat"), "without --owner-file"),
        (("--owner-file", str(short)), "without --warm"),
        (_warm(short), "16 to 4096"),
        (_warm(shared), "chmod 0600"),
        (_warm(tmp_path / "fifo"), "not a file"),
        (_warm(tmp_path / "missing" / "token"), "cannot be made"),
        (("--warm", "chat", "--owner-file", ""), "names no file"),
        (_warm(tmp_path / "new", "Chat 70B"), "DNS label"),
        ((*_warm(tmp_path / "new"), "--engine", "lmcache"), "vllm-offloading"),
    ):
        refused = _exec(node, _READ, *options)
        assert refused.returncode == 2, refused.stderr
        assert said in refused.stderr
    assert not (tmp_path / "new").exists()
    assert read_sidecar(PoolPaths(node.root, POOL), "node0-0") is None


def test_no_token_is_made_for_memory_that_is_not_there(node: Node, tmp_path: Path) -> None:
    token = tmp_path / "token"
    for options in ((), ("--wait", "0.2")):
        refused = _exec(node, _READ, *_warm(token), *options)
        assert refused.returncode == 1, refused.stderr
        assert "run `hostprep prepare`" in refused.stderr
        assert not token.exists()
    node.prepare([pool_of()])
    refused = _exec(node, _READ, *_warm(token), "--region", "node7-0")
    assert "has no region node7-0" in refused.stderr
    assert not token.exists()
    assert _exec(node, _READ, *_warm(token)).returncode == 0
    assert token.exists()


def test_one_kept_region_at_a_time_gives_way_to_who_waits(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(regions=2)])
    for region in ("node0-1", "node0-0"):
        _exec(node, _WRITE, "--region", region, *_warm(tmp_path / "token", region))
    paths = PoolPaths(node.root, POOL)
    ticket = draw_ticket(paths, frozenset({"node0-0", "node0-1"}))

    node.prepare([pool_of(regions=2)])

    ticket.give_up()
    assert read_sidecar(paths, "node0-1") is None, "kept longest"
    assert read_sidecar(paths, "node0-0") is not None


def test_nothing_gives_way_to_its_own_owner_who_waits(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(regions=2)])
    _exec(node, _WRITE, *_warm(tmp_path / "token"))
    paths = PoolPaths(node.root, POOL)
    token, _ = read_token_file(str(tmp_path / "token"))
    for owner in (Owner(token, name="chat"), Owner(token, name="code")):
        ticket = draw_ticket(paths, frozenset({"node0-0", "node0-1"}), owner)
        node.prepare([pool_of(regions=2)])
        ticket.give_up()
        kept = read_sidecar(paths, "node0-0") is not None
        assert kept is (owner.name == "chat")


def _age(paths: PoolPaths, region: str, seconds: float) -> None:
    """Have root's mark say that the region was let go so long ago."""
    mark = Path(paths.kept_mark(region))
    document = json.loads(mark.read_text())
    mark.write_text(json.dumps(document | {"since_s": document["since_s"] - seconds}))


def test_a_region_is_zeroed_once_it_was_kept_for_as_long_as_the_pool_allows(
    node: Node, tmp_path: Path
) -> None:
    limited = pool_of(max_kept_s=3600)
    node.prepare([limited])
    _exec(node, _WRITE, *_warm(tmp_path / "token"))
    paths = PoolPaths(node.root, POOL)
    node.prepare([limited])  # sees it first: from here on it counts
    _age(paths, "node0-0", 3500)
    node.prepare([limited])
    assert _exec(node, _WRITE, *_warm(tmp_path / "token")).stderr.strip().endswith("left")
    _age(paths, "node0-0", 200)
    node.prepare([limited])  # a new lease since: the earlier mark counts for nothing
    assert read_sidecar(paths, "node0-0") is not None

    _age(paths, "node0-0", 3700)
    (action,) = [a for a in node.plan([limited]).actions if isinstance(a, ScrubRegion)]
    node.prepare([limited])

    assert "at most" in action.describe()
    assert read_sidecar(paths, "node0-0") is None
    assert not os.path.lexists(paths.kept_mark("node0-0"))
    assert _exec(node, _READ, *_warm(tmp_path / "token")).stdout.splitlines() == ["chat", ""]


@pytest.mark.parametrize(("aged_s", "kept"), [(3500, True), (3700, False)])
def test_an_owner_that_comes_too_late_and_before_the_scrub_starts_empty(
    node: Node, tmp_path: Path, aged_s: float, kept: bool
) -> None:
    limited = pool_of(regions=2, max_kept_s=3600)
    node.prepare([limited])
    _exec(node, _WRITE, *_warm(tmp_path / "token"), count=2)
    node.prepare([limited])
    # Of one of both: all are kept, or none.
    _age(PoolPaths(node.root, POOL), "node0-1", aged_s)

    again = _exec(node, _READ, *_warm(tmp_path / "token"), count=2)

    assert ("node0-0 chat" in again.stdout, "node0-1 chat" in again.stdout) == (kept, kept)


def test_a_claim_obeys_the_limit_that_the_pool_has_now(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of()])
    _exec(node, _WRITE, *_warm(tmp_path / "token"))
    node.prepare([pool_of()])
    _age(PoolPaths(node.root, POOL), "node0-0", 7200)
    for most_s in (3600, None, 10_000):  # a limit that falls scrubs; here only the mark is asked
        node.facts([pool_of(max_kept_s=most_s)])
        node.facts()  # without the pool's policy, as `hostprep status`: the limit stays
        again = _exec(node, _READ, *_warm(tmp_path / "token"))
        assert ("chat" in again.stdout.splitlines()[1:][0]) is (most_s != 3600)
        if most_s == 3600:
            assert "longer than the pool allows" in again.stderr
            _exec(node, _WRITE, *_warm(tmp_path / "token"))
        node.prepare([pool_of()])
        _age(PoolPaths(node.root, POOL), "node0-0", 7200)


@pytest.mark.parametrize(("most_s", "kept"), [(None, True), (0, False)])
def test_without_a_limit_it_is_kept_and_with_none_it_is_not(
    node: Node, tmp_path: Path, most_s: int | None, kept: bool
) -> None:
    node.prepare([pool_of()])
    _exec(node, _WRITE, *_warm(tmp_path / "token"))
    node.prepare([pool_of(max_kept_s=most_s)])
    assert (read_sidecar(PoolPaths(node.root, POOL), "node0-0") is not None) is kept


def test_a_mark_of_times_to_come_is_no_mark(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of()])
    _exec(node, _WRITE, *_warm(tmp_path / "token"))
    paths = PoolPaths(node.root, POOL)
    node.prepare([pool_of()])
    _age(paths, "node0-0", -1e6)
    node.prepare([pool_of()])
    assert json.loads(Path(paths.kept_mark("node0-0")).read_text())["since_s"] <= time.time()


def test_a_pool_that_shrinks_gives_up_what_is_not_kept_first(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(regions=3)])
    for region in ("node0-2", "node0-1"):
        _exec(node, _WRITE, "--region", region, *_warm(tmp_path / "token", region))

    for left in (["node0-1", "node0-2"], ["node0-1"]):
        node.prepare([pool_of(regions=len(left))])
        assert sorted(os.listdir(f"{node.root}/{POOL}/state")) == left


def test_a_region_without_room_for_a_directory_is_not_claimed(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(size_bytes=64 << 10)])
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\necho started\n")
    vllm.chmod(0o755)
    asked = ("exec", POOL, "--root", node.root, "--engine", "vllm-offloading")
    command = ("--", str(vllm), "serve", "m")

    refused = run_hostprep(*asked, *_warm(tmp_path / "token"), *command)

    assert refused.returncode == 2
    assert "--warm: the directory of what is kept takes" in refused.stderr
    assert "node0-0 64 KiB" in refused.stderr
    assert read_sidecar(PoolPaths(node.root, POOL), "node0-0") is None
    assert "started" in run_hostprep(*asked, *command).stdout


_LEAVE_A_RANK = """
import os, signal, subprocess, sys, hostprep
memory = hostprep.join()
memory.buffer[:32] = b"node0-0 chat".ljust(32)
rank = "import hostprep, sys, time; memory = hostprep.join(); print('joined', flush=True); " \\
    "time.sleep(float(sys.argv[1]))"
child = subprocess.Popen([sys.executable, "-c", rank, sys.argv[1]], close_fds=IS_JOINED,
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=["True", "False"], ids=["joined", "with the lease"])
def leftover(request: pytest.FixtureRequest) -> str:
    """A rank that outlives its engine: joined to its lease, or with the lease itself."""
    return _LEAVE_A_RANK.replace("IS_JOINED", str(request.param))


def test_it_waits_for_what_is_left_of_the_killed_engine(
    node: Node, tmp_path: Path, leftover: str
) -> None:
    node.prepare([pool_of(regions=2)])  # one more is free: an empty one
    run_hostprep("exec", POOL, "--root", node.root, *_warm(tmp_path / "token"), "--",
                 sys.executable, "-c", leftover, "3")  # fmt: skip
    begin_s = time.monotonic()

    again = _exec(node, _READ, *_warm(tmp_path / "token"))

    assert again.stdout.splitlines() == ["chat", "node0-0 chat"], again.stderr
    assert "waiting for node0-0" in again.stderr
    assert time.monotonic() - begin_s < 30


def test_others_get_the_free_region_meanwhile(node: Node, tmp_path: Path, leftover: str) -> None:
    node.prepare([pool_of(regions=2)])
    run_hostprep("exec", POOL, "--root", node.root, *_warm(tmp_path / "token"), "--",
                 sys.executable, "-c", leftover, "4")  # fmt: skip
    command = [sys.executable, "-m", "hostprep", "exec", POOL, "--root", node.root,
               *_warm(tmp_path / "token"), "--", sys.executable, "-c", _READ]  # fmt: skip
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    tickets = Path(PoolPaths(node.root, POOL).tickets)
    while not list(tickets.iterdir()):
        assert waiting.poll() is None
        time.sleep(0.01)

    with hostprep.attach(POOL, root=node.root) as memory:
        assert memory.region.name == "node0-1"
        assert waiting.poll() is None
    output, _ = waiting.communicate(timeout=60)
    assert output.splitlines() == ["chat", "node0-0 chat"]


def test_a_second_engine_of_the_same_owner_does_not_wait_for_the_first(
    node: Node, tmp_path: Path
) -> None:
    node.prepare([pool_of(regions=2)])
    owner = Owner(read_token_file(str(tmp_path / "token"))[0], {"engine": "none"}, "chat")
    with hostprep.attach(POOL, root=node.root, owner=owner):
        second = _exec(node, _READ, *_warm(tmp_path / "token"))
        assert second.stdout.splitlines() == ["chat", ""]
        assert "starts empty" in second.stderr


def test_while_one_region_of_a_batch_is_waited_for_nobody_takes_the_others(
    node: Node, tmp_path: Path, leftover: str
) -> None:
    node.prepare([pool_of(regions=2)])
    lead = leftover.replace("hostprep.join()", "hostprep.join(region='node0-0')")
    owned = ("exec", POOL, "--root", node.root, "--count", "2", *_warm(tmp_path / "token"), "--")
    run_hostprep(*owned, sys.executable, "-c", lead, "4")
    command = [sys.executable, "-m", "hostprep", *owned, sys.executable, "-c", _READ]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    tickets = Path(PoolPaths(node.root, POOL).tickets)
    while not list(tickets.iterdir()):
        assert waiting.poll() is None
        time.sleep(0.01)

    with pytest.raises(BusyError):
        hostprep.attach(POOL, root=node.root)
    output, _ = waiting.communicate(timeout=60)
    assert output.splitlines() == ["chat", "node0-0 chat", ""]
    sidecar = read_sidecar(PoolPaths(node.root, POOL), "node0-1")
    assert sidecar is not None
    assert sidecar.owner is not None
