"""The newest Kubernetes beside the one that all other tests run on: what could differ there.

Definitions in both versions with their CEL rules, the chart's admission policies, and a pool's life
with the operator as a process under the chart's own rights; agents are simulated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT, HOST_MEMORY_READY, HOST_MEMORY_RELEASING
from testbed import binaries
from testbed.api import MERGE_PATCH, Api, ApiError
from testbed.chart import wait_for_deletion_protection
from testbed.control_plane import ControlPlane
from testbed.credentials import service_account_token
from testbed.nodes import create_node, node_object, reboot_node
from testbed.operator_process import HMNS, NODES, OperatorProcess, traceless
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents
from testbed.versions import kubernetes_version
from tests.cluster.charts import NAMESPACE, cluster_with_the_chart
from tests.support.pool_corpus import BAD, GOOD, Case, names

pytestmark = pytest.mark.cluster

JsonObject = dict[str, Any]
_NEWEST = kubernetes_version("newest")
_VERSIONS = ("v1alpha1", "v1beta1")
_POOLS = "/apis/hostprep.dev/v1beta1/hostmemorypools"
_STRICT = {"dryRun": "All", "fieldValidation": "Strict"}
_LABEL = "pool.hostprep.dev/kv"


@pytest.fixture(scope="module")
def newest() -> Iterator[ControlPlane]:
    """Without controllers: the newest controller manager would be two minutes more to build."""
    with cluster_with_the_chart(kubernetes=_NEWEST, controllers=False) as cluster:
        wait_for_deletion_protection(cluster.api)
        yield cluster


@pytest.fixture(scope="module")
def api(newest: ControlPlane) -> Api:
    return newest.api


def test_it_is_the_newest_that_is_pinned(api: Api) -> None:
    if binaries.given("kube-apiserver", os.environ) is None:
        assert api.get("/version")["gitVersion"] == f"v{_NEWEST}"


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_good_pool_is_accepted_and_read_in_both_versions(api: Api, case: Case) -> None:
    path = f"/apis/{case.document['apiVersion']}/hostmemorypools"
    written = api.create(path, case.document, fieldValidation="Strict")
    name = written["metadata"]["name"]
    try:
        for version in _VERSIONS:
            read = api.get(f"/apis/hostprep.dev/{version}/hostmemorypools/{name}")
            assert read["spec"] == written["spec"]
            assert read["apiVersion"] == f"hostprep.dev/{version}"
    finally:
        api.patch(f"{path}/{name}", {"spec": {"deletionProtection": "None"}})
        api.delete(f"{path}/{name}")


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_bad_pool_is_refused_with_the_field_named(api: Api, case: Case) -> None:
    path = f"/apis/{case.document['apiVersion']}/hostmemorypools"
    with pytest.raises(ApiError) as caught:
        api.create(path, case.document, **_STRICT)
    assert names(caught.value.message, case.field), caught.value.message


@pytest.mark.parametrize("version", _VERSIONS)
def test_explain_describes_a_pool(newest: ControlPlane, version: str) -> None:
    # Helm's discovery is cached, of before the definitions; explain does not look again, this does.
    assert "hmp" in newest.kubectl("api-resources", "--api-group=hostprep.dev")
    shown = newest.kubectl("explain", "hmp.spec", f"--api-version=hostprep.dev/{version}")
    assert "Exactly one of size, percent, regionSize and sizing" in " ".join(shown.split())


def _client(cluster: ControlPlane, account: str, **bound: str) -> Api:
    token = service_account_token(cluster.api, NAMESPACE, account, **bound)
    return Api(cluster.url, cluster.credentials.client_context(), token=token)


def _refusal(api: Api, path: str, body: JsonObject) -> str:
    """What the API server says when it forbids a patch; nothing is stored, empty if it may be."""
    query = {"dryRun": "All"}
    reply = api.request("PATCH", path, body, content_type=MERGE_PATCH, query=query)
    return str(reply.body["message"]) if reply.status == 403 else ""


def test_an_agent_writes_the_status_of_its_own_node_alone(newest: ControlPlane) -> None:
    for name in ("mine", "yours"):
        create_node(newest.api, node_object(name))
        kind = {"apiVersion": "hostprep.dev/v1alpha1", "kind": "HostMemoryNode"}
        newest.api.create(HMNS, {**kind, "metadata": {"name": name}, "spec": {"pools": []}})
    agent = _client(newest, "hostprep-agent", node="mine")
    body = {"status": {"bootID": "a"}}
    refused = wait_for(lambda: _refusal(agent, f"{HMNS}/yours/status", body), why="it may")
    assert "an agent on node mine may not write the status of yours" in refused
    assert agent.patch(f"{HMNS}/mine/status", body)["status"] == body["status"]
    for name in ("mine", "yours"):
        newest.api.delete(f"{HMNS}/{name}")
        newest.api.delete(f"{NODES}/{name}")


def test_the_operator_may_mark_nodes_and_not_cordon_them(newest: ControlPlane) -> None:
    create_node(newest.api, node_object("marked"))
    operator = _client(newest, "hostprep-operator")
    cordon, path = {"spec": {"unschedulable": True}}, f"{NODES}/marked"
    refused = wait_for(lambda: _refusal(operator, path, cordon), why="it may")
    assert "ValidatingAdmissionPolicy" in refused
    label = {"metadata": {"labels": {"ready.hostprep.dev/kv": "true"}}}
    assert operator.patch(path, label)["metadata"]["labels"]["ready.hostprep.dev/kv"] == "true"
    newest.api.delete(path)


class _Scene:
    """Three nodes labelled for the pool, the operator with the chart's rights, and agents."""

    def __init__(self, cluster: ControlPlane) -> None:
        self.api = cluster.api
        ours = {"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}
        self.names = ["n1", "n2", "n3"]
        self.before = [
            create_node(self.api, node_object(name, labels={_LABEL: "true"}, taints=[ours]))
            for name in self.names
        ]
        self.operator = OperatorProcess(
            cluster,
            *("--agent-liveness=off", f"--namespace={NAMESPACE}"),
            kubeconfig=cluster.token_kubeconfig(NAMESPACE, "hostprep-operator"),
        )
        self.operator.wait_ready()
        self.agents = SimulatedAgents(self.api)

    def status(self) -> JsonObject:
        """The pool's status; empty before the first."""
        return dict(self.api.get(f"{_POOLS}/kv").get("status") or {})

    def wait_for_status(self, **counts: int) -> None:
        """Wait until the pool's status has these counts."""
        wait_for(
            lambda: counts.items() <= self.status().items(),
            why=f"no {counts}: {self.operator.child.tail(5)}",
        )

    def condition(self, name: str, kind: str = HOST_MEMORY_READY) -> str:
        """Status and reason of a node's condition; empty where there is none."""
        conditions = self.api.get(f"{NODES}/{name}")["status"]["conditions"]
        found = (f"{c['status']} {c['reason']}" for c in conditions if c["type"] == kind)
        return next(found, "")

    def is_tainted(self, name: str) -> bool:
        """Whether the node is closed to engines."""
        taints = self.api.get(f"{NODES}/{name}")["spec"].get("taints") or []
        return CLUSTER_AUTOSCALER_TAINT in {taint["key"] for taint in taints}

    def entry(self, name: str) -> JsonObject:
        """What the node is told of the pool; empty where it is told nothing."""
        if not self.api.exists(f"{HMNS}/{name}"):
            return {}
        pools: list[JsonObject] = self.api.get(f"{HMNS}/{name}")["spec"]["pools"]
        return pools[0] if pools else {}


@pytest.fixture
def scene(newest: ControlPlane) -> Iterator[_Scene]:
    scene = _Scene(newest)
    yield scene
    scene.agents.close()
    scene.operator.child.stop()


def test_a_pool_lives_its_life(scene: _Scene, newest: ControlPlane) -> None:
    """Opened, closed by a reboot, kept through a slip, not deleted while leased, released."""
    api, kubectl = scene.api, newest.kubectl
    pool = {
        "apiVersion": "hostprep.dev/v1beta1",
        "kind": "HostMemoryPool",
        "metadata": {"name": "kv"},
        "spec": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": _LABEL, "operator": "Exists"}]}],
            "size": "64Mi",
            "backings": ["Base"],
            "rollout": {"maxUnavailable": 3},
            "release": {"gracePeriodSeconds": 600},
        },
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(pool))
    scene.wait_for_status(selected=3, ready=3, unavailable=0)
    assert [scene.condition(name) for name in scene.names] == ["True Ready"] * 3
    wait_for(lambda: not any(map(scene.is_tainted, scene.names)), why="not opened")

    reboot_node(api, "n1")
    wait_for(lambda: scene.condition("n1") == "False Rebooted" and scene.is_tainted("n1"))
    scene.agents.report("n1")
    wait_for(lambda: scene.condition("n1") == "True Ready" and not scene.is_tainted("n1"))

    # A lost label: the memory is kept, and everybody can see that it will go.
    kubectl("label", "node", "n2", f"{_LABEL}-")
    scene.wait_for_status(selected=2, leaving=1)
    assert scene.entry("n2")["state"] == "Present"
    assert "releaseAfter" in scene.entry("n2")
    wait_for(lambda: scene.condition("n2", HOST_MEMORY_RELEASING).startswith("True"))
    kubectl("label", "node", "n2", f"{_LABEL}=true")
    scene.wait_for_status(selected=3, ready=3, leaving=0)
    wait_for(lambda: "releaseAfter" not in scene.entry("n2"))

    scene.agents.held.add("n3")
    scene.agents.report("n3")
    scene.wait_for_status(leased=1)
    refused = api.request("DELETE", f"{_POOLS}/kv")
    assert refused.status == 403
    assert "pool kv is in use on 1 node(s)" in refused.body["message"]

    scene.agents.held.clear()
    scene.agents.report("n3")
    scene.wait_for_status(leased=0)
    api.patch(f"{_POOLS}/kv", {"spec": {"release": {"when": "Immediately"}}})
    wait_for(lambda: all(scene.entry(name)["policy"]["release"] for name in scene.names))
    kubectl("delete", "hmp", "kv")
    wait_for(lambda: not api.get(HMNS)["items"], 30, why="memory is still held")
    wait_for(lambda: not any(scene.condition(name) for name in scene.names))
    for before in scene.before:
        after = traceless(api.get(f"{NODES}/{before['metadata']['name']}"))
        assert after["metadata"]["labels"] == before["metadata"]["labels"]
        assert not after["metadata"].get("annotations")
    assert "ValidatingAdmissionPolicy" not in scene.operator.child.output()
    assert scene.operator.metric("hostprep_operator_errors_total") == 0
