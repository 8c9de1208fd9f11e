"""Pools that version 0.1.0 prepared are adopted: nothing rebuilt, no running engine disturbed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hostprep
from hostprep.cuda.board import RankBoard
from hostprep.cuda.turnstile import Turnstile
from hostprep.slots import over
from testbed.agent_process import run_agent
from tests.support.previous_version import (
    FIXTURE,
    IDENTITY,
    LEASE_ID,
    TOKEN,
    ZIPAPP,
    OldEngine,
    PreviousNode,
    previous_node,
    this_boot,
)
from tests.support.processes import hostprep as run_hostprep
from tests.support.processes import wait_until

pytestmark = pytest.mark.kernel

KV_PAGES = 16
EARLY_PAGES = 4
HANG_S = 60.0


@pytest.fixture
def node(machine: None) -> Iterator[PreviousNode]:
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    if os.path.exists("/sys/devices/system/node/node1"):
        pytest.skip("the state was made on a machine with one NUMA node")
    with previous_node() as node:
        yield node


def _run(node: PreviousNode, *arguments: str) -> str:
    done = run_hostprep(*arguments, "--root", str(node.root))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _prepare(node: PreviousNode, pool: str) -> None:
    _run(node, "prepare", "-f", str(FIXTURE / f"pools/{pool}.json"))


def _regions(node: PreviousNode, pool: str) -> dict[str, Any]:
    [found] = json.loads(_run(node, "status", pool, "-o", "json"))["pools"]
    assert found["ready"] is True
    return {region["name"]: region for region in found["regions"]}


def _actions(node: PreviousNode, pool: str) -> set[str]:
    file = str(FIXTURE / f"pools/{pool}.json")
    plan = json.loads(_run(node, "plan", "-f", file, "-o", "json"))
    return {action["action"] for action in plan["actions"]}


@pytest.fixture
def engine(node: PreviousNode) -> Iterator[OldEngine]:
    """`kv` as it was left, with an engine at work in node0-1."""
    node.lay_out("kv")
    engine = OldEngine(node)
    yield engine
    engine.end()


def test_a_pool_is_adopted_and_its_engine_goes_on(node: PreviousNode, engine: OldEngine) -> None:
    before = node.file_ids("kv")
    handoff = json.loads((node.root / "kv/handoff.json").read_text())
    assert _actions(node, "kv") == {"AdoptRegion", "ScrubRegion"}

    _prepare(node, "kv")

    assert node.file_ids("kv") == before
    assert node.huge_pages() == KV_PAGES
    assert {name: node.content("kv", name) for name in before} == {
        "node0-0": {0},
        "node0-1": {ord("L")},
        "node0-2": {ord("O")},  # its owner may come back
        "node0-3": {0},  # of an engine that was killed
    }
    assert engine.holds_its_lease()
    assert engine.write("x") == "x"
    after = json.loads((node.root / "kv/handoff.json").read_text())
    assert after["generation"] == handoff["generation"], "there was nothing to publish"
    assert [region.items() >= old.items() for region, old in _pairs(after, handoff)] == [True] * 4
    _run(node, "verify", "kv", "--pages")
    regions = _regions(node, "kv")
    assert {name: region["state"] for name, region in regions.items()} == {
        "node0-0": "Free",
        "node0-1": "Leased",
        "node0-2": "Retained",
        "node0-3": "Free",
    }
    holder = regions["node0-1"]["holder"]
    assert (holder["lease"], holder["pid"]) == (LEASE_ID, engine.pid)


def _pairs(after: Any, before: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(after["regions"], before["regions"], strict=True))


def test_release_waits_for_the_engine_and_then_gives_back_what_was_taken(
    node: PreviousNode, engine: OldEngine
) -> None:
    done = run_hostprep("release", "kv", "--root", str(node.root))
    assert (done.returncode, "node0-1" in done.stderr) == (1, True)
    assert engine.holds_its_lease()
    assert node.huge_pages() == KV_PAGES

    engine.end()

    link = node.root / "kv/links" / f"node0-1@{LEASE_ID}"
    assert link.is_symlink()
    _prepare(node, "kv")
    assert node.content("kv", "node0-1") == {0}
    assert not link.is_symlink()
    assert _regions(node, "kv")["node0-1"]["state"] == "Free"
    _run(node, "release", "kv")
    assert node.huge_pages() == 0
    assert not node.root.exists()


def test_a_rank_joins_the_lease_of_the_engine_that_runs(
    node: PreviousNode, engine: OldEngine
) -> None:
    _prepare(node, "kv")
    where = {"root": str(node.root), "region": "node0-1"}
    with hostprep.join("kv", lease_id=LEASE_ID, **where) as memory:  # type: ignore[arg-type]
        memory.buffer[0:1] = b"j"
        with open(node.region("kv", "node0-1"), "rb") as file:
            assert os.pread(file.fileno(), 2, 0) == b"jL"
    with pytest.raises(hostprep.HostprepError) as refused:
        hostprep.attach("kv", **where)  # type: ignore[arg-type]
    assert refused.value.reason == "Busy"
    assert engine.holds_its_lease()


def test_an_owner_gets_its_bytes_back(node: PreviousNode) -> None:
    node.lay_out("kv")
    _prepare(node, "kv")
    owner = hostprep.Owner(TOKEN, IDENTITY)
    with hostprep.attach("kv", region="node0-2", owner=owner, root=str(node.root)) as memory:
        assert memory.contents_kept
        assert set(memory.buffer[:4096]) == {ord("O")}


def test_the_agent_adopts_by_its_saved_entries(
    node: PreviousNode, engine: OldEngine, tmp_path: Path
) -> None:
    """The API server is away: nothing but the state folder says what the node is to hold."""
    state = tmp_path / "agent"
    shutil.copytree(FIXTURE / "agent", state)
    before = node.file_ids("kv")

    done = run_agent(
        str(node.root), state, "--once", "--node-name", "node", "--allow-cgroup-v1", timeout_s=120
    )

    assert done.returncode == 0, done.stderr
    assert node.file_ids("kv") == before
    assert node.huge_pages() == KV_PAGES
    assert engine.holds_its_lease()
    assert engine.write("y") == "y"
    record = json.loads((node.root / "kv/agent.json").read_text())
    assert (record["pool_uid"], record["generation"]) == ("uid-of-kv", 1)
    assert (state / "desired.json").read_bytes() == (FIXTURE / "agent/desired.json").read_bytes()


def test_a_damaged_region_alone_is_rebuilt_and_layouts_are_kept(node: PreviousNode) -> None:
    node.lay_out("sized")
    before = node.file_ids("sized")
    _prepare(node, "sized")

    after = node.file_ids("sized")
    assert after["node0-0"] == before["node0-0"]
    assert not (node.root / "sized/state/node0-1/bad").exists()
    assert {name: region["state"] for name, region in _regions(node, "sized").items()} == {
        "node0-0": "Free",
        "node0-1": "Free",
    }
    with hostprep.attach("sized", region="node0-0", root=str(node.root)) as memory:
        groups = [(group.name, group.slots) for group in over(memory).layout.groups]
        assert groups == [("full", 5), ("window", 9)]


def test_what_the_boot_script_reserved_is_adopted_and_given_back(node: PreviousNode) -> None:
    node.lay_out("early")
    node.add_huge_pages(EARLY_PAGES)
    ledger = node.root / "early/boot.ledger"
    lines = ledger.read_text().splitlines()
    assert lines[1:] == ["2048 0 16 0 4"]
    ledger.write_text(f"{lines[0]}\n2048 0 {node.pages_before} 0 4\n")
    earlier = json.loads((node.root / "early/boot.json").read_text())

    script = _run(node, "boot", "--script", "-f", str(FIXTURE / "pools/early.json"))
    subprocess.run(["/bin/sh"], input=script, text=True, check=True, timeout=HANG_S)
    assert node.huge_pages() == EARLY_PAGES, "this boot's script has run before"
    assert json.loads((node.root / "early/boot.json").read_text()) == earlier

    _prepare(node, "early")
    assert node.huge_pages() == EARLY_PAGES
    assert _regions(node, "early")["node0-0"]["backing"] == "HugeTLB2Mi"
    _run(node, "release", "early")
    assert node.huge_pages() == 0


def test_a_change_of_huge_pages_that_was_cut_short_is_settled(node: PreviousNode) -> None:
    """The record was written ahead; of 8 pages that were to be added, 5 came."""
    node.lay_out("kv")
    record = json.loads((FIXTURE / "agent-unfinished.json").read_text())
    _, _, before, after = record["pending"]
    record["boot_id"] = this_boot()
    record["pending"][2:] = [before + node.pages_before, after + node.pages_before]
    (node.root / "kv/agent.json").write_text(json.dumps(record))
    node.add_huge_pages(5)

    _prepare(node, "kv")
    record = json.loads((node.root / "kv/agent.json").read_text())
    assert (record["taken"], record["pending"]) == ([[0, 2 << 20, KV_PAGES]], None)
    assert node.huge_pages() == KV_PAGES, "the five are not needed, and went back"
    _run(node, "release", "kv")
    assert node.huge_pages() == 0


# ---- The previous version's own engine half, beside the present one ----


class OldProcess:
    """A program that imports the previous version, as an engine's image with it does."""

    def __init__(self, node: PreviousNode, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", *arguments],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ZIPAPP), "ROOT": str(node.root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """Return the next line that it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> OldProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


# The names in these programs are that version's: they do not change with ours.
LEADER = """
import os, sys
import hostprep
from hostprep.register.board import RankBoard, board_path
from hostprep.register.gate import Gate
memory = hostprep.join()
board = RankBoard.open(board_path(memory), generation=memory.lease_id, world=2, rank=0)
board.ready()
gate = Gate(2, board, deadline_s=60)
print(memory.lease_id, flush=True)
gate.wait()
print(gate.state, flush=True)
sys.stdin.read()
"""
ATTACH = """
import os, sys
import hostprep
print("waits", flush=True)
with hostprep.attach("kv", region="node0-0", root=os.environ["ROOT"], wait_timeout_s=60) as m:
    print("has it", bytes(m.buffer[:1]), flush=True)
    sys.stdin.read()
"""
TURN = """
import os, sys
from hostprep.register.turnstile import Turnstile
print("waits", flush=True)
with Turnstile(os.environ["ROOT"]).turn():
    print("has it", flush=True)
    sys.stdin.readline()
"""


def test_an_engine_of_the_previous_version_runs_on_with_ranks_of_both(node: PreviousNode) -> None:
    node.lay_out("kv")
    link = node.root.parent / "engine.bin"
    command = ("exec", "--pool", "kv", "--region", "node0-0", "--root", str(node.root))
    with OldProcess(
        node, str(ZIPAPP), *command, "--link", str(link), "--", sys.executable, "-S", "-c", LEADER
    ) as engine:
        lease_id = engine.line()
        before = node.file_ids("kv")

        _prepare(node, "kv")

        assert node.file_ids("kv") == before
        assert os.path.samefile(link, node.region("kv", "node0-0"))
        leased = _regions(node, "kv")["node0-0"]
        assert (leased["state"], leased["holder"]["pid"]) == ("Leased", engine.pid)
        where = {"root": str(node.root), "region": "node0-0"}
        with hostprep.join("kv", lease_id=lease_id, **where):  # type: ignore[arg-type]
            path = str(node.root / "kv/state/node0-0/board")
            board = RankBoard.open(path, generation=lease_id, world=2, rank=1)
            states = {rank.rank: (rank.slot.state, rank.alive) for rank in board.read().ranks}
            assert states == {0: ("Ready", True), 1: ("Joined", True)}
            board.ready()
            assert engine.line() == "Open"
            [gate] = json.loads(_run(node, "status", "-o", "json"))["gates"]
            assert gate["state"] == "Open"
            board.close()
    _prepare(node, "kv")
    assert _regions(node, "kv")["node0-0"]["state"] == "Free"


def test_the_previous_version_attaches_to_what_this_one_prepared(node: PreviousNode) -> None:
    _prepare(node, "kv")
    with OldProcess(node, "-c", ATTACH) as old:
        assert [old.line(), old.line()] == ["waits", "has it b'\\x00'"]
        assert _regions(node, "kv")["node0-0"]["holder"]["pid"] == old.pid
    _run(node, "release", "kv")


def test_both_wait_in_one_line(node: PreviousNode) -> None:
    node.lay_out("kv")
    tickets = node.root / "kv/tickets"
    where = {"root": str(node.root), "region": "node0-0"}
    memory = hostprep.attach("kv", **where)  # type: ignore[arg-type]
    with OldProcess(node, "-c", ATTACH) as old:
        assert old.line() == "waits"
        wait_until(lambda: '["node0-0"]' in _texts(tickets), timeout_s=HANG_S)
        with pytest.raises(hostprep.HostprepError):
            hostprep.attach("kv", region="node0-0", root=str(node.root), wait_timeout_s=0.2)
        memory.close()
        assert old.line() == "has it b'\\x00'"
        assert not list(tickets.iterdir())
        with pytest.raises(hostprep.HostprepError) as refused:
            hostprep.attach("kv", **where)  # type: ignore[arg-type]
        assert refused.value.reason == "Busy"


def _texts(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.iterdir()]


def test_both_take_turns_registering(node: PreviousNode) -> None:
    node.lay_out("kv")
    tickets = node.root / "turnstile/node"
    turnstile = Turnstile(str(node.root))
    with turnstile.turn(timeout_s=HANG_S), OldProcess(node, "-c", TURN) as old:
        assert old.line() == "waits"
        wait_until(lambda: len(list(tickets.iterdir())) == 3, timeout_s=HANG_S)
    with OldProcess(node, "-c", TURN) as old:
        assert [old.line(), old.line()] == ["waits", "has it"]
        with pytest.raises(hostprep.HostprepError) as refused:
            with turnstile.turn(timeout_s=0.2):
                pass
        assert refused.value.reason == "TurnTimeout"
        mine = threading.Thread(target=_take_a_turn, args=(turnstile,))
        mine.start()
        mine.join(0.2)
        assert mine.is_alive()
    mine.join(HANG_S)
    assert not mine.is_alive()
    assert turnstile.without is None


def _take_a_turn(turnstile: Turnstile) -> None:
    with turnstile.turn(timeout_s=HANG_S):
        pass
