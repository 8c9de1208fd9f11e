"""A cluster in trouble, watched by a real Prometheus.

Three nodes that pool `kv` selects: `here` has the real agent and real memory, `rebooted` gets its
status from the test and boots again, `silent` has no agent and a taint that stays. A second pool,
`vast`, selects `here` alone and is too large for any machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.api.names import API_VERSION, CLUSTER_AUTOSCALER_TAINT, POOL_KIND
from hostprep.api.node_resource import NodeStatus, Phase, PoolStatus, entries_of
from hostprep.backing import MIB
from hostprep.client.attach import attach
from hostprep.client.kept import WarmReport, write_warm_report
from hostprep.client.owner import Owner
from hostprep.errors import NotReadyError
from hostprep.node.apply.service import Node
from hostprep.node.observe.pools import observe_pools
from hostprep.paths import PoolPaths
from testbed.api import MERGE_PATCH
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object, reboot_node
from testbed.processes import Child, wait_for
from tests.cluster.charts import NAMESPACE, render
from tests.cluster.prometheus import Prometheus, Target, free_address
from tests.support.observability import AGENT_JOB, OPERATOR_JOB, RULES

SILENT = "silent"
WARM = "chat"
POOL_BYTES = 32 * MIB
_HERE, _REBOOTED = "here", "rebooted"
_POOLS = "/apis/hostprep.dev/v1alpha1/hostmemorypools"
_HMNS = "/apis/hostprep.dev/v1alpha1/hostmemorynodes"
_NEEDED = (
    "Namespace",
    "CustomResourceDefinition",
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
)
_TAINT = {"key": CLUSTER_AUTOSCALER_TAINT, "value": "pending", "effect": "NoSchedule"}


@dataclass(frozen=True, slots=True)
class Observed:
    """The cluster and who watches it."""

    cluster: ControlPlane
    prometheus: Prometheus
    agent: Child
    operator: Child


@contextmanager
def observed_cluster() -> Iterator[Observed]:
    """Start everything, and wait until each trouble is there to be seen."""
    if os.geteuid() != 0:
        pytest.skip("needs root: the agent mounts real memory")
    try:
        cluster = ControlPlane()
    except NotReadyError as error:
        pytest.skip(str(error))
    folder = tempfile.mkdtemp(prefix="hostprep-test-", dir="/dev/shm")
    try:
        with cluster:
            yield _troubled(cluster, folder)
    finally:
        left = [pool.name for pool in observe_pools(f"{folder}/root")]
        Node(f"{folder}/root").release(left, force=True)
        shutil.rmtree(folder, ignore_errors=True)


def _troubled(cluster: ControlPlane, folder: str) -> Observed:
    _install(cluster)
    _make_pools(cluster)
    _make_nodes(cluster)
    agent_address, operator_address = free_address(), free_address()
    prometheus = Prometheus(
        cluster,
        [
            Target(AGENT_JOB, agent_address, {"node": _HERE}),
            Target(OPERATOR_JOB, operator_address, {}),
        ],
        [RULES],
    )
    operator = _start_operator(cluster, operator_address)
    wait_for(lambda: prometheus.value(f'up{{job="{OPERATOR_JOB}"}}') == 1, 30, why="no operator")
    agent = _start_agent(cluster, agent_address, folder)
    _answer_as_agent(cluster, _REBOOTED)
    _wait_open(cluster, _REBOOTED)
    _wait_open(cluster, _HERE)
    _restart_warm(cluster, prometheus, f"{folder}/root")
    wait_for(
        lambda: prometheus.value("hostprep_operator_openings_total") == 2, 10, why="not scraped"
    )
    reboot_node(cluster.api, _REBOOTED)
    reboots = "hostprep_operator_reboots_detected_total"
    wait_for(lambda: prometheus.value(reboots) == 1, 20, why="no reboot seen")
    failed = 'hostprep_operator_pool_nodes{pool="vast",state="failed"}'
    wait_for(lambda: prometheus.value(failed) == 1, 20, why="no failed node seen")
    return Observed(cluster, prometheus, agent, operator)


def _install(cluster: ControlPlane) -> None:
    """What the chart makes, but for what needs controllers: identities, rights and resources."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    documents = [namespace, *(item for item in render() if item["kind"] in _NEEDED)]
    documents.sort(key=lambda item: _NEEDED.index(item["kind"]))
    text = yaml.safe_dump_all(documents)
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")


