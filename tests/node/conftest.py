"""A real node in a virtual machine, booted once for all tests of tier `node`.

Emulated, it is some twenty times slower than this machine: one at a time, time-outs to match, and
nothing of its speed is ever asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hostprep.errors import HostprepError
from testbed.chart import NAMESPACE, RELEASE, install_chart, wait_for_chart
from testbed.control_plane import ControlPlane
from testbed.node import NodeParts, NodeSettings, VirtualNode, build_node_parts
from testbed.node_scene import KV, POOL_LABEL, apply, wait_open
from testbed.virtual_machine import Hardware, virtual_machine_lock

JsonObject = dict[str, Any]
# First what needs no node or has one of its own, so that none runs beside it; then the story, since
# it begins with an empty cluster; last what reboots or takes things away.
_ORDER = (
    "test_image_command",
    "test_lanes",
    "test_story",
    "test_engine_pods",
    "test_device_plugin",
    "test_bad_input",
)
# Bad pages stay in the kernel's books until a reboot, and so does a policy of SELinux in the
# kernel: after the accounts, and before that.
_LAST = (
    "test_upgrade",
    "test_warm",
    "test_accounting",
    "test_bad_pages",
    "test_selinux",
    "test_reboot",
    "test_uninstall",
)

_TEST_SECONDS = 1200
"""Against hangs only: the first test waits for the machine and the chart as well."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One node serves all: the order is part of the tests."""

    def rank(item: pytest.Item) -> int:
        module = item.path.stem
        if module in _ORDER:
            return _ORDER.index(module)
        return len(_ORDER) + 1 + (_LAST.index(module) if module in _LAST else -1)

    ours = [item for item in items if item.get_closest_marker("node")]
    ours.sort(key=rank)
    for item in ours:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS))
    others = [item for item in items if not item.get_closest_marker("node")]
    items[:] = [*others, *ours]


@pytest.fixture(scope="session")
def parts() -> NodeParts:
    """QEMU and the disks; a test is skipped with what is missing, which CI makes a failure."""
    try:
        return build_node_parts(lambda line: print(f"testbed: {line}"))
    except HostprepError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster(parts: NodeParts) -> Iterator[ControlPlane]:
    """Etcd, API server, controller manager and scheduler, on this machine."""
    with virtual_machine_lock(), ControlPlane(controllers=True, scheduler=True) as running:
        yield running


@pytest.fixture(scope="session")
def node(cluster: ControlPlane, parts: NodeParts) -> Iterator[VirtualNode]:
    """`node-a`, which registered with the start-up taint and the label of pool kv; Ready."""
    settings = NodeSettings(labels={POOL_LABEL: "true"})
    # Without a policy, which only test_selinux.py loads, it allows everything.
    hardware = Hardware(append="security=selinux")
    with parts.node(cluster, settings=settings, hardware=hardware) as machine:
        machine.wait_ready()
        yield machine


@pytest.fixture(scope="session")
def kubectl(cluster: ControlPlane) -> Callable[..., str]:
    """`kubectl("get", "nodes")`; keyword arguments `kubeconfig` and `stdin`."""
    return cluster.kubectl


@pytest.fixture(scope="session")
def chart(cluster: ControlPlane, node: VirtualNode) -> None:
    """The chart, its pods Ready; the story may have installed it before."""
    if RELEASE not in cluster.helm("list", "--short", "--namespace", NAMESPACE):
        install_chart(cluster)
    wait_for_chart(cluster)


@pytest.fixture(scope="session")
def kv(cluster: ControlPlane, chart: None, node: VirtualNode) -> JsonObject:
    """Pool kv, Ready, and the node open."""
    apply(cluster, KV)
    wait_open(cluster, node)
    return KV
