"""Least privilege, shown by trying: the chart's own identities against a real API server."""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.api import Api
from testbed.control_plane import ControlPlane
from testbed.credentials import service_account_token
from testbed.nodes import create_node, node_object
from testbed.processes import free_port, wait_for
from tests.cluster.charts import NAMESPACE, cluster_with_the_chart, give_cleanup_its_rights
from tests.support.rights import FORBIDDEN, PERMITTED, Act, try_it

pytestmark = pytest.mark.cluster

_HMNS = "/apis/hostprep.dev/v1alpha1/hostmemorynodes"
_POOLS = "/apis/hostprep.dev/v1alpha1/hostmemorypools"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_BINDING = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/hostprep-agent"
_LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
_CROSS = next(act for act in FORBIDDEN if act.policy)
Clients = dict[str, Api]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with cluster_with_the_chart() as cluster:
        api = cluster.api
        for name in ("node-a", "node-b"):
            create_node(api, node_object(name))
            api.create(_HMNS, _object("HostMemoryNode", name))
        api.create(_POOLS, {**_object("HostMemoryPool", "kv"), "spec": {"size": "1Gi"}})
        lease = {"metadata": {"name": "hostprep-operator"}, "spec": {"holderIdentity": "y"}}
        api.create(_LEASES, lease)
        _agent_pod(api)
        give_cleanup_its_rights(cluster)
        _people(api)
        yield cluster


@pytest.fixture(scope="module")
def clients(cluster: ControlPlane) -> Clients:
    """A client for each identity of the table, once the admission policy works."""

    def client(account: str, **bound: str) -> Api:
        token = service_account_token(cluster.api, NAMESPACE, account, **bound)
        return Api(cluster.url, cluster.credentials.client_context(), token=token)

    found = {
        "agent": client("hostprep-agent", node="node-a"),
        "agent by pod": client("hostprep-agent", pod="agent-on-node-a"),
        "agent without node": client("hostprep-agent"),
        "operator": client("hostprep-operator"),
        "cleanup": client("hostprep-cleanup"),
        "viewer": client("viewer"),
        "editor": client("editor"),
        "anybody": client("default"),
    }
    _wait_until(found["agent"], _CROSS, refused=True)
    return found


@pytest.fixture
def too_many_rights(cluster: ControlPlane, clients: Clients) -> Iterator[None]:
    """Roles that give agents every right on HostMemoryNodes."""
    rule = {"apiGroups": ["hostprep.dev"], "resources": ["hostmemorynodes"], "verbs": ["*"]}
    cluster.api.create(f"{_RBAC}/clusterroles", {"metadata": {"name": "too-many"}, "rules": [rule]})
    _bind(cluster.api, "too-many", "hostprep-agent")
    agent = clients["agent"]
    wait_for(lambda: agent.request("DELETE", f"{_HMNS}/none").status == 404, why="not bound")
    yield
    cluster.api.delete(f"{_RBAC}/clusterrolebindings/too-many")
    cluster.api.delete(f"{_RBAC}/clusterroles/too-many")
    wait_for(lambda: agent.request("DELETE", f"{_HMNS}/none").status == 403, why="still bound")


@pytest.mark.parametrize("act", FORBIDDEN, ids=lambda act: act.title)
def test_a_forbidden_act_is_refused_by_what_the_table_names(
    act: Act, clients: Clients, request: pytest.FixtureRequest
) -> None:
    if act.who == "agent with all rights":
        request.getfixturevalue("too_many_rights")
    reply = try_it(clients.get(act.who, clients["agent"]), act)
    assert reply.status == 403, reply
    assert ("ValidatingAdmissionPolicy" in reply.body["message"]) == act.policy, reply.body


@pytest.mark.parametrize("act", PERMITTED, ids=lambda act: act.title)
def test_a_permitted_act_works(act: Act, clients: Clients) -> None:
    reply = try_it(clients[act.who], act)
    assert reply.status in (200, 201), reply


