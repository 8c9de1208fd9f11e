"""What the scheduler knows of the pools' memory, set up in four ways on the real kubelet.

With `pytest -s` it prints the rows of the table in docs/accounting.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.node_scene import KV, apply, condition, wait_open
from tests.support.operator_process import HMNS
from tests.support.waiting import wait_for
from tests.testbed.chart import NAMESPACE, RELEASE
from tests.testbed.control_plane import ControlPlane
from tests.testbed.node import NODE, VirtualNode

pytestmark = pytest.mark.node
JsonObject = dict[str, Any]
_HELD = 128 << 20
_MIB = 1 << 20


def test_pages_made_after_kubelets_start_are_not_in_its_books(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    _wait_accounts(cluster, memory="False", pages="True", how="after kubelet's start")
    assert _allocatable(cluster)["hugepages-2Mi"] == 0


@pytest.mark.long
def test_system_reserved_then_pages_before_kubelet_then_a_placeholder(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    usual = _allocatable(cluster)["memory"]
    cluster.kubectl("delete", "hmp", "kv")
    wait_for(lambda: not cluster.api.exists(f"{HMNS}/{NODE}"), 90, why="kv was not released")
    _set_kubelet(node, '"systemReserved": {"memory": "128Mi"}')
    _wait_allocatable(cluster, "memory", usual - _HELD)
    apply(cluster, KV)
    wait_open(cluster, node)
    _wait_accounts(cluster, memory="True", pages="True", how="after it, systemReserved 128Mi")
    # Kubelet starts again: now the pages were there before.
    _set_kubelet(node, '"systemReserved": {}')
    _wait_allocatable(cluster, "hugepages-2Mi", _HELD)
    _wait_allocatable(cluster, "memory", usual - _HELD)
    _wait_accounts(cluster, memory="True", pages="False", how="before kubelet's start")
    _upgrade(cluster, "--set", "agent.resources.limits.hugepages-2Mi=128Mi")
    _wait_accounts(cluster, memory="True", pages="True", how="before it, with a placeholder")
    _upgrade(cluster, "--set", "agent.resources.limits=null")


def _wait_allocatable(cluster: ControlPlane, name: str, size_bytes: int) -> None:
    def is_so() -> bool:
        return abs(_allocatable(cluster)[name] - size_bytes) <= _MIB

    wait_for(is_so, 180, every_s=0.5, why=f"kubelet never offered {size_bytes} of {name}")


def _set_kubelet(node: VirtualNode, setting: str) -> None:
    """Change one line of kubelet's configuration and restart it, as an administrator does."""
    file = "/etc/kubernetes/kubelet.yaml"
    key = setting.partition(":")[0]
    node.run(f"sed -i '/^ {key}/d' {file} && sed -i '1a\\ {setting},' {file}")
    node.run("systemctl restart kubelet")
    node.wait_ready()


def _upgrade(cluster: ControlPlane, *arguments: str) -> None:
    chart = ("upgrade", RELEASE, "charts/hostprep", "--namespace", NAMESPACE)
    cluster.helm(*chart, "--reset-then-reuse-values", *arguments)
    rollout = ("-n", NAMESPACE, "rollout", "status", "daemonset/hostprep-agent", "--timeout=110s")
    wait_for(lambda: cluster.kubectl(*rollout), 300, why="the agent did not come back")


def _allocatable(cluster: ControlPlane) -> dict[str, int]:
    from hostprep_operator.parsing import memory_of

    return memory_of(cluster.api.get(f"/api/v1/nodes/{NODE}")["status"]["allocatable"])


def _wait_accounts(cluster: ControlPlane, *, memory: str, pages: str, how: str) -> None:
    def look() -> bool:
        said = [
            condition(cluster, kind)["status"] for kind in ("MemoryAccounted", "HugePagesAccounted")
        ]
        return said == [memory, pages]

    wait_for(look, 120, every_s=0.5, why=f"{how}: never MemoryAccounted={memory}, pages {pages}")
    found = {name: size // _MIB for name, size in _allocatable(cluster).items()}
    print(f"{how}: allocatable {found} MiB, MemoryAccounted {memory}, HugePagesAccounted {pages}")
