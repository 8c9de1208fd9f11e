"""A reboot and a power cut, the operator elsewhere: nobody passes on unverified memory.

`python -m benchmarks.reboots` does ten of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.operator_process import OperatorProcess
from tests.support.reboots import go_through
from tests.testbed.chart import NAMESPACE
from tests.testbed.control_plane import ControlPlane
from tests.testbed.node import VirtualNode

pytestmark = pytest.mark.node


@pytest.fixture
def operator(cluster: ControlPlane, kv: dict[str, Any]) -> Iterator[OperatorProcess]:
    """The operator on this machine instead of on the node that reboots."""
    scale = ("-n", NAMESPACE, "scale", "deployment/hostprep-operator")
    cluster.kubectl(*scale, "--replicas=0")
    running = OperatorProcess(cluster, f"--namespace={NAMESPACE}")
    running.wait_ready(60)
    yield running
    running.child.stop()
    cluster.kubectl(*scale, "--replicas=1")


def test_after_a_reboot_nothing_passes_before_memory_is_verified(
    cluster: ControlPlane, node: VirtualNode, operator: OperatorProcess
) -> None:
    go_through(cluster, node, operator, [node.reboot, node.power_cut])
