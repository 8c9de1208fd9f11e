"""Regions handed out by a real kubelet, to pods of a namespace that enforces `restricted`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testbed.control_plane import ControlPlane
from testbed.engine_pods import EXAMPLES, documents
from testbed.node import NODE, VirtualNode
from testbed.node_scene import condition
from testbed.processes import wait_for
from tests.node.node_pools import delete_pool

pytestmark = [pytest.mark.node, pytest.mark.timeout(900)]

JsonObject = dict[str, Any]
Kubectl = Callable[..., str]
NAMESPACE = "engines-restricted"
POOL = "kvd"
RESOURCE = f"hostprep.dev/{POOL}"
_SECONDS = 240.0


class Devices:
    """The example's pool and Deployment, on the one node."""

    def __init__(self, kubectl: Kubectl, node: VirtualNode) -> None:
        self.kubectl = kubectl
        self.node = node

    def count(self, kind: str = "allocatable") -> int:
        """How many regions kubelet says that it has."""
        return int(self.node.read()["status"][kind].get(RESOURCE, "-1"))

    def wait_count(self, count: int) -> None:
        try:
            self.wait_for(lambda: self.count() == count, f"kubelet does not offer {count}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.agent_log()}") from error

    def wait_for(self, look: Callable[[], object], why: str) -> None:
        wait_for(look, _SECONDS, every_s=0.5, why=why)

    def pods(self) -> list[JsonObject]:
        """The engine's pods that are neither failed nor on their way out."""
        text = self.kubectl("-n", NAMESPACE, "get", "pods", "-l", "app=engine", "-o", "json")
        return [
            pod
            for pod in json.loads(text)["items"]
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] != "Failed"
        ]

    def failed(self) -> list[JsonObject]:
        text = self.kubectl("-n", NAMESPACE, "get", "pods", "-l", "app=engine", "-o", "json")
        return [pod for pod in json.loads(text)["items"] if pod["status"]["phase"] == "Failed"]

    def log(self, pod: str) -> str:
        try:
            return self.kubectl("-n", NAMESPACE, "logs", pod)
        except subprocess.CalledProcessError:
            return ""

    def wait_mapped(self, count: int = 1, *, apart_from: set[str] | None = None) -> dict[str, str]:
        """Wait until that many engines have a region; return the regions by pod."""

        def look() -> dict[str, str] | None:
            names = {pod["metadata"]["name"] for pod in self.pods()} - (apart_from or set())
            logs = {name: self.log(name) for name in names}
            mapped = {n: log.split("region ")[1].split()[0] for n, log in logs.items() if log}
            return mapped if len(mapped) == len(names) == count else None

        try:
            return wait_for(look, _SECONDS, every_s=0.5, why=f"no {count} engines")
        except AssertionError as error:
            pods = self.kubectl("-n", NAMESPACE, "describe", "pods")
            raise AssertionError(f"{error}\n{pods}\n{self.agent_log()}") from error

    def agent_log(self) -> str:
        """Its last lines; empty while kubelet, which has them, is away."""
        agent = ("-n", "hostprep-system", "logs", "daemonset/hostprep-agent", "--tail=60")
        try:
            return self.kubectl(*agent)
        except subprocess.CalledProcessError:
            return ""

    def registrations(self) -> int:
        """How often the present agent has told a kubelet of the pool."""
        return self.agent_log().count("device_plugin_registered")

    def states(self) -> list[str]:
        text = self.kubectl("get", "hmn", NODE, "-o", "json")
        pools = json.loads(text)["status"]["pools"]
        return [r["state"] for pool in pools if pool["name"] == POOL for r in pool["regions"]]


@pytest.fixture(scope="module")
def devices(kubectl: Kubectl, chart: None, node: VirtualNode) -> Iterator[Devices]:
    kubectl("label", "node", NODE, f"pool.hostprep.dev/{POOL}=true")
    kubectl("apply", "-f", str(EXAMPLES / "engine-device-plugin.yaml"))
    there = Devices(kubectl, node)
    yield there
    delete_pool(kubectl, POOL)
    kubectl("delete", "-f", str(EXAMPLES / "engine-device-plugin.yaml"), "--ignore-not-found")
    there.wait_for(
        lambda: not node.run(f"ls /run/hostprep | grep -x {POOL} || true").strip(),
        "the pool was not released",
    )
    kubectl("label", "node", NODE, f"pool.hostprep.dev/{POOL}-")


