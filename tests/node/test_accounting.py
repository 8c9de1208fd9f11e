"""What the scheduler knows of the pools' memory, set up in four ways on the real kubelet.

With `pytest -s` it prints the rows of the table in docs/accounting.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hostprep_operator.records import resources_of
from testbed.chart import NAMESPACE, RELEASE
from testbed.control_plane import ControlPlane
from testbed.node import NODE, VirtualNode
from testbed.node_scene import KV, apply, condition, wait_open
from testbed.operator_process import HMNS
from testbed.processes import wait_for
from tests.node.node_pools import delete_pool

pytestmark = pytest.mark.node
JsonObject = dict[str, Any]
_HELD = 128 << 20
_MIB = 1 << 20


@pytest.fixture(scope="module")
def usual(cluster: ControlPlane, node: VirtualNode, kv: JsonObject) -> Iterator[dict[str, int]]:
    """What kubelet offers when it started beside no huge pages at all; then pool kv, as ever.

    Whatever a test does in between, what comes after finds pool kv open.
    """
    _release(cluster)
    node.restart_kubelet()
    _wait_allocatable(cluster, "hugepages-2Mi", 0)
    offered = _allocatable(cluster)
    _print_row("none", "nothing", offered)
    apply(cluster, KV)
    wait_open(cluster, node)
    yield offered
    apply(cluster, KV)
    wait_open(cluster, node)


def test_pages_made_after_kubelets_start_are_not_in_its_books(
    cluster: ControlPlane, usual: dict[str, int]
) -> None:
    _wait_accounts(cluster, "after kubelet's start", "nothing", memory="False", pages="True")
    assert _allocatable(cluster) == usual


def test_what_is_set_aside_for_the_system_covers_them(
    cluster: ControlPlane, node: VirtualNode, usual: dict[str, int]
) -> None:
    _release(cluster)
    _set_aside(node, '{"memory": "128Mi"}')
    _wait_allocatable(cluster, "memory", usual["memory"] - _HELD)
    apply(cluster, KV)
    wait_open(cluster, node)
    told = "`systemReserved: {memory: 128Mi}`"
    _wait_accounts(cluster, "after kubelet's start", told, memory="True", pages="True")


def test_pages_from_before_kubelets_start_are_offered_until_a_placeholder_asks_for_them(
    cluster: ControlPlane, node: VirtualNode, usual: dict[str, int]
) -> None:
    apply(cluster, KV)
    wait_open(cluster, node)
    _set_aside(node, "")  # one restart for the end of the test before and this one's beginning
    _wait_allocatable(cluster, "hugepages-2Mi", _HELD)
    _wait_allocatable(cluster, "memory", usual["memory"] - _HELD)
    _wait_accounts(cluster, "before kubelet's start", "nothing", memory="True", pages="False")
    _upgrade(cluster, "--set", "agent.resources.limits.hugepages-2Mi=128Mi")
    try:
        told = "a placeholder: the agent's Pod asks for 128 MiB of `hugepages-2Mi`"
        _wait_accounts(cluster, "before kubelet's start", told, memory="True", pages="True")
    finally:
        _upgrade(cluster, "--set", "agent.resources.limits.hugepages-2Mi=null")


def _release(cluster: ControlPlane) -> None:
    delete_pool(cluster.kubectl, "kv")
    wait_for(lambda: not cluster.api.exists(f"{HMNS}/{NODE}"), 90, why="kv was not released")


def _set_aside(node: VirtualNode, memory: str) -> None:
    """Change systemReserved in kubelet's configuration and restart it, as an administrator does."""
    file = "/etc/kubernetes/kubelet.yaml"
    node.run(f"sed -i '/^ \"systemReserved/d' {file}")
    if memory:
        node.run(f"sed -i '1a\\ \"systemReserved\": {memory},' {file}")
    node.restart_kubelet()


def _upgrade(cluster: ControlPlane, *arguments: str) -> None:
    chart = ("upgrade", RELEASE, "charts/hostprep", "--namespace", NAMESPACE)
    cluster.helm(*chart, "--reset-then-reuse-values", *arguments)
    rollout = ("-n", NAMESPACE, "rollout", "status", "daemonset/hostprep-agent", "--timeout=110s")
    wait_for(lambda: cluster.kubectl(*rollout), 300, why="the agent did not come back")


def _allocatable(cluster: ControlPlane) -> dict[str, int]:
    return resources_of(cluster.api.get(f"/api/v1/nodes/{NODE}")["status"]["allocatable"])


def _wait_allocatable(cluster: ControlPlane, name: str, size_bytes: int) -> None:
    def is_so() -> bool:
        return abs(_allocatable(cluster)[name] - size_bytes) <= _MIB

    wait_for(is_so, 180, every_s=0.5, why=f"kubelet never offered {size_bytes} of {name}")


def _wait_accounts(cluster: ControlPlane, when: str, told: str, *, memory: str, pages: str) -> None:
    kinds = ("MemoryAccounted", "HugePagesAccounted")

    def look() -> bool:
        return [condition(cluster, kind)["status"] for kind in kinds] == [memory, pages]

    wait_for(look, 120, every_s=0.5, why=f"{when}, {told}: never {memory} and {pages}")
    _print_row(when, told, _allocatable(cluster), memory, pages)


def _print_row(
    when: str, told: str, offered: dict[str, int], memory: str = "", pages: str = ""
) -> None:
    sizes = [f"{offered[name] // _MIB} MiB" for name in ("memory", "hugepages-2Mi")]
    print("\n|", " | ".join([when, told, *sizes, memory, pages]), "|")
