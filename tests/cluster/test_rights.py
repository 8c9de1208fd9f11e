"""Least privilege, shown by trying: the chart's own identities against a real API server."""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT, HOST_MEMORY_READY
from testbed.api import STRATEGIC_PATCH, Api
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
_POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
_BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
_LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
_CROSS = next(act for act in FORBIDDEN if act.policy)
_CORDON = next(act for act in FORBIDDEN if act.what == "cordon a Node")
_RULES = {
    "agent with all rights": ("hostprep.dev", "hostmemorynodes", "agent", f"{_HMNS}/none"),
    "operator with all rights": ("", "nodes", "operator", "/api/v1/nodes/none"),
}
"""Who may do too much: the API group and resource, whose account, and an object to try it on."""
Clients = dict[str, Api]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with cluster_with_the_chart() as cluster:
        api = cluster.api
        ours = {"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}
        others = {"key": "example.com/dedicated", "effect": "NoSchedule"}
        for name, taint in (("node-a", others), ("node-b", ours)):
            create_node(api, node_object(name, labels={"example.com/team": "a"}, taints=[taint]))
            api.create(_HMNS, _object("HostMemoryNode", name))
        condition = {"type": HOST_MEMORY_READY, "status": "False", "reason": "x", "message": "x"}
        status = {"status": {"conditions": [condition]}}
        api.patch("/api/v1/nodes/node-b/status", status, content_type=STRATEGIC_PATCH)
        api.create(
            _POOLS, {**_object("HostMemoryPool", "kv"), "spec": {"allNodes": True, "size": "1Gi"}}
        )
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
        "administrator": client("administrator"),
        "anybody": client("default"),
    }
    _wait_until(found["agent"], _CROSS, refused=True)
    _wait_until(found["operator"], _CORDON, refused=True)
    return found


@contextmanager
def _too_many_rights(cluster: ControlPlane, client: Api, who: str) -> Iterator[None]:
    """A role that gives every right on a resource."""
    group, resource, account, path = _RULES[who]
    rule = {"apiGroups": [group], "resources": [resource], "verbs": ["*"]}
    cluster.api.create(f"{_RBAC}/clusterroles", {"metadata": {"name": "too-many"}, "rules": [rule]})
    _bind(cluster.api, "too-many", f"hostprep-{account}")
    wait_for(lambda: client.request("DELETE", path).status == 404, why="not bound")
    yield
    cluster.api.delete(f"{_RBAC}/clusterrolebindings/too-many")
    cluster.api.delete(f"{_RBAC}/clusterroles/too-many")
    wait_for(lambda: client.request("DELETE", path).status == 403, why="still bound")


@pytest.mark.parametrize("act", FORBIDDEN, ids=lambda act: act.title)
def test_a_forbidden_act_is_refused_by_what_the_table_names(
    act: Act, clients: Clients, cluster: ControlPlane
) -> None:
    if act.who in _RULES:
        client = clients[_RULES[act.who][2]]
        with _too_many_rights(cluster, client, act.who):
            reply = try_it(client, act)
    else:
        reply = try_it(clients[act.who], act)
    assert reply.status == 403, reply
    assert ("ValidatingAdmissionPolicy" in reply.body["message"]) == act.policy, reply.body


@pytest.mark.parametrize("act", PERMITTED, ids=lambda act: act.title)
def test_a_permitted_act_works(act: Act, clients: Clients) -> None:
    reply = try_it(clients[act.who], act)
    assert reply.status in (200, 201), reply


def test_a_refusal_says_which_node_may_not_write_which_status(clients: Clients) -> None:
    message = try_it(clients["agent"], _CROSS).body["message"]
    assert "an agent on node node-a may not write the status of node-b" in message


@pytest.mark.parametrize(("who", "policy"), [("agent", "agent"), ("operator", "node-marks")])
def test_without_its_policys_binding_nothing_else_refuses_it(
    who: str, policy: str, cluster: ControlPlane, clients: Clients
) -> None:
    """The mutant: what the table calls refused by the policy is refused by nothing else."""
    path = f"{_BINDINGS}/hostprep-{policy}"
    acts = [act for act in FORBIDDEN if act.policy and act.who == who]
    binding = cluster.api.get(path)
    cluster.api.delete(path)
    try:
        for act in acts:
            _wait_until(clients[who], act, refused=False)
    finally:
        for field in ("resourceVersion", "uid", "creationTimestamp", "generation"):
            binding["metadata"].pop(field, None)
        cluster.api.create(_BINDINGS, binding)
        _wait_until(clients[who], acts[0], refused=True)


def test_no_expression_of_a_policy_has_a_wrong_type(cluster: ControlPlane) -> None:
    """The controller manager checks them against the types of what they match."""
    for name in ("agent", "node-marks"):
        path = f"{_POLICIES}/hostprep-{name}"
        status = wait_for(
            lambda path=path: cluster.api.get(path).get("status"),  # type: ignore[misc]
            20.0,
            why="not checked",
        )
        assert "expressionWarnings" not in status.get("typeChecking", {}), status


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
    for name, role in (("viewer", "view"), ("editor", "edit"), ("administrator", "admin")):
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
