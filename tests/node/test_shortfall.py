"""Memory of one NUMA node is in pieces: that node alone falls back, and says so."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.chart import NAMESPACE
from testbed.control_plane import ControlPlane
from testbed.node import VirtualNode
from testbed.node_scene import agent_pod, pool_status
from testbed.processes import wait_for
from tests.node.node_pools import NodePools, pool_object

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

JsonObject = dict[str, Any]
_PIECES = "/mnt/pieces"
_WHOLE = 128 << 20
"""What stays in one piece: less than a region."""
# Give back all but the first page of every 64 KiB. In the agent's container: the node has no
# Python, and a process for each hole would take minutes.
_PUNCH = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
fallocate = libc.fallocate
fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
fd = os.open(sys.argv[1], os.O_RDWR)
for offset in range(0, os.fstat(fd).st_size, 1 << 16):
    if fallocate(fd, 3, offset + 4096, (1 << 16) - 4096):
        raise OSError(ctypes.get_errno(), "fallocate")
"""


def test_a_node_in_pieces_falls_back_alone(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    pools = NodePools(cluster.kubectl, node)
    # tmpfs without swap: what the kernel may neither reclaim nor move out of the way.
    node.run(
        f"mkdir -p {_PIECES} && mount -t tmpfs -o size=100%,noswap,mpol=bind:1 pieces {_PIECES}"
        " && echo 1 > /proc/sys/vm/drop_caches"
    )
    moving = node.run("cat /proc/sys/vm/compact_unevictable_allowed").strip()
    try:
        node.run("echo 0 > /proc/sys/vm/compact_unevictable_allowed")
        free = int(node.run("awk '/MemFree/ {print $4}' /sys/devices/system/node/node1/meminfo"))
        node.run(f"head -c {(free << 10) - _WHOLE} /dev/zero > {_PIECES}/all")
        program = ("python3", "-c", _PUNCH, f"/proc/1/root{_PIECES}/all")
        cluster.kubectl("-n", NAMESPACE, "exec", agent_pod(cluster), "--", *program)
        mixed = pool_object("mixed", "512Mi", gid=4242, backings=["HugeTLB2Mi", "Base"])
        mixed["spec"]["regions"] = "PerNUMANode"
        with pools.held(mixed):
            wait_for(lambda: pool_status(cluster, "mixed").get("phase") == "Ready", 60, every_s=0.5)
            said = pool_status(cluster, "mixed")
            assert said["backing"] == "HugeTLB2Mi, Base"
            found = {region["name"]: region for region in pools.handoff("mixed")["regions"]}
            backings = {name: region["backing"] for name, region in found.items()}
            assert backings == {"node0-0": "HugeTLB2Mi", "node1-0": "Base"}
            # Each file says itself which pages it has: in 2 MiB ones, or in single ones.
            for region in found.values():
                path = f"/run/hostprep/mixed/{region['path']}"
                kind = node.run(f"stat -f -c %T {path}").strip()
                assert kind == ("hugetlbfs" if region["backing"] == "HugeTLB2Mi" else "tmpfs")
    finally:
        node.run(
            f"umount {_PIECES}; rmdir {_PIECES};"
            f" echo {moving} > /proc/sys/vm/compact_unevictable_allowed"
        )
