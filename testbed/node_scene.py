"""Pools, engines and reboots on the virtual node: what its tests and benchmarks do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from testbed.chart import NAMESPACE
from testbed.control_plane import ControlPlane
from testbed.engine_pods import EnginePods, pod_of
from testbed.node import NODE, VirtualNode
from testbed.operator_process import OperatorProcess
from testbed.processes import wait_for

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


_PATIENCE_S = 300.0
# A hostPath that outlives the boots keeps every word of every container: kubelet keeps two logs.
_RECORD = "/var/lib/witness"
_PROGRAM = """
import json, os, time
import hostprep.attachment
memory = hostprep.attach("kv", wait_timeout_s=86400)
with open("/proc/sys/kernel/random/boot_id") as file:
    kernel = file.read().strip()
said = json.dumps({
    "kernel": kernel,
    "handoff": memory.handoff.boot_id,
    "zero": not any(memory.buffer[:: 1 << 16]),
    "resident": os.fstat(memory.fd).st_blocks * 512 == memory.size_bytes,
})
with open("/witness/record", "a") as record:
    record.write(said + "\\n")
    record.flush()
    os.fsync(record.fileno())
print(said, flush=True)
memory.buffer[:: 1 << 16] = b"!" * len(memory.buffer[:: 1 << 16])
time.sleep(86400)
"""


def go_through(
    cluster: ControlPlane,
    node: VirtualNode,
    operator: OperatorProcess,
    restarts: Sequence[Callable[[], None]],
    tell: Callable[[str], None] = print,
) -> None:
    """Restart the node in each of these ways, and check what must hold after every one.

    The operator runs elsewhere. Raises AssertionError.
    """
    engines = EnginePods(cluster.kubectl)
    engines.prepare()
    wait_open(cluster, node)
    node.run(f"rm -rf {_RECORD}; mkdir -m 1777 {_RECORD}")
    with engines.running([_witness_pod()]):
        boots = [node.guest.boot_id]
        _wait_for_words(node, boots)
        for number, restart in enumerate(restarts, start=1):
            closings = _closings(operator)
            restart()
            boots.append(node.guest.boot_id)
            _wait_closed(cluster, node)
            assert _closings(operator) == closings + 1
            wait_open(cluster, node, _PATIENCE_S)
            _wait_for_words(node, boots)
            tell(f"restart {number} of {len(restarts)}: closed, prepared, opened; engine back")


def _witness_pod() -> JsonObject:
    pod = pod_of("witness", _PROGRAM)
    spec = pod["spec"]
    spec["volumes"].append({"name": "witness", "hostPath": {"path": _RECORD}})
    spec["containers"][0]["volumeMounts"].append({"name": "witness", "mountPath": "/witness"})
    return pod


def _wait_for_words(node: VirtualNode, boots: Sequence[str]) -> None:
    """Wait for a word in the last boot, and check all words ever said."""

    def look() -> bool:
        return any(said["kernel"] == boots[-1] for said in _words(node))

    wait_for(look, _PATIENCE_S, every_s=1, why="no engine came back")
    for said in _words(node):
        assert said["kernel"] in boots
        assert said["handoff"] == said["kernel"], "an engine passed on another boot's handoff"
        assert said["resident"], "an engine passed on memory that is not there"
        assert said["zero"], "an engine got what another one had written"


def _words(node: VirtualNode) -> list[JsonObject]:
    return [json.loads(line) for line in node.run(f"cat {_RECORD}/record 2>&-; true").splitlines()]


def _wait_closed(cluster: ControlPlane, node: VirtualNode) -> None:
    """The first Node update that shows the new boot is answered by closing."""

    def is_told() -> bool:
        info = cluster.api.get(f"/api/v1/nodes/{NODE}")["status"]["nodeInfo"]
        return bool(info["bootID"] == node.guest.boot_id)

    wait_for(is_told, _PATIENCE_S, every_s=0.2, why="kubelet never told of the new boot")
    wait_for(
        lambda: is_tainted(cluster) and condition(cluster)["status"] == "False",
        10,
        why="a node that rebooted was not closed",
    )


def _closings(operator: OperatorProcess) -> float:
    return operator.metric("hostprep_operator_closings_total", cause="reboot")
