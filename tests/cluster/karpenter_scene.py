"""A cluster with Karpenter, the chart's rights and our operator's process; a test plays kubelet
and agent of the nodes that Karpenter makes.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from hostprep.api.node_resource import NodeStatus, Phase, PoolStatus, entries_of
from testbed import karpenter
from testbed.api import STRATEGIC_PATCH, Api
from testbed.chart import IMAGE
from testbed.control_plane import ControlPlane
from testbed.credentials import service_account_token
from testbed.nodes import reboot_node
from testbed.processes import Child, wait_for
from tests.cluster.charts import CHART, NAMESPACE, RELEASE

JsonObject = dict[str, Any]
EXAMPLE = Path(__file__).parents[2] / "examples" / "karpenter.yaml"
POOLS = "/apis/hostprep.dev/v1beta1/hostmemorypools"
HMNS = "/apis/hostprep.dev/v1alpha1/hostmemorynodes"
CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
NODE_POOLS = "/apis/karpenter.sh/v1/nodepools"
NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/default/pods"
DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/engine"
_SOON_S = 30.0


@contextmanager
def scene() -> Iterator[Scene]:
    """Everything but the operator; raises NotReadyError when a program is not built."""
    with ControlPlane(controllers=True, scheduler=True) as cluster:
        cluster.helm(
            *("install", RELEASE, str(CHART), "--no-hooks", *IMAGE),
            *("--namespace", NAMESPACE, "--create-namespace"),
            *("--set", "autoscaler.profile=karpenter", "--set", "operator.agentLiveness=off"),
        )
        # The operator is a process of its own here; its Pod would make Karpenter create a node.
        cluster.kubectl("delete", "deployment", "--all", "-n", NAMESPACE)
        karpenter.install_crds(cluster)
        yield Scene(cluster, karpenter.start(cluster))


@dataclass(frozen=True, slots=True)
class Scene:
    """The cluster, and everybody who acts on it."""

    cluster: ControlPlane
    karpenter: Child

    @property
    def api(self) -> Api:
        """The administrator's client."""
        return self.cluster.api

    @contextmanager
    def example(
        self,
        *,
        reclose: str = "Taint",
        disruption: JsonObject | None = None,
        startup_taints: bool = True,
    ) -> Iterator[None]:
        """The objects of the example; afterwards all of them, and Karpenter's nodes, are gone.

        `disruption` replaces the NodePool's; without `startup_taints` it has none.
        """
        pool, node_pool, engine = yaml.safe_load_all(EXAMPLE.read_text())
        pool["spec"]["readiness"]["reclose"] = {"reboot": reclose}
        node_pool["spec"]["template"]["spec"]["nodeClassRef"] = karpenter.NODE_CLASS
        if not startup_taints:
            del node_pool["spec"]["template"]["spec"]["startupTaints"]
        node_pool["spec"]["disruption"] = disruption or node_pool["spec"]["disruption"]
        self.api.create(POOLS, pool)
        self.api.create(NODE_POOLS, node_pool)
        self.api.create(DEPLOYMENT.rpartition("/")[0], engine)
        try:
            yield
        finally:
            self._tidy(pool["metadata"]["name"], node_pool["metadata"]["name"])

    def _tidy(self, pool: str, node_pool: str) -> None:
        self.api.delete(DEPLOYMENT, propagationPolicy="Background")
        self.api.delete(f"{POOLS}/{pool}")

        def no_nodes() -> bool:
            for pod in self.pods():  # those being evicted too: no kubelet ends them
                self.api.delete(f"{PODS}/{pod['metadata']['name']}")
            for claim in self.claims():
                if "deletionTimestamp" not in claim["metadata"]:
                    self.api.delete(f"{CLAIMS}/{claim['metadata']['name']}")
            return not (self.pods() or self.claims() or self.nodes())

        wait_for(no_nodes, 60, every_s=0.2, why="Karpenter's nodes did not go")
        self.api.delete(f"{NODE_POOLS}/{node_pool}")

    @contextmanager
    def operator(self) -> Iterator[Child]:
        """`hostprep-operator run` with the chart's own ServiceAccount."""
        kubeconfig = self.cluster.token_kubeconfig(NAMESPACE, "hostprep-operator")
        command = [sys.executable, "-m", "hostprep_operator", "run", "--agent-liveness=off"]
        command += [f"--kubeconfig={kubeconfig}", f"--namespace={NAMESPACE}"]
        child = self.cluster.spawn("operator", [*command, "--listen=127.0.0.1:0"])
        try:
            yield child
        finally:
            assert child.stop() == 0, child.tail()

    def scale(self, replicas: int) -> None:
        """Ask for so many engines."""
        self.api.patch(DEPLOYMENT, {"spec": {"replicas": replicas}})

    def create_pod(
        self, name: str, *, cpu: str = "10m", selector: JsonObject | None = None, held: bool = False
    ) -> None:
        """An engine beside the Deployment's, for nodes with the labels `selector` as well; one
        that Karpenter may move.

        `held`: no scheduler binds it, whatever nodes there are, and Karpenter is told so.
        """
        spec = self.api.get(DEPLOYMENT)["spec"]["template"]["spec"]
        spec["containers"][0]["resources"]["requests"] = {"cpu": cpu, "memory": "16Mi"}
        spec["nodeSelector"] |= selector or {}
        spec["schedulerName"] = "nobody" if held else spec["schedulerName"]
        self.api.create(PODS, {"metadata": {"name": name}, "spec": spec})
        if held:
            said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            body = {"status": {"conditions": [said]}}
            self.api.patch(f"{PODS}/{name}/status", body, content_type=STRATEGIC_PATCH)

    def pods(self) -> list[JsonObject]:
        """All engines."""
        return self.items(PODS)

    def claims(self) -> list[JsonObject]:
        """Karpenter's NodeClaims, the oldest first."""
        return sorted(self.items(CLAIMS), key=lambda claim: claim["metadata"]["creationTimestamp"])

    def nodes(self) -> list[JsonObject]:
        """All nodes."""
        return self.items(NODES)

    def items(self, path: str) -> list[JsonObject]:
        """A list's objects."""
        found: list[JsonObject] = self.api.get(path)["items"]
        return found

    def events(self, reason: str) -> list[str]:
        """What events with that reason say of engines, nodes and NodeClaims there are now."""
        objects = [*self.pods(), *self.nodes(), *self.claims()]
        uids = {found["metadata"]["uid"] for found in objects}
        names = {found["metadata"]["name"] for found in objects}
        return [
            event["message"]
            for event in self.items("/api/v1/events")
            if event["reason"] == reason
            and (
                event["involvedObject"].get("uid") in uids
                or event["involvedObject"].get("name") in names
            )
        ]

    def node(self, name: str) -> JsonObject:
        """One node."""
        return self.api.get(f"{NODES}/{name}")

    def claim_of(self, node: str) -> JsonObject:
        """The NodeClaim of a node."""
        return next(c for c in self.claims() if c.get("status", {}).get("nodeName") == node)

    def node_made(self, *, besides: str = "") -> str:
        """Wait until Karpenter has made a node and registered it; return its name."""

        def registered() -> str:
            names = [claim.get("status", {}).get("nodeName", "") for claim in self.claims()]
            return next((name for name in names if name not in {"", besides}), "")

        return wait_for(registered, _SOON_S, why="Karpenter made no node")

    def kubelet_starts(self, node: str) -> None:
        """Say what kubelet says once the node is up."""
        condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "up"}
        info = {"bootID": str(uuid.uuid4())}
        body = {"status": {"conditions": [condition], "nodeInfo": info}}
        self.api.patch(f"{NODES}/{node}/status", body, content_type=STRATEGIC_PATCH)

    def add_taint(self, node: str, key: str) -> None:
        """Add a taint, effect NoSchedule, to a Node."""
        taint = {"key": key, "effect": "NoSchedule"}
        body = {"spec": {"taints": [taint]}}
        self.api.patch(f"{NODES}/{node}", body, content_type=STRATEGIC_PATCH)

    def kubelet_runs_pods(self, node: str) -> None:
        """Say what kubelet says once the pods of the node run."""
        for pod in self.pods():
            if pod["spec"].get("nodeName") == node:
                ready = {"type": "Ready", "status": "True"}
                body = {"status": {"phase": "Running", "conditions": [ready]}}
                path = f"{PODS}/{pod['metadata']['name']}/status"
                self.api.patch(path, body, content_type=STRATEGIC_PATCH)

    def reboot(self, node: str) -> None:
        """Kubelet comes back with another boot ID."""
        reboot_node(self.api, node)

    def agent_has_all_ready(self, node: str) -> None:
        """Wait for the operator's HostMemoryNode, and answer it as the agent of that node."""
        path = f"{HMNS}/{node}"
        wait_for(lambda: self.api.exists(path), _SOON_S, why="no HostMemoryNode")
        status = _all_ready(self.api.get(path), self.node(node)["status"]["nodeInfo"]["bootID"])
        token = service_account_token(self.api, NAMESPACE, "hostprep-agent", node=node)
        agent = Api(self.cluster.url, self.cluster.credentials.client_context(), token=token)
        agent.patch(f"{path}/status", {"status": status.to_json()})

    def wait_until(self, node: str, holds: Callable[[JsonObject], bool], why: str) -> JsonObject:
        """Wait until something holds for a Node; return it."""

        def look() -> JsonObject:
            found = self.node(node)
            return found if holds(found) else {}

        return wait_for(look, _SOON_S, why=why)

    def wait_until_open(self, node: str) -> JsonObject:
        """Wait until the operator says that the memory is ready, and no taint of ours is left."""

        def is_open(found: JsonObject) -> bool:
            said = condition(found, "hostprep.dev/HostMemoryReady").get("status")
            return said == "True" and CLUSTER_AUTOSCALER_TAINT not in taint_keys(found)

        return self.wait_until(node, is_open, "not opened")

    def wait_until_bound(self, pods: int = 1) -> set[str]:
        """Wait until the scheduler has bound so many engines; return their nodes."""

        def bound() -> list[str]:
            found = [pod["spec"].get("nodeName") for pod in self.pods()]
            return found if len(found) == pods and all(found) else []

        return set(wait_for(bound, _SOON_S, why="not bound"))


def _all_ready(document: JsonObject, boot_id: str) -> NodeStatus:
    generation = document["metadata"]["generation"]
    pools = tuple(
        PoolStatus(
            name=entry.name,
            uid=entry.uid,
            generation=entry.generation,
            phase=Phase.READY,
            reason="Ready",
            backing="HugeTLB2Mi",
            wanted_bytes=4 << 30,
            ready_bytes=4 << 30,
        )
        for entry in entries_of(document)
        if not entry.absent
    )
    return NodeStatus(observed_generation=generation, boot_id=boot_id, pools=pools)


def condition(found: JsonObject, kind: str) -> dict[str, str]:
    """A condition of any object's status; empty when it has none such."""
    conditions = found.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


def taint_keys(node: JsonObject) -> list[str]:
    """The keys of a Node's taints."""
    return [taint["key"] for taint in node["spec"].get("taints", [])]
