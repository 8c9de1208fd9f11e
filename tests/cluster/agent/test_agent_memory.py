"""A real agent process, on real memory, with the chart's rights, against a real API server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostprep.client.attach import attach
from hostprep.client.handoff import read_handoff
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.agent_process import AgentProcess, run_agent
from testbed.control_plane import ControlPlane
from testbed.machine import huge_pages_total
from testbed.processes import wait_for
from tests.cluster.agent_objects import Hmn, absent, entry, inodes, pools
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.cluster

Start = Callable[..., AgentProcess]

_GIVEN_AWAY = ("Releasing", "Resizing", "Degraded", "Failed")


def test_it_prepares_memory_and_says_so(hmn: Hmn, start: Start, memory: Node) -> None:
    hmn.create(entry())
    agent = start()

    pool = hmn.wait_phase("Ready")

    status = hmn.read()["status"]
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert status["bootID"] == boot_id
    assert status["summary"] == "kv 32 MiB HugeTLB2Mi ready"
    assert pool["message"] == "32 MiB in 2 regions of HugeTLB2Mi pages"
    assert (pool["wantedBytes"], pool["readyBytes"]) == (32 << 20, 32 << 20)
    assert pool["handoffGeneration"] == read_handoff(PoolPaths(memory.root, "kv")).generation
    assert [region["state"] for region in pool["regions"]] == ["Free", "Free"]
    assert "Populate" in [step["name"] for step in pool["steps"]]
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Ready": "True",
        "ResizeBlocked": "False",
        "Damaged": "False",
    }
    held = [pages for pages in status["hugePages"] if pages["pageBytes"] == 2 << 20]
    assert held[0]["held"] == 16
    assert agent.get("/readyz") == (200, "ok\n")
    assert agent.metric("hostprep_pool_phase", pool="kv", phase="Ready") == 1
    assert agent.metric("hostprep_populated_bytes_total", pool="kv") == 32 << 20


def test_a_status_that_says_the_same_is_never_written_again(hmn: Hmn, start: Start) -> None:
    hmn.create(entry())
    agent = start(interval_s=0.1)
    hmn.wait_phase("Ready")
    time.sleep(1)
    version, rounds = hmn.version(), agent.metric("hostprep_verify_duration_seconds_count")

    time.sleep(5)

    assert hmn.version() == version
    assert agent.metric("hostprep_verify_duration_seconds_count") > rounds + 20
    assert agent.metric("hostprep_status_writes_total", result="written") <= 4


@pytest.mark.parametrize("damage", ["truncated", "removed", "replaced"])
def test_damage_behind_its_back_is_repaired_within_seconds(
    hmn: Hmn, start: Start, memory: Node, damage: str
) -> None:
    hmn.create(entry())
    agent = start()
    hmn.wait_phase("Ready")
    before = inodes(memory)
    path = Path(memory.root, "kv/mem/node0-1")

    if damage == "truncated":
        os.truncate(path, 0)
    else:
        path.unlink()
    if damage == "replaced":
        path.write_bytes(b"")
    wait_for(lambda: inodes(memory)[0] == before[0] and inodes(memory)[1:] != before[1:], 5)

    hmn.wait_phase("Ready", timeout_s=5)
    assert inodes(memory)[0] == before[0], "the sound region was rebuilt too"
    assert agent.metric("hostprep_verify_problems_total", pool="kv") >= 1
    assert any(line.get("phase") == "Degraded" for line in agent.log())


def test_a_restart_adopts_and_writes_nothing(hmn: Hmn, start: Start, memory: Node) -> None:
    hmn.create(entry())
    agent = start()
    hmn.wait_phase("Ready")
    time.sleep(0.5)
    before, version = inodes(memory), hmn.version()

    begin = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - begin < 10
    assert inodes(memory) == before, "it released memory at its end"
    again = start()
    wait_for(lambda: again.get("/readyz")[0] == 200)
    time.sleep(1.5)

    assert inodes(memory) == before
    assert hmn.version() == version


def test_an_absent_entry_releases_and_leaves_no_trace(hmn: Hmn, start: Start, memory: Node) -> None:
    before = huge_pages_total()
    hmn.create(entry())
    start()
    hmn.wait_phase("Ready")
    assert huge_pages_total() == before + 16

    hmn.ask(absent())
    wait_for(lambda: hmn.read()["status"]["pools"] == [], why="the item stayed")

    assert huge_pages_total() == before
    # The agent says so first, and then takes its own lock out of the folder.
    wait_for(lambda: not os.path.exists(memory.root), why="the root stayed")


def test_a_deleted_host_memory_node_releases_nothing(
    hmn: Hmn, start: Start, memory: Node, tmp_path: Path
) -> None:
    hmn.create(entry())
    agent = start()
    hmn.wait_phase("Ready")
    before = inodes(memory)
    saved = (tmp_path / "state/desired.json").read_text()

    hmn.api.delete(hmn.path)
    wait_for(lambda: any(line["event"] == "no_instruction" for line in agent.log()))
    time.sleep(1.5)

    assert inodes(memory) == before
    assert (tmp_path / "state/desired.json").read_text() == saved
    hmn.create(entry())
    hmn.wait_phase("Ready")
    assert inodes(memory) == before


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_node_object_and_a_new_pool_of_that_name_adopt_what_is_held(
    hmn: Hmn, start: Start, memory: Node, restarted: bool
) -> None:
    """The objects' new UIDs are no other layout; a lease goes on through it all."""
    first = hmn.create(entry())
    agent = start()
    hmn.wait_phase("Ready")
    before = inodes(memory)
    with attach("kv", root=memory.root) as engine:
        engine.buffer[:4] = b"kept"
        wait_for(lambda: hmn.pool()["regionsLeased"] == 1, why="the lease was not seen")
        if restarted:
            assert agent.stop() == 0
        hmn.api.delete(hmn.path)
        again = hmn.create({**entry(), "uid": "uid-of-the-next-kv"})
        assert again["metadata"]["uid"] != first["metadata"]["uid"]
        agent = start() if restarted else agent

        said = hmn.wait_phase("Ready")

        assert said["uid"] == "uid-of-the-next-kv"
        assert inodes(memory) == before
        assert bytes(engine.buffer[:4]) == b"kept"
        assert agent.metric("hostprep_regions_leased", pool="kv") == 1
        assert not any(line.get("phase") in _GIVEN_AWAY for line in agent.log())
    populated = agent.metric("hostprep_populated_bytes_total", pool="kv")
    assert populated == (0 if restarted else 32 << 20), "it was populated again"


