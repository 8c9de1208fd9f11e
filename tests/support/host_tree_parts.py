"""Parts that the host trees are put together from: nodes, devices, cgroups."""

from __future__ import annotations

from hostprep.backing import GIB
from tests.support.host_tree_files import TreeCgroup, TreeMachine, TreeNode, TreePci, TreeZone

V2_MOUNT = "29 24 0:27 / /sys/fs/cgroup {own} shared:9 - cgroup2 cgroup2 {fs}"
V2 = "sys/fs/cgroup"
POD_PATH = (
    "/kubepods.slice/kubepods-burstable.slice"
    "/kubepods-burstable-pod0f9c2a61_7d53_4b8e_9f1e_2d1c3b4a5968.slice"
    "/cri-containerd-7be1c0d94ad0d5f3a7c0b9e2f7a3b6c5d8e1f4a7b0c3d6e9f2a5b8c1d4e7f0a3.scope"
)
OTHER_DEVICES = (
    TreePci(address="0000:02:00.0", pci_class=0x030000, vendor=0x1A03, device=0x2000, driver="ast"),
    TreePci(
        address="0000:18:00.0",
        pci_class=0x020700,
        vendor=0x15B3,
        device=0x1021,
        numa_node=0,
        driver="mlx5_core",
    ),
)
"""The VGA controller of a management chip, and a network adapter: no GPUs."""


def zone(name: str, managed_bytes: int) -> TreeZone:
    return TreeZone(name=name, managed_bytes=managed_bytes)


def plain_node(node_id: int, cpus: str, size_bytes: int) -> TreeNode:
    """A node soon after boot: 95 % free, unfragmented; node 0 has the low zone."""
    managed = size_bytes * 63 // 64  # the rest is the kernel's own page descriptors
    low = (zone("DMA32", 2 * GIB),) if node_id == 0 else ()
    return TreeNode(
        node_id=node_id,
        cpus=cpus,
        zones=(*low, zone("Normal", managed - 2 * GIB * len(low))),
        free_bytes=managed * 19 // 20,
        file_bytes=managed // 40,
        slab_bytes=managed // 200,
    )


def gpu(address: str, ids: tuple[int, int], pci_class: int, node: int, driver: str) -> TreePci:
    return TreePci(
        address=address,
        pci_class=pci_class,
        vendor=ids[0],
        device=ids[1],
        numa_node=node,
        driver=driver,
    )


def machine(nodes: tuple[TreeNode, ...], pci: tuple[TreePci, ...]) -> TreeMachine:
    """A machine seen by root in a session of its own, on cgroup v2."""
    return TreeMachine(nodes=nodes, pci=pci, cgroup=session_cgroup())


def session_cgroup() -> TreeCgroup:
    scope = "/user.slice/user-0.slice/session-3.scope"
    return TreeCgroup(
        own=f"0::{scope}\n",
        mounts=(V2_MOUNT.format(own="rw,nosuid,nodev,noexec,relatime", fs="rw,nsdelegate"),),
        files=_v2_top()
        | {f"{V2}{scope}/{name}": "max\n" for name in ("memory.max", "hugetlb.2MB.max")},
    )


def kubepod_cgroup(memory_limit_bytes: int, *, privileged: bool) -> TreeCgroup:
    limits = {
        "memory.max": f"{memory_limit_bytes}\n",
        **{
            f"hugetlb.{size}.{kind}": "0\n"
            for size in ("2MB", "1GB")
            for kind in ("max", "rsvd.max")
        },
    }
    if not privileged:
        return TreeCgroup(
            own="0::/\n",
            mounts=(V2_MOUNT.format(own="ro,nosuid,nodev,noexec,relatime", fs="rw,nsdelegate"),),
            files=_v2_top() | {f"{V2}/{name}": text for name, text in limits.items()},
            namespace="cgroup:[4026532874]",
        )
    pod = POD_PATH.rpartition("/")[0]
    files = {
        f"{V2}/kubepods.slice/memory.max": f"{240 * GIB}\n",
        f"{V2}/kubepods.slice/kubepods-burstable.slice/memory.max": "max\n",
        f"{V2}{pod}/memory.max": f"{memory_limit_bytes}\n",
        **{f"{V2}{POD_PATH}/{name}": text for name, text in limits.items()},
    }
    return TreeCgroup(
        own=f"0::{POD_PATH}\n",
        mounts=(V2_MOUNT.format(own="rw,nosuid,nodev,noexec,relatime", fs="rw,nsdelegate"),),
        files=_v2_top() | files,
    )


def hybrid_cgroup() -> TreeCgroup:
    """Memory on version 1, hugetlb on version 2, as small virtual machines have it."""
    return TreeCgroup(
        own="4:memory:/init/worker\n3:cpuset:/\n1:name=systemd:/\n0::/\n",
        mounts=(
            "31 24 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755",
            "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory",
            "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
        ),
        files={
            f"{V2}/memory/cgroup.procs": "1\n",
            f"{V2}/memory/memory.limit_in_bytes": "9223372036854771712\n",
            f"{V2}/memory/init/memory.limit_in_bytes": f"{20 * GIB}\n",
            f"{V2}/memory/init/worker/memory.limit_in_bytes": "9223372036854771712\n",
            f"{V2}/unified/cgroup.procs": "1\n",
            f"{V2}/unified/cgroup.controllers": "hugetlb\n",
        },
    )


def _v2_top() -> dict[str, str]:
    return {
        f"{V2}/cgroup.procs": "1\n",
        f"{V2}/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc\n",
    }
