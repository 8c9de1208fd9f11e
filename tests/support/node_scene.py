"""What tests of tier `node` ask of their cluster, and of the machine beneath it."""

from __future__ import annotations

from typing import Any

import yaml

from testbed.chart import NAMESPACE
from testbed.control_plane import ControlPlane
from testbed.node import NODE, VirtualNode
from tests.support.waiting import wait_for

__all__ = [
    "KV",
    "POOL_LABEL",
    "agent_pod",
    "apply",
    "condition",
    "is_tainted",
    "node_condition",
    "node_resource",
    "pool_status",
    "wait_open",
]

JsonObject = dict[str, Any]
_HMNS = "/apis/hostprep.dev/v1alpha1/hostmemorynodes"
POOL_LABEL = "pool.hostprep.dev/kv"
KV: JsonObject = {
    "apiVersion": "hostprep.dev/v1alpha1",
    "kind": "HostMemoryPool",
    "metadata": {"name": "kv"},
    "spec": {
        "nodeSelector": {POOL_LABEL: "true"},
        "size": "128Mi",
        "backings": ["HugeTLB2Mi"],
        "regions": "PerNUMANode",
        "reserve": "256Mi",
        "access": {"gid": 4242, "mode": "0660"},
    },
}
"""The pool that most tests share: a region of huge pages on each NUMA node."""


def apply(cluster: ControlPlane, *documents: JsonObject) -> None:
    """`kubectl apply` of objects."""
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(documents))


def condition(cluster: ControlPlane, kind: str = "HostMemoryReady") -> JsonObject:
    """A condition of ours on the Node; empty while there is none."""
    status = cluster.api.get(f"/api/v1/nodes/{NODE}")["status"]
    found = [c for c in status.get("conditions", ()) if c["type"] == f"hostprep.dev/{kind}"]
    return found[0] if found else {}


def agent_pod(cluster: ControlPlane) -> str:
    """The name of the agent's Pod."""
    selector = (
        "-l",
        "app.kubernetes.io/component=agent",
        "-o",
        "jsonpath={.items[0].metadata.name}",
    )
    return cluster.kubectl("-n", NAMESPACE, "get", "pods", *selector)


def node_resource(cluster: ControlPlane) -> JsonObject:
    """The node's HostMemoryNode."""
    found: JsonObject = cluster.api.get(f"{_HMNS}/{NODE}")
    return found


def node_condition(cluster: ControlPlane, kind: str) -> JsonObject:
    """A condition of the HostMemoryNode; empty while there is none."""
    conditions = node_resource(cluster).get("status", {}).get("conditions", ())
    return next((found for found in conditions if found["type"] == kind), {})


def pool_status(cluster: ControlPlane, pool: str) -> JsonObject:
    """What the HostMemoryNode says of a pool; empty while it says nothing."""
    pools = node_resource(cluster).get("status", {}).get("pools", ())
    return next((found for found in pools if found["name"] == pool), {})


def is_tainted(cluster: ControlPlane) -> bool:
    """Whether the Node has our taint."""
    taints = cluster.api.get(f"/api/v1/nodes/{NODE}")["spec"].get("taints", ())
    return any(taint["key"].endswith("/hostprep") for taint in taints)


def wait_open(cluster: ControlPlane, node: VirtualNode, timeout_s: float = 180.0) -> JsonObject:
    """Wait until the node is open for this very boot; return its condition."""

    def look() -> JsonObject | None:
        found = condition(cluster)
        boots = cluster.api.get(f"/api/v1/nodes/{NODE}")["status"]["nodeInfo"]["bootID"]
        is_open = found.get("status") == "True" and not is_tainted(cluster)
        return found if is_open and boots == node.guest.boot_id else None

    return wait_for(look, timeout_s, every_s=0.5, why="the node never opened")
