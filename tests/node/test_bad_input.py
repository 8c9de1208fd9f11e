"""Mistakes and mischief on a real node: said where people look, and limited to one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from testbed.control_plane import ControlPlane
from testbed.engine_pods import EnginePods, pod_of
from testbed.node import VirtualNode
from testbed.node_scene import POOL_LABEL, agent_pod, apply, node_condition, pool_status
from testbed.processes import wait_for
from tests.node.node_pools import NodePools, delete_pool, pool_object

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

JsonObject = dict[str, Any]
_ROOT = "/run/hostprep"
_SHRINK = """
import os, time
import hostprep.attachment
memory = hostprep.attachment.attach("kv", wait_timeout_s=600)
os.ftruncate(memory.fd, 2 << 20)
print("shrunk", memory.region.name, flush=True)
time.sleep(9999)
"""
_ATTACH = """
import time
import hostprep.attachment
memory = hostprep.attachment.attach("kv", wait_timeout_s=600)
print("attached", memory.region.name, memory.size_bytes, flush=True)
time.sleep(9999)
"""
_FILL = """
import errno, itertools, os, time
import hostprep.attachment
memory = hostprep.attachment.attach("kv", wait_timeout_s=600)
folder = "/run/hostprep/kv/links"
written = made = 0
try:
    with open(f"{folder}/heap", "wb", buffering=0) as file:
        while True:
            written += file.write(bytes(1 << 20))
except OSError as error:
    why = errno.errorcode[error.errno]
try:
    for made in itertools.count():
        os.close(os.open(f"{folder}/{made}", os.O_CREAT | os.O_WRONLY))
except OSError:
    print("filled", why, written >> 20, made, flush=True)
