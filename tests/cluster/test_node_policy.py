"""The operator under the chart's own rights and policy: it marks Nodes, and nothing is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from testbed.api import Api
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object, reboot_node
from testbed.operator_process import (
    HMNS,
    NODES,
    POOLS,
    OperatorProcess,
    pool_object,
    traceless,
)
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents
from tests.cluster.charts import NAMESPACE, cluster_with_the_chart

pytestmark = pytest.mark.cluster

_ALLOWED = "example.org/host-memory"
_OTHER = "example.org/other-hostprep"
_FOREIGN = {"key": "example.org/mine", "effect": "NoExecute"}
_EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with cluster_with_the_chart("--set", f"admissionPolicy.taintKeys={{{_ALLOWED}}}") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def operator(cluster: ControlPlane) -> OperatorProcess:
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/hostprep-operator"
    (container,) = cluster.api.get(path)["spec"]["template"]["spec"]["containers"]
    keys = [argument for argument in container["args"] if argument.startswith("--taint-key=")]
    assert keys == [f"--taint-key={CLUSTER_AUTOSCALER_TAINT}", f"--taint-key={_ALLOWED}"]
    process = OperatorProcess(
        cluster,
        *("--agent-liveness=off", f"--namespace={NAMESPACE}", *keys),
        kubeconfig=cluster.token_kubeconfig(NAMESPACE, "hostprep-operator"),
    )
    process.wait_ready()
    return process


@pytest.fixture
def api(cluster: ControlPlane, operator: OperatorProcess) -> Iterator[Api]:
    """Everything that a test makes is gone afterwards; no write was refused."""
    yield cluster.api
    for path in (POOLS, HMNS, NODES):
        for item in cluster.api.get(path)["items"]:
            cluster.api.delete(f"{path}/{item['metadata']['name']}")
    assert "ValidatingAdmissionPolicy" not in operator.child.output()


@pytest.fixture
def agents(api: Api) -> Iterator[SimulatedAgents]:
    agents = SimulatedAgents(api)
    yield agents
    agents.close()


def _join(api: Api, *taints: str) -> dict[str, Any]:
    ours = [{"key": key, "effect": "NoSchedule"} for key in taints]
    return create_node(api, node_object("n1", taints=[_FOREIGN, *ours]))


def _taint_keys(api: Api) -> list[str]:
    return [taint["key"] for taint in api.get(f"{NODES}/n1")["spec"].get("taints") or []]


def _condition(api: Api) -> str:
    conditions = {c["type"]: c for c in api.get(f"{NODES}/n1")["status"]["conditions"]}
    ours = conditions.get("hostprep.dev/HostMemoryReady")
    return f"{ours['status']} {ours['reason']}" if ours else ""


def _conflicted(api: Api) -> dict[str, str]:
    conditions = api.get(f"{POOLS}/kv").get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == "Conflicted"), {})


@pytest.mark.parametrize("key", [CLUSTER_AUTOSCALER_TAINT, _ALLOWED])
def test_a_node_lives_its_life_from_joining_to_the_pools_end(
    key: str, api: Api, agents: SimulatedAgents
) -> None:
    readiness = {} if key == CLUSTER_AUTOSCALER_TAINT else {"taintKey": key}
    before = _join(api)
    release = {"when": "Immediately"}
    api.create(POOLS, pool_object(readiness=readiness, release=release))
    wait_for(lambda: _condition(api) == "True Ready")
    # Whoever put it there: it comes off an open node, and nothing else does.
    ours = {"key": key, "effect": "NoSchedule"}
    api.patch(f"{NODES}/n1", {"spec": {"taints": [_FOREIGN, ours]}})
    wait_for(lambda: _taint_keys(api) == [_FOREIGN["key"]])
    reboot_node(api, "n1")
    wait_for(lambda: _condition(api) == "False Rebooted" and key in _taint_keys(api))
    agents.report()
    wait_for(lambda: _condition(api) == "True Ready" and _taint_keys(api) == [_FOREIGN["key"]])
    api.delete(f"{POOLS}/kv")
    wait_for(lambda: not api.exists(f"{HMNS}/n1"), 15)
    wait_for(lambda: not _condition(api))
    after, before = traceless(api.get(f"{NODES}/n1")), traceless(before)
    after["status"]["nodeInfo"] = before["status"]["nodeInfo"]  # another boot
    for node in (after, before):
        annotations = node["metadata"].pop("annotations", {})
        assert set(annotations) <= {"node.alpha.kubernetes.io/ttl"}, "the controller manager's"
    assert after == before


def test_the_largest_node_is_not_too_much_for_the_policys_budget(
    api: Api, agents: SimulatedAgents
) -> None:
    """Expressions have a cost limit, and failurePolicy Fail would close the node for ever."""
    node = node_object(
        "n1", taints=[_FOREIGN, *({"key": f"t{n}", "effect": "NoSchedule"} for n in range(40))]
    )
    text = "x" * 60
    node["metadata"]["labels"] |= {f"example.org/label-{number}": text for number in range(300)}
    notes = {f"example.org/note-{number}": text * 10 for number in range(300)}
    node["metadata"]["annotations"] = notes | {"example.org/large": text * 1000}
    images = [{"names": [f"{text}{number}" * 3] * 5, "sizeBytes": 1 << 30} for number in range(200)]
    node["status"]["images"] = images
    node["status"]["conditions"] += [
        {"type": f"example.org/{number}", "status": "True", "reason": "x", "message": text * 10}
        for number in range(60)
    ]
    node["status"]["volumesAttached"] = [
        {"name": f"{text}{number}", "devicePath": text} for number in range(200)
    ]
    create_node(api, node)
    api.create(POOLS, pool_object())
    # The condition comes first: a node whose marks do not say "opened" is not one that closes.
    wait_for(lambda: "openedAt" in str(api.get(f"{NODES}/n1")["metadata"]["annotations"]))
    reboot_node(api, "n1")
    wait_for(lambda: CLUSTER_AUTOSCALER_TAINT in _taint_keys(api))


def test_a_pool_whose_key_is_not_allowed_says_so_and_its_nodes_keep_their_taints(
    api: Api, agents: SimulatedAgents, operator: OperatorProcess
) -> None:
    _join(api, _OTHER)
    api.create(POOLS, pool_object(readiness={"taintKey": _OTHER}))
    wait_for(lambda: _conflicted(api).get("status") == "True")
    condition = _conflicted(api)
    assert condition["reason"] == "TaintKeyNotAllowed"
    assert "admissionPolicy.taintKeys" in condition["message"]
    wait_for(lambda: _condition(api) == "True Ready")
    wait_for(lambda: "TaintKeyNotAllowed" in [e["reason"] for e in api.get(_EVENTS)["items"]])
    assert api.get(f"{NODES}/n1")["metadata"]["labels"]["ready.hostprep.dev/kv"] == "true"
    assert _taint_keys(api) == [_FOREIGN["key"], _OTHER]
    api.patch(f"{POOLS}/kv", {"spec": {"readiness": {"taintKey": _ALLOWED}}})
    wait_for(lambda: _conflicted(api)["status"] == "False")
    assert operator.metric("hostprep_operator_errors_total") == 0
