"""Bad input end to end: chart's rights, operator and a real agent. Each mistake is said in words
where people look; nothing is half done, and no memory is released by it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from hostprep.node.apply.service import Node
from testbed.agent_process import AgentProcess
from testbed.api import Api, ApiError
from testbed.control_plane import ControlPlane
from testbed.machine import clean_node, machine_lock
from testbed.nodes import create_node, node_object, this_machine
from testbed.operator_process import HMNS, NODES, POOLS, OperatorProcess, pool_object
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents
from tests.cluster.agent_objects import Hmn, inodes, pools
from tests.cluster.charts import NAMESPACE, cluster_with_the_chart

pytestmark = pytest.mark.cluster

JsonObject = dict[str, Any]
Join = Callable[..., AgentProcess]
_GIB = 1 << 30
_READY = "hostprep.dev/HostMemoryReady"
_STARTUP = {"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    if os.geteuid() != 0:
        pytest.skip("needs root: the agent mounts real memory")
    with machine_lock(), cluster_with_the_chart() as cluster:
        token = cluster.token_kubeconfig(NAMESPACE, "hostprep-operator")
        options = ("--agent-liveness=off", f"--namespace={NAMESPACE}")
        OperatorProcess(cluster, *options, kubeconfig=token).wait_ready()
        yield cluster


@pytest.fixture
def api(cluster: ControlPlane) -> Iterator[Api]:
    """The administrator; everything that a test makes is gone afterwards."""
    yield cluster.api
    for path in (POOLS, NODES, HMNS):
        for item in cluster.api.get(path)["items"]:
            cluster.api.delete(f"{path}/{item['metadata']['name']}")


@pytest.fixture
def memory() -> Iterator[Node]:
    with clean_node() as node:
        yield node


@pytest.fixture
def join(cluster: ControlPlane, api: Api, memory: Node, tmp_path: Path) -> Iterator[Join]:
    """Have this machine join under a name, with a real agent."""
    agents: list[AgentProcess] = []

    def start(name: str) -> AgentProcess:
        create_node(api, this_machine(name))
        token = cluster.token_kubeconfig(NAMESPACE, "hostprep-agent", node=name)
        agents.append(AgentProcess(name, memory.root, tmp_path / "state", token))
        return agents[-1]

    yield start
    for agent in agents:
        agent.close()


def _condition(document: JsonObject, name: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition."""
    conditions = document.get("status", {}).get("conditions", ())
    found = [c for c in conditions if c["type"] == name]
    return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")


def _verdict(api: Api, path: str, name: str) -> tuple[str, str]:
    return _condition(api.get(path), name)[:2]


def _is_open(api: Api, name: str) -> bool:
    node = api.get(f"{NODES}/{name}")
    tainted = any(t["key"] == CLUSTER_AUTOSCALER_TAINT for t in node["spec"].get("taints") or ())
    return not tainted and _condition(node, _READY)[0] == "True"


def _hmn(api: Api, name: str) -> Hmn:
    """The node's HostMemoryNode, once the operator has made it."""
    hmn = Hmn(api, name)
    wait_for(lambda: api.exists(hmn.path), why=f"no HostMemoryNode {name}")
    return hmn


def _warnings(api: Api, pool: JsonObject) -> dict[str, str]:
    events = api.get("/apis/events.k8s.io/v1/events")["items"]
    uid = pool["metadata"]["uid"]
    ours = [e for e in events if e["regarding"].get("uid") == uid and e["type"] == "Warning"]
    return {event["reason"]: event["note"] for event in ours}


def _memory_bytes(line: str) -> int:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return int(text.partition(f"{line}:")[2].split()[0]) << 10


def test_of_two_pools_that_want_the_same_memory_the_higher_priority_gets_it(
    api: Api, join: Join, memory: Node
) -> None:
    reserve = _memory_bytes("MemAvailable") - 3 * _GIB
    if reserve < 0:
        pytest.skip("needs 3 GiB of free memory")
    # Of what is above the reserve either fits, and not both. Not the first by name or age wins.
    common: JsonObject = {"size": "2Gi", "regions": 1, "release": {"when": "Immediately"}}
    modest = api.create(POOLS, pool_object("a", priority=1, reserve=str(reserve), **common))
    api.create(POOLS, pool_object("b", priority=2, **common))
    join("n1")
    hmn = _hmn(api, "n1")

    hmn.wait_phase("Ready", "b", timeout_s=60)
    said = hmn.wait_phase("Failed", "a")

    assert said["reason"] == "NotEnoughMemory"
    assert "cannot be had" in said["message"], said
    assert "ask for" in said["message"], said
    assert pools(memory) == ["b"], "something of the other was made"
    assert said["readyBytes"] == 0
    assert _condition(hmn.read(), "Ready")[:2] == ("False", "NotEnoughMemory")
    wait_for(lambda: _verdict(api, f"{POOLS}/b", "Ready") == ("True", "AllReady"))
    wait_for(lambda: _verdict(api, f"{POOLS}/a", "Ready") == ("False", "SomeFailed"))
    degraded = _condition(api.get(f"{POOLS}/a"), "Degraded")
    assert degraded == ("True", "SomeFailed", "1 node in trouble: NotEnoughMemory (1 node).")
    wait_for(lambda: _warnings(api, modest).get("NodeFailed") == degraded[2])
    assert _verdict(api, f"{NODES}/n1", _READY) == ("False", "NotEnoughMemory")
    assert not _is_open(api, "n1")

    api.delete(f"{POOLS}/b")

    hmn.wait_phase("Ready", "a", timeout_s=60)
    wait_for(lambda: _is_open(api, "n1"))
    assert pools(memory) == ["a"]