time.sleep(9999)
"""
_OCCUPIED: JsonObject = {
    "apiVersion": "hostprep.dev/v1alpha1",
    "kind": "HostMemoryPool",
    "metadata": {"name": "occupied"},
    "spec": {
        "nodeSelector": {POOL_LABEL: "true"},
        "size": "16Mi",
        "backings": ["Base"],
        "readiness": {"required": False},
    },
}


@pytest.fixture(scope="module")
def engines(kubectl: Callable[..., str], chart: object) -> EnginePods:
    found = EnginePods(kubectl)
    found.prepare()
    return found


def test_a_pod_that_shrinks_its_region_costs_that_region_only(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject, engines: EnginePods
) -> None:
    pools = NodePools(cluster.kubectl, node)
    wait_for(lambda: pool_status(cluster, "kv")["phase"] == "Ready", 60, every_s=0.5)
    before = pools.inodes("kv")
    with engines.running([pod_of("shrinker", _SHRINK)]):
        region = engines.wait_line("shrinker", "^shrunk").split()[1]
        wait_for(
            lambda: node_condition(cluster, "Damaged")["message"] == f"kv/{region}",
            60,
            every_s=0.5,
            why="nobody noticed",
        )
        with engines.running([pod_of("victim", _ATTACH)]):
            other, size_bytes = engines.wait_line("victim", "^attached").split()[1:]
            assert (other != region, int(size_bytes)) == (True, 64 << 20)
        (state,) = [r for r in pool_status(cluster, "kv")["regions"] if r["name"] == region]
        assert state["state"] == "Damaged", "it was shown once, and forgotten"
        assert pools.inodes("kv") == before, "it was changed under its holder"
    wait_for(lambda: pools.inodes("kv") != before, 60, every_s=0.5, why="it was not made anew")
    wait_for(lambda: pool_status(cluster, "kv")["phase"] == "Ready", 60, every_s=0.5)
    assert pool_status(cluster, "kv")["readyBytes"] == 128 << 20
    assert len(pools.inodes("kv")) == 2


def test_a_pod_that_fills_its_pools_folders_takes_no_room_from_the_node(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject, engines: EnginePods
) -> None:
    """The root is a tmpfs of its own, which the agent mounted over the folder that kubelet made."""
    wait_for(lambda: pool_status(cluster, "kv")["phase"] == "Ready", 60, every_s=0.5)
    assert " tmpfs hostprep " in node.run(f"grep ' / {_ROOT} ' /proc/self/mountinfo")
    free_kib = int(node.run("df --output=avail /run | tail -1"))
    pools = NodePools(cluster.kubectl, node)
    with engines.running([pod_of("filler", _FILL)]):
        why, mib, files = engines.wait_line("filler", "^filled").split()[1:]
        assert (why, int(mib) < 64, int(files) < 1 << 16) == ("ENOSPC", True, True)
        assert free_kib - int(node.run("df --output=avail /run | tail -1")) < 8 << 10
        with pools.held(pool_object("beside", "16Mi", gid=4343, backings=["Base"]), wait=False):
            wait_for(
                lambda: "no space is left" in pool_status(cluster, "beside").get("message", ""),
                60,
                every_s=0.5,
            )
            node.run(f"find {_ROOT}/kv/links -mindepth 1 -delete")
            wait_for(
                lambda: pool_status(cluster, "beside").get("phase") == "Ready", 120, every_s=0.5
            )


def test_a_file_in_a_pools_place_costs_that_pool_only(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    node.run("echo precious > /run/hostprep/occupied")
    try:
        apply(cluster, _OCCUPIED)
        wait_for(lambda: pool_status(cluster, "occupied").get("phase") == "Failed", 60, every_s=0.5)
        said = pool_status(cluster, "occupied")
        assert said["reason"] == "BadRoot"
        assert "/run/hostprep/occupied" in said["message"]
        assert pool_status(cluster, "kv")["phase"] == "Ready"
        assert node.run("cat /run/hostprep/occupied") == "precious\n"
        node.run("rm /run/hostprep/occupied")
        wait_for(lambda: pool_status(cluster, "occupied").get("phase") == "Ready", 120, every_s=0.5)
    finally:
        delete_pool(cluster.kubectl, "occupied")
        wait_for(lambda: not pool_status(cluster, "occupied"), 60, every_s=0.5)


def test_a_second_agent_on_the_node_does_not_fight_the_first(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    """Another state folder, by mistake; the root is the same."""
    command = "hostprep agent --root /run/hostprep --state-dir /tmp/second --listen :0 --wait 0"
    answer = cluster.kubectl(
        *("-n", "hostprep-system", "exec", agent_pod(cluster), "--"),
        *("sh", "-c", f"{command} 2>&1; echo ended with $?"),
    )
    assert "another agent (process" in answer
    assert "ended with 2" in answer


def test_a_full_root_stops_that_pool_until_there_is_room(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    pools = NodePools(cluster.kubectl, node)
    node.run(f"fallocate -l $(df --output=avail -B1 {_ROOT} | tail -1) {_ROOT}/.full")
    try:
        with pools.held(pool_object("late", "16Mi", gid=4242, backings=["Base"]), wait=False):
            wait_for(lambda: pool_status(cluster, "late").get("phase") == "Failed", 60, every_s=0.5)
            assert "no space is left" in pool_status(cluster, "late")["message"]
            assert pool_status(cluster, "kv")["phase"] == "Ready"
            node.run(f"rm {_ROOT}/.full")
            wait_for(lambda: pool_status(cluster, "late").get("phase") == "Ready", 60, every_s=0.5)
    finally:
        node.run(f"rm -f {_ROOT}/.full")


def test_a_node_with_swap_keeps_its_pools_in_memory(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    """Pages of tmpfs may be swapped where the mount does not forbid it (tmpfs(5), noswap)."""
    pools = NodePools(cluster.kubectl, node)
    node.run(
        "dd if=/dev/zero of=/swapfile bs=1M count=64 status=none && chmod 600 /swapfile"
        " && mkswap -q /swapfile && swapon /swapfile"
    )
    try:
        with pools.held(pool_object("small", "64Mi", gid=4242, backings=["Base"])):
            wait_for(lambda: pool_status(cluster, "small").get("phase") == "Ready", 60, every_s=0.5)
            (mount,) = node.run("grep ' /run/hostprep/small/' /proc/mounts").splitlines()
            assert "noswap" in mount
            assert int(node.run("awk '/^Unevictable/ {print $2}' /proc/meminfo")) >= 64 << 10
    finally:
        node.run("swapoff /swapfile; rm -f /swapfile")


def test_containerd_dies_while_the_agent_populates(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    pools = NodePools(cluster.kubectl, node)
    before, agent = pools.inodes("kv"), agent_pod(cluster)
    large = pool_object("large", "768Mi", gid=4242, backings=["Base"])
    # By a unit of the node's, which looks 50 times a second: from here a look takes too long.
    # Populated between two of its looks as well: the pool is made again.
    for _ in range(5):
        node.run(f"rm -f {_KILLED}; systemd-run --collect --unit=kill-containerd sh -c '{_KILL}'")
        with pools.held(large, wait=False):
            node.wait(lambda: _resident_when_killed(node) > 0, "populating", timeout_s=60)
            _wait_ready(cluster, "large")
            assert pools.inodes("kv") == before
            node.wait(
                lambda: node.run("systemctl is-active containerd || true").strip() == "active",
                "containerd to run again",
                timeout_s=60,
            )
        if _resident_when_killed(node) < 768 << 20:
            break
    else:
        pytest.fail("it was never killed while memory was populated")
    assert agent_pod(cluster) == agent
    # The runtime is there again as well: it can run a program in the agent's container.
    wait_for(lambda: _version(cluster, agent), 60, every_s=1, why="containerd does not serve")


_KILLED = "/run/resident-when-containerd-was-killed"
_BLOCKS = "stat -c %b /run/hostprep/large/mem/* 2>/dev/null"
_KILL = (
    f"until {_BLOCKS} | grep -qvx 0; do sleep 0.02; done; "
    f"systemctl kill --signal=KILL containerd; {_BLOCKS} > {_KILLED}.new; "
    f"mv {_KILLED}.new {_KILLED}"
)


def _resident_when_killed(node: VirtualNode) -> int:
    """Return what the region files of pool `large` had in memory then; 0 before."""
    return sum(map(int, node.run(f"cat {_KILLED} 2>/dev/null || true").split())) * 512


def _wait_ready(cluster: ControlPlane, pool: str) -> None:
    wait_for(lambda: pool_status(cluster, pool).get("phase") == "Ready", 120, every_s=0.5)


def _version(cluster: ControlPlane, agent: str) -> str:
    return cluster.kubectl("-n", "hostprep-system", "exec", agent, "--", "hostprep", "--version")
