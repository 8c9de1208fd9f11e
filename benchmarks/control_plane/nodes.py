"""Node objects of the size that real ones have: 50 images, 30 labels, five conditions."""

from __future__ import annotations

import json
import time
from typing import Any

from kubernetes.aio.client import ApiException

from benchmarks.control_plane.api import MERGE, NODE_LEASES, NODES, STRATEGIC, Api, at_once
from hostprep.api.conditions import format_time
from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from hostprep.kube.client import micro_time

_MIB = 1 << 20


def name_of(index: int) -> str:
    """Return the name of the n-th node."""
    return f"node-{index:05d}"


def boot_id(name: str, boot: int = 0) -> str:
    """Return the boot id that a node has after so many reboots."""
    return f"{name}-boot-{boot}"


def node_body(index: int, *, pools: int = 3) -> dict[str, Any]:
    """Return a Node of about 15 KB that joins with our start-up taint and static pool labels."""
    name = name_of(index)
    labels = {f"topology.example.com/label-{n}": f"value-{n}-{index % 7}" for n in range(30)}
    labels |= {f"pool.hostprep.dev/pool-{n}": "true" for n in range(pools)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels | {"kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}]},
        "status": _status(name),
    }


def _status(name: str) -> dict[str, Any]:
    now = format_time(time.time())
    resources = {
        "cpu": "128",
        "memory": f"{2 << 20}Mi",
        "pods": "110",
        "hugepages-2Mi": f"{1 << 20}Mi",
    }
    return {
        "capacity": resources,
        "allocatable": resources | {"memory": f"{1 << 20}Mi", "hugepages-2Mi": "0"},
        "conditions": [_condition(kind, now) for kind in _CONDITIONS],
        "images": [_image(number) for number in range(50)],
        "nodeInfo": {
            "bootID": boot_id(name),
            "architecture": "amd64",
            "containerRuntimeVersion": "containerd://2.4.2",
            "kernelVersion": "6.18.0",
            "kubeProxyVersion": "",
            "kubeletVersion": "v1.36.3",
            "machineID": name,
            "operatingSystem": "linux",
            "osImage": "Linux",
            "systemUUID": name,
        },
    }


_CONDITIONS = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")


def _condition(kind: str, now: str) -> dict[str, str]:
    return {
        "type": kind,
        "status": "True" if kind == "Ready" else "False",
        "reason": f"Kubelet{kind}",
        "message": f"kubelet says that {kind} is as it should be",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }


def _image(number: int) -> dict[str, Any]:
    digest = f"{number:064x}"
    repository = f"registry.example.com/team-{number % 5}/application-{number}"
    return {
        "names": [f"{repository}@sha256:{digest}", f"{repository}:v1.{number}.0"],
        "sizeBytes": number * 37 * _MIB,
    }


async def make_nodes(api: Api, count: int) -> None:
    """Create that many nodes; a POST of a Node keeps its status."""

    async def make(index: int) -> None:
        await api.request("POST", NODES, node_body(index))

    await at_once(range(count), make)


async def remove_nodes(api: Api, count: int) -> None:
    """Delete them again."""

    async def remove(index: int) -> None:
        await api.request("DELETE", f"{NODES}/{name_of(index)}")

    await at_once(range(count), remove)


async def heartbeat(api: Api, index: int) -> None:
    """Update the node's status as kubelet does every few minutes."""
    now = format_time(time.time())
    beat = {"type": "Ready", "lastHeartbeatTime": now}
    patch = {"status": {"conditions": [beat]}}
    await api.request(
        "PATCH",
        f"{NODES}/{name_of(index)}/status",
        patch,
        content_type=STRATEGIC,
    )


async def renew_lease(api: Api, index: int) -> None:
    """Renew the node's Lease as kubelet does every ten seconds; the first time, create it."""
    name = name_of(index)
    spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": micro_time()}
    try:
        await api.request("PATCH", f"{NODE_LEASES}/{name}", {"spec": spec}, content_type=MERGE)
    except ApiException as error:
        if error.status != 404:
            raise
        body = {"metadata": {"name": name}, "spec": spec}
        await api.request("POST", NODE_LEASES, body)


async def reboot(api: Api, index: int, boot: int) -> None:
    """Have the node show another boot id, as kubelet does after a reboot."""
    patch = {"status": {"nodeInfo": {"bootID": boot_id(name_of(index), boot)}}}
    await api.request("PATCH", f"{NODES}/{name_of(index)}/status", patch, content_type=MERGE)


if __name__ == "__main__":
    print(len(json.dumps(node_body(1))), "bytes a node")