def test_a_policy_that_makes_no_sense_is_said_and_holds_up_nobody(
    hmn: Hmn, start: Start, memory: Node
) -> None:
    bad = {**entry("bad"), "policy": {"size": "32Mi", "percent": 50}}
    hmn.create(bad, entry("big", size="100Ti"), entry())
    start()

    hmn.wait_phase("Ready")

    said = hmn.wait_phase("Failed", "bad")
    assert said["reason"] == "BadPolicy"
    assert "spec.pools[bad].policy" in said["message"]
    big = hmn.wait_phase("Failed", "big")
    assert (big["reason"], "ask for" in big["message"]) == ("TooLarge", True)
    assert pools(memory) == ["kv"]
    ready = next(c for c in hmn.read()["status"]["conditions"] if c["type"] == "Ready")
    assert ready["status"] == "False"


def test_a_pool_whose_policy_went_bad_keeps_its_memory(
    hmn: Hmn, start: Start, memory: Node
) -> None:
    hmn.create(entry())
    start()
    hmn.wait_phase("Ready")
    before = inodes(memory)

    hmn.ask({**entry(generation=2), "policy": {"size": "nonsense"}})

    failed = hmn.wait_phase("Failed")
    assert failed["readyBytes"] == 32 << 20
    assert inodes(memory) == before


def test_growing_keeps_what_is_there(hmn: Hmn, start: Start, memory: Node) -> None:
    hmn.create(entry())
    start()
    hmn.wait_phase("Ready")
    before = inodes(memory)

    hmn.ask(entry(generation=2, size="64Mi", regions=4))
    hmn.wait_phase("Ready")

    assert inodes(memory)[:2] == before
    assert len(inodes(memory)) == 4


def test_a_leased_pool_is_released_once_its_user_ends(hmn: Hmn, start: Start, memory: Node) -> None:
    hmn.create(entry())
    start()
    hmn.wait_phase("Ready")
    with attach("kv", root=memory.root):
        hmn.ask(absent())
        said = hmn.wait_phase("Releasing")
        assert said["reason"] == "Leased"
        assert len(said["blocked"]) == 1
        assert f"process {os.getpid()}" in said["message"]
        time.sleep(1)
        assert len(inodes(memory)) == 2

    wait_for(lambda: hmn.read()["status"]["pools"] == [], why="the item stayed")
    wait_for(lambda: not os.path.exists(memory.root), why="the root stayed")