def test_a_pool_larger_than_its_smallest_node_fails_there_alone(
    api: Api, join: Join, memory: Node
) -> None:
    agents = SimulatedAgents(api)
    agents.silent = {"small"}
    for name in ("large-1", "large-2"):
        create_node(api, node_object(name, taints=[_STARTUP]))
    join("small")
    size = f"{(_memory_bytes('MemTotal') >> 20) + 1024}Mi"

    pool = api.create(POOLS, pool_object(size=size))

    said = _hmn(api, "small").wait_phase("Failed")
    assert (said["reason"], said["readyBytes"]) == ("TooLarge", 0)
    assert "more than the machine has" in said["message"]
    assert _condition(_hmn(api, "small").read(), "Ready")[:2] == ("False", "TooLarge")
    wait_for(lambda: _is_open(api, "large-1") and _is_open(api, "large-2"))
    wait_for(lambda: _verdict(api, f"{NODES}/small", _READY) == ("False", "TooLarge"))
    assert not _is_open(api, "small")
    wait_for(lambda: api.get(f"{POOLS}/kv")["status"].get("failed") == 1)
    told = api.get(f"{POOLS}/kv")
    assert _condition(told, "Ready") == ("False", "SomeFailed", "2 of 3 nodes ready.")
    assert _condition(told, "Degraded")[2] == "1 node in trouble: TooLarge (1 node)."
    wait_for(lambda: "TooLarge" in _warnings(api, pool).get("NodeFailed", ""))
    # The agent's own lock keeps a second one away, whatever becomes of its pools.
    assert set(os.listdir(memory.root)) <= {".lock", ".made", ".agent.lock"}, "something was made"
    agents.close()


def test_a_selector_that_matches_nothing_is_said_and_prepares_nothing(
    api: Api, join: Join, memory: Node
) -> None:
    agent = join("n1")

    pool = api.create(POOLS, pool_object(nodeSelector={"pool.hostprep.dev/kv": "ture"}))

    wait_for(lambda: _verdict(api, f"{POOLS}/kv", "Ready") == ("False", "NothingSelected"))
    wait_for(lambda: "NothingSelected" in _warnings(api, pool))
    assert _warnings(api, pool)["NothingSelected"] == "No node has the pool's labels."
    assert not api.get(HMNS)["items"]
    assert _STARTUP in api.get(f"{NODES}/n1")["spec"]["taints"]
    assert not os.path.exists(memory.root)
    wait_for(lambda: agent.get("/readyz")[0] == 200)


def test_a_node_whose_name_has_253_characters_is_prepared_and_opened(
    api: Api, join: Join, memory: Node
) -> None:
    name = ".".join(["n" * 63] * 3 + ["n" * 61])
    join(name)

    api.create(POOLS, pool_object())

    _hmn(api, name).wait_phase("Ready")
    wait_for(lambda: _is_open(api, name))
    assert pools(memory) == ["kv"]


def test_a_host_memory_node_deleted_by_hand_is_made_anew_and_its_memory_kept(
    api: Api, join: Join, memory: Node
) -> None:
    join("n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n1"), 20)
    hmn, before = _hmn(api, "n1"), inodes(memory)

    for _ in range(3):
        uid = hmn.read()["metadata"]["uid"]
        api.delete(hmn.path)
        wait_for(lambda uid=uid: hmn.read()["metadata"]["uid"] != uid)  # type: ignore[misc]
        hmn.wait_phase("Ready")
        assert inodes(memory) == before, "memory was released"
    wait_for(lambda: _is_open(api, "n1"))


def test_a_change_that_makes_no_sense_is_refused_by_its_field_and_changes_nothing(
    api: Api, join: Join, memory: Node
) -> None:
    join("n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n1"), 20)
    hmn, before = _hmn(api, "n1"), inodes(memory)
    generation = hmn.read()["metadata"]["generation"]

    for change in ({"size": "much"}, {"percent": 50}, {"backings": ["Gold"]}, {"regions": 0}):
        with pytest.raises(ApiError) as refused:
            api.patch(f"{POOLS}/kv", {"spec": change}, fieldValidation="Strict")
        assert refused.value.status == 422
        assert next(iter(change)) in refused.value.message

    time.sleep(1)
    assert inodes(memory) == before
    assert hmn.read()["metadata"]["generation"] == generation
    assert _is_open(api, "n1")
