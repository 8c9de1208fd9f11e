"""A reboot and a power cut: nobody passes on unverified memory, and pages are there before kubelet.

The operator runs elsewhere. `python -m benchmarks.reboots` does ten of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.chart import NAMESPACE, scale_operator
from testbed.control_plane import ControlPlane
from testbed.node import NODE, VirtualNode
from testbed.node_scene import apply, go_through, node_condition, pool_status
from testbed.operator_process import OperatorProcess
from testbed.processes import wait_for

pytestmark = pytest.mark.node

JsonObject = dict[str, Any]
_UNIT = "hostprep-boot.service"
_SCRIPT = "/etc/hostprep/kv.sh"


def _with(kv: JsonObject, **spec: Any) -> JsonObject:
    changed = copy.deepcopy(kv)
    changed["spec"] |= spec
    return changed


def _wait_unit(cluster: ControlPlane, words: str) -> None:
    def look() -> bool:
        found = node_condition(cluster, "BootUnit")
        assert found.get("status") == "True", found
        assert words in found["message"], found
        return True

    wait_for(look, 60, every_s=0.5, why="the agent installed no boot unit")


def _started_us(node: VirtualNode, unit: str) -> int:
    """When a unit's first process of this boot began, in microseconds since the boot."""
    return int(node.run(f"systemctl show {unit} -P ExecMainStartTimestampMonotonic"))


def _huge_pages(cluster: ControlPlane) -> str:
    capacity = cluster.api.get(f"/api/v1/nodes/{NODE}")["status"]["capacity"]
    return str(capacity["hugepages-2Mi"])


def _files(node: VirtualNode) -> str:
    return node.run("find /etc/hostprep /etc/systemd/system | sort 2> /dev/null; true")


@pytest.fixture(scope="module")
def operator(cluster: ControlPlane, kv: JsonObject) -> Iterator[OperatorProcess]:
    """The operator on this machine instead of on the node that reboots."""
    scale_operator(cluster, 0)
    running = OperatorProcess(cluster, f"--namespace={NAMESPACE}")
    running.wait_ready(60)
    yield running
    running.child.stop()
    scale_operator(cluster, 1)


@pytest.fixture(scope="module")
def files_before(node: VirtualNode, kv: JsonObject) -> str:
    """What is below /etc/systemd/system and /etc/hostprep before any pool says boot: systemd."""
    return _files(node)


def test_the_unit_is_installed_and_enabled_and_nothing_is_started(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject, files_before: str
) -> None:
    assert _UNIT not in files_before
    apply(cluster, _with(kv, boot="systemd"))
    _wait_unit(cluster, "kv")
    assert node.run(f"systemctl is-enabled {_UNIT}").strip() == "enabled"
    assert node.run(f"systemctl show {_UNIT} -P ActiveState").strip() == "inactive"
    node.run(f"systemd-analyze verify /etc/systemd/system/{_UNIT}")
    assert pool_status(cluster, "kv")["phase"] == "Ready"


def test_after_a_reboot_pages_are_there_before_kubelet_counts_them(
    cluster: ControlPlane, node: VirtualNode, operator: OperatorProcess
) -> None:
    go_through(cluster, node, operator, [node.reboot])
    assert node.run(f"systemctl show {_UNIT} -P Result").strip() == "success"
    assert 0 < _started_us(node, _UNIT) < _started_us(node, "kubelet")
    assert _huge_pages(cluster) == "128Mi"
    result = node.run("cat /run/hostprep/kv/boot.json")
    assert '"complete": true' in result
    assert '"mounted": true' in result
    steps = [step["name"] for step in pool_status(cluster, "kv")["steps"]]
    assert "ReserveHugePages" not in steps, "the agent found no pages to adopt"


def test_a_failing_script_and_a_power_cut_while_preparing_stop_no_boot(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject, operator: OperatorProcess
) -> None:
    mark = node.run(f"head -1 {_SCRIPT}").strip()
    node.run(f"printf '%s\\nkill -9 $$\\n' '{mark}' > /etc/hostprep/broken.sh")
    _wait_unit(cluster, "broken")

    def cut_while_preparing() -> None:
        """As soon as the agent says that the files stand: what it says has reached the disk."""
        apply(cluster, _with(kv, boot="systemd", size="192Mi"))
        wait_for(lambda: "196608" in node.run(f"cat {_SCRIPT}"), 60, why="no new script")
        node.power_cut()

    go_through(cluster, node, operator, [cut_while_preparing])
    assert "196608" in node.run(f"cat {_SCRIPT}")
    assert "broken.sh" in node.run(
        f"journalctl -b -u {_UNIT} -o cat; cat /etc/systemd/system/{_UNIT}"
    )
    assert _started_us(node, _UNIT) < _started_us(node, "kubelet")
    assert _huge_pages(cluster) == "192Mi"


def test_without_the_wish_the_node_is_left_as_it_was(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject, files_before: str
) -> None:
    node.run("rm -f /etc/hostprep/broken.sh")
    apply(cluster, _with(kv, boot="none"))
    wait_for(lambda: not node_condition(cluster, "BootUnit"), 60, every_s=0.5, why="it stayed")
    assert _files(node) == files_before
    assert pool_status(cluster, "kv")["phase"] in ("Ready", "Resizing")
