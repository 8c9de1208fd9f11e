"""`hostprep-operator cleanup`: memory given back, no trace left, with and without an operator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.api import Api
from testbed.chart import apply_crds
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object
from testbed.operator_process import (
    HMNS,
    NODES,
    POOLS,
    OperatorProcess,
    parse_last_json,
    pool_object,
    run_command,
    traceless,
)
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents

pytestmark = pytest.mark.cluster

JsonObject = dict[str, Any]
FOREIGN = {"key": "example.org/mine", "effect": "NoSchedule"}
NAMES = ("n1", "n2", "n3")


@pytest.fixture
def cluster(private_control_plane: ControlPlane) -> ControlPlane:
    apply_crds(private_control_plane.api)
    return private_control_plane


@pytest.fixture
def api(cluster: ControlPlane) -> Api:
    return cluster.api


@pytest.fixture
def agents(api: Api) -> Iterator[SimulatedAgents]:
    agents = SimulatedAgents(api)
    yield agents
    agents.close()


@pytest.fixture
def before(api: Api) -> list[JsonObject]:
    """Three nodes, as they were before anything of ours came."""
    return [create_node(api, node_object(name, taints=[FOREIGN])) for name in NAMES]


@pytest.fixture
def operator(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents, before: list[JsonObject]
) -> OperatorProcess:
    """An operator that has opened the three nodes for two pools."""
    operator = OperatorProcess(cluster, "--agent-liveness=off")
    operator.wait_ready()
    for name in ("kv", "chat"):
        api.create(POOLS, pool_object(name))
    wait_for(lambda: all(_labels(api, name) == {"kv", "chat"} for name in NAMES))
    return operator


def _labels(api: Api, name: str) -> set[str]:
    labels = api.get(f"{NODES}/{name}")["metadata"]["labels"]
    return {key.partition("/")[2] for key in labels if key.startswith("ready.hostprep.dev/")}


def _is_as_before(api: Api, before: list[JsonObject]) -> bool:
    return [traceless(api.get(f"{NODES}/{name}")) for name in NAMES] == [
        traceless(node) for node in before
    ]


@pytest.mark.parametrize("running", [True, False])
def test_pools_go_memory_is_given_back_and_nodes_are_as_before(
    cluster: ControlPlane,
    api: Api,
    operator: OperatorProcess,
    before: list[JsonObject],
    running: bool,
) -> None:
    if not running:
        operator.child.stop()
    code, printed = run_command(cluster, "cleanup", "--yes", "--timeout=60", "-o", "json")
    assert code == 0, printed
    done = parse_last_json(printed)
    assert sorted(done["pools_deleted"]) == ["chat", "kv"]
    assert done["host_memory_nodes_deleted"] == list(NAMES)
    assert done["still_holding"] == []
    assert api.get(POOLS)["items"] == []
    assert api.get(HMNS)["items"] == []
    assert _is_as_before(api, before)
    code, printed = run_command(cluster, "cleanup", "--yes", "-o", "json")
    assert code == 0, printed
    assert parse_last_json(printed)["nodes_cleaned"] == []


def test_a_node_whose_engine_holds_on_is_named_and_left_for_the_next_run(
    cluster: ControlPlane,
    api: Api,
    operator: OperatorProcess,
    agents: SimulatedAgents,
    before: list[JsonObject],
) -> None:
    agents.held = {"n2"}
    code, printed = run_command(cluster, "cleanup", "--yes", "--timeout=6")
    assert code == 1
    assert "1 node still holding memory: n2" in printed
    assert [hmn["metadata"]["name"] for hmn in api.get(HMNS)["items"]] == ["n2"]
    agents.held = set()
    agents.report()
    assert run_command(cluster, "cleanup", "--yes", "--timeout=30")[0] == 0
    assert _is_as_before(api, before)


def test_a_dry_run_says_what_would_go_and_changes_nothing(
    cluster: ControlPlane, api: Api, operator: OperatorProcess
) -> None:
    code, printed = run_command(cluster, "cleanup", "--dry-run", "-o", "json")
    assert code == 0
    told = parse_last_json(printed)
    assert told["nodes_cleaned"] == list(NAMES)
    assert sorted(told["pools_deleted"]) == ["chat", "kv"]
    assert len(api.get(POOLS)["items"]) == 2
    assert len(api.get(HMNS)["items"]) == 3


def test_with_keep_memory_marks_go_and_no_instruction_to_release_is_ever_given(
    cluster: ControlPlane, api: Api, operator: OperatorProcess, before: list[JsonObject]
) -> None:
    operator.child.stop()
    code, printed = run_command(cluster, "cleanup", "--yes", "--keep-memory")
    assert code == 0, printed
    assert _is_as_before(api, before)
    assert len(api.get(POOLS)["items"]) == 2, "pools are people's"
    assert api.get(HMNS)["items"] == [], "no instruction: agents keep everything"


def test_keep_memory_beside_a_running_operator_says_that_it_cannot_last(
    cluster: ControlPlane, api: Api, operator: OperatorProcess
) -> None:
    code, printed = run_command(cluster, "cleanup", "--yes", "--keep-memory")
    assert code == 1
    assert "operator is running" in printed
    assert len(api.get(POOLS)["items"]) == 2
    wait_for(lambda: len(api.get(HMNS)["items"]) == 3)
    states = [e["state"] for h in api.get(HMNS)["items"] for e in h["spec"]["pools"]]
    assert set(states) == {"Present"}


def test_after_the_definitions_are_gone_nodes_can_still_be_cleaned(
    cluster: ControlPlane, api: Api, operator: OperatorProcess, before: list[JsonObject]
) -> None:
    operator.child.kill()
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for item in api.get(definitions)["items"]:
        api.delete(f"{definitions}/{item['metadata']['name']}")
    wait_for(lambda: not api.get(definitions)["items"], 20)
    code, printed = run_command(cluster, "cleanup", "--yes")
    assert code == 0, printed
    assert _is_as_before(api, before)


def test_an_api_server_that_does_not_answer_is_a_failure_with_a_sentence(
    cluster: ControlPlane,
) -> None:
    cluster.kill_api_server()
    code, printed = run_command(cluster, "cleanup", "--yes")
    assert code == 1
    assert "Traceback" not in printed
    cluster.start_api_server()


def test_the_output_is_one_document_for_programs(
    cluster: ControlPlane, api: Api, operator: OperatorProcess
) -> None:
    _, printed = run_command(cluster, "cleanup", "--dry-run", "-o", "json")
    assert json.loads(printed)["dry_run"] is True