def test_a_preparation_writes_no_more_reports_than_documented(hmn: Hmn, start: Start) -> None:
    """Begin and end, and in between a step of 10 % in 10 s at most, or one in a minute."""
    hmn.create(entry(size="3Gi", regions=3, backings=["Base"]))
    begin_s = time.monotonic()
    agent = start()
    hmn.wait_phase("Ready", timeout_s=120)
    took_s = time.monotonic() - begin_s
    # What follows of the work's last words is no progress any more.
    time.sleep(1)

    written = agent.metric("hostprep_status_writes_total", result="written")

    assert 1 <= written <= 4 + min(10 + took_s / 60, took_s / 10)
    assert agent.metric("hostprep_status_writes_total", result="failed") == 0


@pytest.mark.parametrize(
    ("wanted", "phase", "reason"),
    [
        (
            entry(generation=2, size="16Mi", regions=1, backings=["Base"]),
            "Blocked",
            "ResizeBlocked",
        ),
        (absent(), "Releasing", "Leased"),
    ],
)
def test_status_and_kubectl_say_what_a_change_waits_for(
    cluster: ControlPlane,
    hmn: Hmn,
    start: Start,
    memory: Node,
    *,
    tmp_path: Path,
    wanted: dict[str, Any],
    phase: str,
    reason: str,
) -> None:
    def shown(*options: str) -> str:
        where = ("--root", memory.root, "--state-dir", str(tmp_path / "state"))
        return run_hostprep("status", *where, *options).stdout

    hmn.create(entry())
    start()
    hmn.wait_phase("Ready")
    assert "WAITS FOR" not in shown()
    with attach("kv", region="node0-0", root=memory.root), attach("kv", root=memory.root):
        hmn.ask(wanted)
        hmn.wait_phase(phase)

        (pool,) = json.loads(shown("-o", "json"))["pools"]

        said = pool["agent"]
        assert (said["phase"], said["reason"]) == (phase, reason)
        assert [each["region"] for each in said["waits_for"]] == ["node0-0", "node0-1"]
        assert {each["holder"]["node_pid"] for each in said["waits_for"]} == {os.getpid()}
        table = shown()
        assert "WAITS FOR" in table
        assert f"node0-0 (process {os.getpid()}," in " ".join(table.split())
        wide = cluster.kubectl("get", "hostmemorynode", hmn.name, "-o", "wide")
        assert "kv waits for node0-0, node0-1" in wide
        assert ("waits for the release of node0-0 (process" in wide) == (phase == "Releasing")


@pytest.mark.parametrize(("when", "state"), [("OnRelease", "Free"), ("OnClaim", "Dirty")])
def test_what_engines_leave_is_scrubbed_as_the_policy_says(
    hmn: Hmn, start: Start, memory: Node, when: str, state: str
) -> None:
    hmn.create(entry(scrub={"when": when}))
    start()
    hmn.wait_phase("Ready")
    with attach("kv", root=memory.root):
        wait_for(lambda: hmn.pool()["regionsLeased"] == 1, why="the lease was not seen")
        assert hmn.phase() == "Ready"

    wait_for(lambda: {r["state"] for r in hmn.pool()["regions"]} == {"Free", state})
    time.sleep(1)
    assert {r["state"] for r in hmn.pool()["regions"]} == {"Free", state}
    assert hmn.phase() == "Ready"


def test_a_sigterm_in_the_middle_keeps_what_is_done_and_the_next_one_goes_on(
    hmn: Hmn, start: Start, memory: Node
) -> None:
    hmn.create(entry(size="2Gi", regions=1, backings=["Base"]))
    agent = start()
    hmn.wait_phase("Preparing")
    wait_for(lambda: pools(memory) == ["kv"], why="nothing was begun")

    begin_s = time.monotonic()
    assert agent.stop() == 0

    assert time.monotonic() - begin_s < 10
    assert pools(memory) == ["kv"]
    start()
    hmn.wait_phase("Ready", timeout_s=60)


def test_once_ends_with_what_it_came_to(
    cluster: ControlPlane, hmn: Hmn, memory: Node, tmp_path: Path
) -> None:
    hmn.create(entry())
    options = ("--node-name", hmn.name, "--allow-cgroup-v1", "--once")

    done = run_agent(memory.root, tmp_path / "state", *options, kubeconfig=cluster.kubeconfig)
    assert (done.returncode, hmn.phase()) == (0, "Ready")
    hmn.ask(entry(), entry("big", size="100Ti"))
    done = run_agent(memory.root, tmp_path / "state", *options, kubeconfig=cluster.kubeconfig)
    assert (done.returncode, hmn.phase("big")) == (1, "Failed")
