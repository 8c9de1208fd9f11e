"""From a node that registers tainted and has nothing, to an engine that runs in prepared memory."""

from __future__ import annotations

import json

import pytest

from testbed.chart import install_chart, wait_for_chart
from testbed.control_plane import ControlPlane
from testbed.engine_pods import EnginePods, documents
from testbed.node import VirtualNode
from testbed.node_scene import KV, apply, is_tainted, wait_open
from testbed.processes import wait_for

pytestmark = pytest.mark.node
_REGION_BYTES = 64 << 20


def test_a_cluster_of_one_tainted_node_opens_by_itself(
    cluster: ControlPlane, node: VirtualNode
) -> None:
    engines = EnginePods(cluster.kubectl)
    engines.prepare()
    assert is_tainted(cluster), "kubelet was told to register with the taint"
    with engines.running(documents("engine.yaml")):
        first, _ = engines.some("engine", 2)
        wait_for(lambda: _held_back(cluster, first), 30, why="nobody held the engine back")
        # Everything of the chart tolerates the taint, or the node could never open.
        install_chart(cluster)
        wait_for_chart(cluster)
        assert is_tainted(cluster), "the node is not to open before there is memory"
        assert _held_back(cluster, first)
        apply(cluster, KV)
        opened = wait_open(cluster, node)
        assert opened["reason"] == "Ready"
        # Held back by the scheduler, the pod runs without anybody's help.
        pods = engines.some("engine", 2)
        said = [engines.wait_line(pod, "attached") for pod in pods]
        assert {_region_of(line) for line in said} == {"node0-0", "node1-0"}
        assert engines.restarts("engine") == 0


def test_pages_are_on_their_nodes_and_charged_to_no_pod(
    kv: dict[str, object], node: VirtualNode
) -> None:
    engines = EnginePods(node.cluster.kubectl)
    with engines.running(documents("engine.yaml")):
        for pod in engines.some("engine", 2):
            region = _region_of(engines.wait_line(pod, "attached"))
            number = region[len("node") : region.index("-")]
            # -s: a process that ends meanwhile has no file any more.
            maps = node.run(f"grep -hs 'mem/{region} ' /proc/[0-9]*/numa_maps | sort -u")
            for line in maps.splitlines():
                placed = [word for word in line.split() if word[0] == "N" and "=" in word]
                assert placed == [f"N{number}={_REGION_BYTES >> 21}"], line
            assert maps, "nobody has the region mapped"
        charged = node.run(
            "find /sys/fs/cgroup/kubepods.slice -name 'hugetlb.2MB.current' | xargs cat"
        )
        assert set(charged.split()) == {"0"}, "huge pages are charged to a pod"
        assert int(node.run("cat /sys/fs/cgroup/hostprep/hugetlb.2MB.current")) == 2 * _REGION_BYTES


def test_kubelet_forbids_what_the_agent_does_elsewhere(
    kv: dict[str, object], node: VirtualNode
) -> None:
    """The trap is real: the limit in the agent's own cgroup, and in all of kubepods, is 0."""
    limits = node.run(
        "for pid in $(pgrep -f '[h]ostprep agent'); do"
        " cat /sys/fs/cgroup/$(cut -d: -f3 /proc/$pid/cgroup)/../hugetlb.2MB.max; done"
    )
    assert set(limits.split()) == {"0"}


def _held_back(cluster: ControlPlane, pod: str) -> bool:
    found = json.loads(cluster.kubectl("-n", "engines", "get", "pod", pod, "-o", "json"))
    return any(
        item["type"] == "PodScheduled" and item["status"] == "False" and "taint" in item["message"]
        for item in found["status"].get("conditions", ())
    )


def _region_of(line: str) -> str:
    """The region that the stand-in engine says it has."""
    return line.partition("region ")[2].split()[0]
