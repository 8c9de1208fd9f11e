"""Node objects as kubelets make them, for nodes that are not there."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from testbed.api import STRATEGIC_PATCH, Api

JsonObject = dict[str, Any]
_CAPACITY = {"cpu": "32", "memory": "256Gi", "pods": "110"}


def node_object(
    name: str,
    *,
    labels: Mapping[str, str] | None = None,
    taints: Sequence[Mapping[str, str]] = (),
    boot_id: str | None = None,
    ready: bool = True,
    capacity: Mapping[str, str] | None = None,
) -> JsonObject:
    """A Node as its kubelet registers it; `boot_id` is random unless given.

    `capacity` comes on top of 32 CPUs, 256Gi and 110 pods, and is allocatable as well.
    """
    resources = {**_CAPACITY, **(capacity or {})}
    system = {"architecture": "amd64", "operatingSystem": "linux", "kernelVersion": "6.12.0"}
    names = ("containerRuntimeVersion", "kubeletVersion", "kubeProxyVersion", "osImage")
    system |= dict.fromkeys((*names, "machineID", "systemUUID"), "simulated")
    condition = {
        "type": "Ready",
        "status": "True" if ready else "False",
        "reason": "KubeletReady" if ready else "KubeletNotReady",
        "message": "simulated",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name[:63], **(labels or {})},
        },
        "spec": {"taints": [dict(taint) for taint in taints]},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [condition],
            "nodeInfo": {**system, "bootID": boot_id or str(uuid.uuid4())},
        },
    }


def this_machine(name: str, *, labels: Mapping[str, str] | None = None) -> JsonObject:
    """A Node for the machine that this runs on, with its boot id and memory, and our taint."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    total_kib = Path("/proc/meminfo").read_text(encoding="ascii").split()[1]
    node = node_object(
        name,
        labels=labels,
        taints=[{"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}],
        boot_id=boot_id,
        capacity={"cpu": str(os.cpu_count()), "memory": f"{total_kib}Ki"},
    )
    # As a kubelet with system-reserved does: what it keeps back, the pools may have.
    kept = {"memory": f"{int(total_kib) // 2}Ki"}
    node["status"]["allocatable"] = node["status"]["capacity"] | kept
    return node


def create_node(api: Api, node: JsonObject) -> JsonObject:
    """Create a Node with exactly its taints; return it as the server has it.

    Admission taints every new Node as not ready; with no controller manager nobody would ever
    take that taint off again.
    """
    created = api.create("/api/v1/nodes", node)
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in _conditions(node))
    if ready and created["spec"].get("taints", []) != node["spec"]["taints"]:
        body = {"spec": {"taints": node["spec"]["taints"] or None}}
        created = api.patch(f"/api/v1/nodes/{node['metadata']['name']}", body)
    return created


def reboot_node(api: Api, name: str, boot_id: str | None = None) -> JsonObject:
    """The node comes back with another boot ID, as its kubelet reports it; return the Node."""
    body = {"status": {"nodeInfo": {"bootID": boot_id or str(uuid.uuid4())}}}
    return api.patch(f"/api/v1/nodes/{name}/status", body, content_type=STRATEGIC_PATCH)


def _conditions(node: JsonObject) -> list[dict[str, str]]:
    found: list[dict[str, str]] = node["status"]["conditions"]
    return found