def test_the_example_runs_as_it_stands(devices: Devices, cluster: ControlPlane) -> None:
    namespace, *_ = documents("engine-device-plugin.yaml")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    devices.wait_count(2)
    ((pod, region),) = devices.wait_mapped().items()
    print(f"\n{devices.log(pod).strip()}")
    wait_for(
        lambda: sorted(devices.states()) == ["Free", "Leased"],
        _SECONDS,
        why=f"{region} is not seen to be leased",
    )
    assert condition(cluster)["status"] == "True"


def test_the_same_namespace_refuses_host_paths(devices: Devices) -> None:
    pod = devices.pods()[0]["spec"]["containers"][0]
    spec = {
        "containers": [{"name": "x", "image": pod["image"], "securityContext": {}}],
        "volumes": [{"name": "x", "hostPath": {"path": "/run/hostprep"}}],
    }
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        devices.kubectl("-n", NAMESPACE, "create", "-f", "-", stdin=json.dumps(document))
    assert "hostPath" in refused.value.stderr


def test_each_replica_has_a_region_of_its_own(devices: Devices) -> None:
    devices.kubectl("-n", NAMESPACE, "scale", "deployment/engine", "--replicas=2")
    assert sorted(devices.wait_mapped(2).values()) == ["node0-0", "node1-0"]
    devices.kubectl("-n", NAMESPACE, "scale", "deployment/engine", "--replicas=1")
    devices.wait_mapped(1)


def test_a_container_sees_its_region_and_nothing_else_of_the_pool(devices: Devices) -> None:
    ((pod, region),) = devices.wait_mapped().items()
    listed = devices.kubectl(
        *("-n", NAMESPACE, "exec", pod, "--", "sh", "-c"),
        "cd /run/hostprep; find . -type f | sort; id; env | grep HOSTPREP_REGION=",
    )
    lines = listed.split("\n")
    assert [line for line in lines if line.startswith("./")] == [
        "./hostprep.pyz",
        f"./{POOL}/claim.lock",
        f"./{POOL}/handoff.json",
        f"./{POOL}/mem/{region}",
        f"./{POOL}/state/{region}/lease",
        f"./{POOL}/state/{region}/users",
        "./turnstile/node/slot0",
    ]
    assert "uid=1000" in listed
    assert f"HOSTPREP_REGION={region}" in lines


def test_a_roll_out_hands_clean_regions_on(devices: Devices) -> None:
    """The engine itself asserts that it finds zeros."""
    before = devices.wait_mapped()
    devices.kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/engine")
    after = devices.wait_mapped(apart_from=set(before))
    assert not set(before) & set(after)
    devices.wait_count(2)
    print(f"\npods that kubelet failed meanwhile: {len(devices.failed())}")


def test_kubelet_restarts_and_is_told_again(devices: Devices, node: VirtualNode) -> None:
    ((pod, _),) = devices.wait_mapped().items()
    before = devices.registrations()
    assert before
    node.run("systemctl restart kubelet")
    devices.wait_for(lambda: devices.registrations() > before, "kubelet was not told again")
    devices.wait_count(2)
    (there,) = devices.pods()
    assert there["metadata"]["name"] == pod, "the engine was not to notice"
    assert all(s["restartCount"] == 0 for s in there["status"]["containerStatuses"])


@pytest.mark.long
def test_an_agent_that_is_replaced_registers_again(devices: Devices) -> None:
    ((pod, _),) = devices.wait_mapped().items()
    devices.kubectl("-n", "hostprep-system", "rollout", "restart", "daemonset/hostprep-agent")
    devices.kubectl(
        *("-n", "hostprep-system", "rollout", "status", "daemonset/hostprep-agent"),
        f"--timeout={_SECONDS:.0f}s",
    )
    devices.wait_count(2)
    (there,) = devices.pods()
    assert there["metadata"]["name"] == pod, "the engine was not to notice"


@pytest.mark.long
def test_a_reboot_fails_the_pod_for_good_and_its_replacement_runs(
    devices: Devices, node: VirtualNode, cluster: ControlPlane
) -> None:
    before = devices.wait_mapped()
    node.reboot()
    node.wait_ready()
    after = devices.wait_mapped(apart_from=set(before))
    reasons = {pod["status"].get("reason") for pod in devices.failed()}
    print(f"\nfailed after the reboot: {len(devices.failed())}, {reasons}; runs: {after}")
    assert "UnexpectedAdmissionError" in reasons
    devices.wait_count(2)
    wait_for(lambda: condition(cluster).get("status") == "True", _SECONDS)