def _make_pools(cluster: ControlPlane) -> None:
    common = {"backings": ["Base"], "regions": 1}
    kv = {**common, "size": "32Mi", "nodeSelector": {"pool.hostprep.dev/kv": "true"}}
    vast = {
        **common,
        "size": "100Ti",
        "nodeSelector": {"pool.hostprep.dev/vast": "true"},
        "readiness": {"required": False},
    }
    for name, spec in (("kv", kv), ("vast", vast)):
        body = {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": {"name": name}}
        cluster.api.create(_POOLS, {**body, "spec": spec})


def _make_nodes(cluster: ControlPlane) -> None:
    kv, vast = {"pool.hostprep.dev/kv": "true"}, {"pool.hostprep.dev/vast": "true"}
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    create_node(cluster.api, node_object(_HERE, labels=kv | vast, boot_id=boot_id))
    create_node(cluster.api, node_object(_REBOOTED, labels=kv))
    create_node(cluster.api, node_object(SILENT, labels=kv, taints=[_TAINT]))


def _start_operator(cluster: ControlPlane, listen: str) -> Child:
    kubeconfig = cluster.token_kubeconfig(NAMESPACE, "hostprep-operator")
    command = [sys.executable, "-m", "hostprep_operator", "run", "--agent-liveness=off"]
    command += [f"--namespace={NAMESPACE}", f"--listen={listen}", f"--kubeconfig={kubeconfig}"]
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{root}:{root / 'operator'}"}
    return cluster.spawn("operator", command, environ=environ)


def _start_agent(cluster: ControlPlane, listen: str, folder: str) -> Child:
    kubeconfig = cluster.token_kubeconfig(NAMESPACE, "hostprep-agent", node=_HERE)
    command = [sys.executable, "-m", "hostprep", "agent", f"--root={folder}/root"]
    command += [f"--node-name={_HERE}", f"--listen={listen}", f"--kubeconfig={kubeconfig}"]
    command += [f"--state-dir={folder}/state", "--verify-interval=1", "--allow-cgroup-v1"]
    return cluster.spawn("agent", command)


def _restart_warm(cluster: ControlPlane, prometheus: Prometheus, root: str) -> None:
    """Be an engine that keeps contents and may not use what was kept; then forget them."""
    with attach("kv", owner=Owner("a-secret-of-the-engine", name=WARM), root=root) as memory:
        report = WarmReport(
            at_s=time.time(), kept_blocks=5, recovered_blocks=3, refused={"weights": ("/a", "/b")}
        )
        write_warm_report(PoolPaths(root, "kv"), memory.region.name, WARM, report)
    refused = 'hostprep_recovery_refusals_total{pool="kv",field="weights"}'
    wait_for(lambda: prometheus.value(refused) == 1, 20, why="no refusal seen")
    wait_for(
        lambda: _region(cluster).get("kept", {}).get("refused") == ["weights"],
        20,
        why="no refusal reported",
    )
    wait_for(lambda: prometheus.value("hostprep_kept_blocks") == 5, 10, why="no blocks seen")
    subprocess.run([sys.executable, "-m", "hostprep", "purge", "kv", "--root", root], check=True)
    gone = 'hostprep_kept_given_up_total{pool="kv",reason="Other"}'
    wait_for(lambda: prometheus.value(gone) == 1, 20, why="not seen as given up")
    wait_for(lambda: _region(cluster).get("state") == "Free", 20, why="not scrubbed")


def _region(cluster: ControlPlane) -> dict[str, Any]:
    pools = _hmn(cluster, _HERE)["status"]["pools"]
    found: dict[str, Any] = next(pool for pool in pools if pool["name"] == "kv")["regions"][0]
    return found


def _hmn(cluster: ControlPlane, node: str) -> dict[str, Any]:
    return cluster.api.get(f"{_HMNS}/{node}")


def _answer_as_agent(cluster: ControlPlane, node: str) -> None:
    """Say, in place of its agent, that the node holds all that it must hold."""
    document = wait_for(lambda: _hmn(cluster, node), 20, why=f"no HostMemoryNode {node}")
    boot_id = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["nodeInfo"]["bootID"]
    pools = tuple(
        PoolStatus(
            name=entry.name,
            uid=entry.uid,
            generation=entry.generation,
            phase=Phase.READY,
            reason="Ready",
            backing="Base",
            wanted_bytes=POOL_BYTES,
            ready_bytes=POOL_BYTES,
            handoff_generation=1,
        )
        for entry in entries_of(document)
    )
    status = NodeStatus(
        observed_generation=document["metadata"]["generation"],
        boot_id=boot_id,
        agent_version="test",
        summary="kv ready",
        pools=pools,
    )
    body = {"status": status.to_json()}
    cluster.api.patch(f"{_HMNS}/{node}/status", body, content_type=MERGE_PATCH)


def _wait_open(cluster: ControlPlane, node: str) -> None:
    path = f"/api/v1/nodes/{node}"
    is_ready: Callable[[], bool] = lambda: any(  # noqa: E731
        condition["type"] == "hostprep.dev/HostMemoryReady" and condition["status"] == "True"
        for condition in cluster.api.get(path)["status"]["conditions"]
    )
    wait_for(is_ready, 30, why=f"{node} was not opened")
