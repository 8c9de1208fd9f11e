"""What goes wrong around an agent: its worker killed, the API server away, tokens and watches."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hostprep.node.apply.service import Node
from testbed.agent_process import AgentProcess, run_agent
from testbed.control_plane import ControlPlane
from testbed.fault_proxy import FaultProxy
from testbed.faults import answer
from testbed.processes import wait_for
from tests.cluster.agent_objects import Hmn, entry, inodes, pools
from tests.cluster.charts import NAMESPACE

pytestmark = pytest.mark.cluster

Start = Callable[..., AgentProcess]


def test_a_killed_worker_is_started_again_and_counted(hmn: Hmn, start: Start, memory: Node) -> None:
    hmn.create(entry())
    agent = start()
    hmn.wait_phase("Ready")
    before, killed = inodes(memory), agent.worker_pid

    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: agent.worker_pid != killed)
    os.truncate(Path(memory.root, "kv/mem/node0-1"), 0)
    wait_for(lambda: inodes(memory)[0] == before[0] and inodes(memory)[1:] != before[1:])

    assert agent.metric("hostprep_worker_restarts_total") == 1
    hmn.wait_phase("Ready")


def test_it_works_on_while_the_api_server_is_away(
    cluster: ControlPlane, hmn: Hmn, start: Start, memory: Node
) -> None:
    hmn.create(entry())
    agent = start()
    hmn.wait_phase("Ready")
    before = inodes(memory)

    cluster.kill_api_server()
    try:
        wait_for(lambda: agent.metric("hostprep_api_connected") == 0)
        os.truncate(Path(memory.root, "kv/mem/node0-1"), 0)
        wait_for(lambda: inodes(memory)[0] == before[0] and inodes(memory)[1:] != before[1:])
        assert agent.get("/readyz")[0] == 200
    finally:
        cluster.start_api_server()

    wait_for(lambda: agent.metric("hostprep_api_connected") == 1, 40)
    hmn.ask(entry(generation=2, size="64Mi", regions=4))
    hmn.wait_phase("Ready", timeout_s=40)


def test_it_works_from_what_it_saved_where_the_api_server_is_away_at_its_start(
    hmn: Hmn, start: Start, memory: Node, tmp_path: Path
) -> None:
    hmn.create(entry(), entry("gone"))
    agent = start()
    hmn.wait_phase("Ready")
    hmn.wait_phase("Ready", "gone")
    assert agent.stop() == 0
    memory.release(["kv"])  # as a reboot does
    state = tmp_path / "state/desired.json"
    document = state.read_text()
    parts = document.partition('"name": "gone"')
    state.write_text(parts[0] + parts[1] + parts[2].replace("Present", "Absent", 1))
    nowhere = tmp_path / "nowhere"
    nowhere.write_text(
        '{"apiVersion":"v1","kind":"Config","current-context":"x","users":[{"name":"x","user":'
        '{"token":"x"}}],"contexts":[{"name":"x","context":{"cluster":"x","user":"x"}}],'
        '"clusters":[{"name":"x","cluster":{"server":"https://127.0.0.1:9"}}]}'
    )

    alone = start(kubeconfig=nowhere)
    wait_for(lambda: "kv" in pools(memory), 20, why=alone.log_text())
    time.sleep(1)

    assert "gone" in pools(memory), "the file alone released memory"
    alone.stop()


@pytest.mark.parametrize("state", ["state", "another"])
def test_a_second_agent_is_refused_when_it_has_waited(
    hmn: Hmn, start: Start, memory: Node, tmp_path: Path, state: str
) -> None:
    """With the same state folder, or by mistake with another one and the same root."""
    hmn.create(entry())
    agent = start()
    hmn.wait_phase("Ready")
    before = inodes(memory)

    options = ("--node-name", hmn.name, "--allow-cgroup-v1", "--wait", "1")
    done = run_agent(memory.root, tmp_path / state, *options)

    assert done.returncode == 2
    assert f"another agent (process {agent.pid})" in done.stderr
    assert done.stderr.count("stands_by") == 1
    assert inodes(memory) == before


def test_a_new_agent_stands_by_ready_and_takes_over(hmn: Hmn, start: Start, memory: Node) -> None:
    """An upgrade that surges ends the old one only once the new one is Ready."""
    hmn.create(entry())
    old = start()
    hmn.wait_phase("Ready")
    before = inodes(memory)

    new = start()
    wait_for(lambda: new.get("/readyz")[0] == 200, why=new.log_text())
    assert (new.get("/healthz")[0], new.saw("takes_over")) == (200, False)
    assert old.stop() == 0
    wait_for(lambda: new.saw("started"), why=new.log_text())
    assert new.get("/readyz")[0] == 200

    assert inodes(memory) == before
    assert old.stop() == new.stop() == 0


def test_who_stands_by_ends_when_told(hmn: Hmn, start: Start) -> None:
    old = start()
    new = start()
    assert new.stop() == 0
    assert not new.saw("takes_over")
    assert old.get("/healthz")[0] == 200


def test_of_two_with_one_root_and_nothing_to_do_one_ends_once_there_is(
    hmn: Hmn, start: Start, memory: Node
) -> None:
    """Nothing below the root, no lock: the first one to work there has it."""
    first = start()
    second = start(state="another")
    hmn.create(entry())
    hmn.wait_phase("Ready")
    wait_for(lambda: first.saw("not_alone") or second.saw("not_alone"))
    ended, other = (first, second) if first.saw("not_alone") else (second, first)
    assert (ended.wait(), other.stop()) == (2, 0)
    assert len(inodes(memory)) == 2


def test_dropped_watches_expired_versions_and_refusals_are_lived_through(
    cluster: ControlPlane, hmn: Hmn, start: Start
) -> None:
    with FaultProxy(cluster) as proxy:
        kubeconfig = proxy.token_kubeconfig(NAMESPACE, "hostprep-agent", node=hmn.name)
        hmn.create(entry())
        with proxy.fault(answer(429, share=0.5)), proxy.fault(answer(500, share=0.2)):
            start(kubeconfig=kubeconfig)
            hmn.wait_phase("Ready", timeout_s=60)
        proxy.cut_watches()
        hmn.ask(entry(generation=2, size="64Mi", regions=4))
        hmn.wait_phase("Ready", timeout_s=60)
        proxy.expire_watches()
        hmn.ask(entry(generation=3, size="32Mi", regions=2))
        hmn.wait_phase("Ready", timeout_s=60)


def test_a_refused_token_is_read_again(
    cluster: ControlPlane, hmn: Hmn, start: Start, tmp_path: Path
) -> None:
    good = cluster.token_kubeconfig(NAMESPACE, "hostprep-agent", node=hmn.name)
    rotated = tmp_path / "kubeconfig"
    document = json.loads(good.read_text())
    document["users"][0]["user"]["token"] = "out of date"
    rotated.write_text(json.dumps(document))
    hmn.create(entry())
    agent = start(kubeconfig=rotated)
    wait_for(lambda: agent.get("/readyz")[0] == 200)
    assert hmn.phase() == ""

    rotated.write_text(good.read_text())

    hmn.wait_phase("Ready", timeout_s=40)