def test_a_refusal_says_which_node_may_not_write_which_status(clients: Clients) -> None:
    message = try_it(clients["agent"], _CROSS).body["message"]
    assert "an agent on node node-a may not write the status of node-b" in message


def test_without_the_policys_binding_an_agent_writes_any_nodes_status(
    cluster: ControlPlane, clients: Clients
) -> None:
    """The mutant: what the table calls refused by the policy is refused by nothing else."""
    binding = cluster.api.get(_BINDING)
    cluster.api.delete(_BINDING)
    try:
        _wait_until(clients["agent"], _CROSS, refused=False)
    finally:
        for field in ("resourceVersion", "uid", "creationTimestamp", "generation"):
            binding["metadata"].pop(field, None)
        cluster.api.create(_BINDING.rpartition("/")[0], binding)
        _wait_until(clients["agent"], _CROSS, refused=True)


def test_a_status_write_of_the_agents_own_node_is_stored(
    cluster: ControlPlane, clients: Clients
) -> None:
    clients["agent"].patch(f"{_HMNS}/node-a/status", {"status": {"bootID": "stored"}})
    assert cluster.api.get(f"{_HMNS}/node-a")["status"]["bootID"] == "stored"


def test_the_operator_comes_into_sync_with_its_own_rights_alone(
    cluster: ControlPlane, tmp_path: Path
) -> None:
    """Whatever its libraries ask for besides would be refused, and its log would say so."""
    kubeconfig = cluster.token_kubeconfig(NAMESPACE, "hostprep-operator")
    port = free_port()
    command = [sys.executable, "-m", "hostprep_operator", "run", f"--listen=127.0.0.1:{port}"]
    command += [f"--namespace={NAMESPACE}", "--leader-elect", "--log-format=json"]
    environ = {"PATH": os.environ["PATH"], "KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)}
    operator = cluster.spawn("operator", command, environ=environ)
    wait_for(lambda: _is_ready(port), 30.0, why="the operator is not ready")
    wait_for(lambda: cluster.api.get(f"{_POOLS}/kv").get("status"), 20.0, why="no pool status")
    operator.stop(10.0)
    log = operator.log.read_text()
    assert "forbidden" not in log.lower(), log


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    connection.request("GET", "/readyz")
    return connection.getresponse().status == 200


def _wait_until(api: Api, act: Act, *, refused: bool) -> None:
    # The API server's admission reads policies from a cache of its own.
    expected = 403 if refused else 200
    wait_for(lambda: try_it(api, act).status == expected, 30.0, why=f"{act.title}: no {expected}")


def _object(kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": "hostprep.dev/v1alpha1", "kind": kind, "metadata": {"name": name}}


def _agent_pod(api: Api) -> None:
    pod = {
        "metadata": {"name": "agent-on-node-a"},
        "spec": {
            "serviceAccountName": "hostprep-agent",
            "nodeName": "node-a",
            "containers": [{"name": "agent", "image": "x"}],
        },
    }
    api.create(f"/api/v1/namespaces/{NAMESPACE}/pods", pod)


def _people(api: Api) -> None:
    for name, role in (("viewer", "view"), ("editor", "edit")):
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        api.create(path, {"metadata": {"name": name}})
        _bind(api, role, name)
        wait_for(lambda role=role: _mentions_us(api, role), 20.0, why=f"{role} not aggregated")  # type: ignore[misc]


def _mentions_us(api: Api, role: str) -> bool:
    rules = api.get(f"{_RBAC}/clusterroles/{role}")["rules"]
    return any("hostprep.dev" in rule.get("apiGroups", ()) for rule in rules)


def _bind(api: Api, role: str, account: str) -> None:
    body = {
        "metadata": {"name": role if role == "too-many" else f"{account}-{role}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}],
    }
    api.create(f"{_RBAC}/clusterrolebindings", body)
