"""Host trees of machines that tests cannot have at hand.

Each function writes a tree below `tmp` and returns its folder: observe(host=HostRoot(tree), ...).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

from hostprep.backing import GIB, KIB, MIB
from tests.support.host_tree_files import (
    OTHER_DEVICES,
    TreeMachine,
    TreeNode,
    TreePci,
    gpu,
    hybrid_cgroup,
    kubepod_cgroup,
    machine,
    plain_node,
    write_machine,
    zone,
)

NVIDIA, AMD = 0x10DE, 0x1002
TIB = 1024 * GIB
_POD_CAPABILITIES = 0xA80425FB


class Tweaks(TypedDict, total=False):
    """What every tree can be given; the per-node ones apply to nodes with CPUs."""

    free_bytes_per_node: int
    huge_2mi_per_node: int
    """Pages in the pool, taken out of the node's free memory."""
    huge_2mi_free_per_node: int
    """All of them where not given."""
    huge_1gi_per_node: int
    reserved_2mi: int
    huge_sizes: tuple[int, ...]
    """Page sizes of hugetlbfs; none for a kernel without it."""
    swap_bytes: int
    release: str
    euid: int
    """Other than 0 also takes the capabilities away."""


def two_socket_8gpu(tmp: Path, **tweaks: Unpack[Tweaks]) -> Path:
    """Two sockets of 1 TiB, eight NVIDIA H200, four a socket, switches, and a BMC's VGA."""
    cpus = ("0-55,112-167", "56-111,168-223")
    nodes = tuple(plain_node(node_id, cpus[node_id], TIB) for node_id in (0, 1))
    buses = (("1b", 0), ("43", 0), ("52", 0), ("61", 0), ("9d", 1), ("c3", 1), ("d1", 1), ("df", 1))
    gpus = tuple(
        gpu(f"0000:{bus}:00.0", (NVIDIA, 0x2335), 0x030200, node, "nvidia") for bus, node in buses
    )
    switch = TreePci(address="0000:07:00.0", pci_class=0x068000, vendor=NVIDIA, device=0x22A3)
    return _write(tmp, "two_socket_8gpu", machine(nodes, (*gpus, switch, *OTHER_DEVICES)), tweaks)


def eight_node_8gpu(tmp: Path, **tweaks: Unpack[Tweaks]) -> Path:
    """Two sockets cut into four nodes each, 256 GiB and one AMD MI300X a node."""
    nodes = tuple(
        plain_node(n, f"{24 * n}-{24 * n + 23},{192 + 24 * n}-{192 + 24 * n + 23}", 256 * GIB)
        for n in range(8)
    )
    gpus = tuple(
        gpu(f"0000:{0x05 + 0x20 * n:02x}:00.0", (AMD, 0x74A1), 0x120000, n, "amdgpu")
        for n in range(8)
    )
    return _write(tmp, "eight_node_8gpu", machine(nodes, (*gpus, *OTHER_DEVICES)), tweaks)


def gb200(tmp: Path, *, page_bytes: int = 4 * KIB, **tweaks: Unpack[Tweaks]) -> Path:
    """Two Grace CPUs of 480 GiB; the memory of four GPUs shows as nodes without CPUs."""
    grace = tuple(
        TreeNode(
            node_id=n,
            cpus=f"{72 * n}-{72 * n + 71}",
            zones=(zone("DMA", 2 * GIB), zone("Normal", 478 * GIB)),
            free_bytes=460 * GIB,
            file_bytes=8 * GIB,
            slab_bytes=2 * GIB,
        )
        for n in (0, 1)
    )
    hbm = tuple(
        TreeNode(node_id=n, cpus="", zones=(zone("Movable", 184 * GIB),), free_bytes=183 * GIB)
        for n in (2, 10, 18, 26)
    )
    addresses = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")
    gpus = tuple(
        gpu(address, (NVIDIA, 0x2941), 0x030200, index // 2, "nvidia")
        for index, address in enumerate(addresses)
    )
    small_pages = page_bytes == 4 * KIB
    described = replace(
        machine((*grace, *hbm), gpus),
        release="6.8.0-1025-nvidia" + ("" if small_pages else "-64k"),
        arch="aarch64",
        page_bytes=page_bytes,
        huge_sizes=(64 * KIB, 2 * MIB, 32 * MIB, GIB)
        if small_pages
        else (2 * MIB, 512 * MIB, 16 * GIB),
    )
    return _write(tmp, "gb200", described, tweaks)


def fragmented(tmp: Path, **tweaks: Unpack[Tweaks]) -> Path:
    """One node of 512 GiB, 400 of them free, of which 0.1 % in blocks of 2 MiB or more."""
    node = TreeNode(
        node_id=0,
        cpus="0-63",
        zones=(
            replace(zone("DMA32", 2 * GIB), crumbled=True),
            replace(zone("Normal", 510 * GIB), crumbled=True),
        ),
        free_bytes=400 * GIB,
        file_bytes=60 * GIB,
        slab_bytes=8 * GIB,
    )
    device = gpu("0000:17:00.0", (NVIDIA, 0x2330), 0x030200, 0, "nvidia")
    return _write(tmp, "fragmented", machine((node,), (device, *OTHER_DEVICES)), tweaks)


def movable(tmp: Path, *, free_cma_bytes: int = 4 * GIB, **tweaks: Unpack[Tweaks]) -> Path:
    """A node of 256 GiB, 120 in ZONE_MOVABLE and some in CMA, and a CXL node all movable."""
    cpu_node = TreeNode(
        node_id=0,
        cpus="0-31",
        zones=(
            zone("DMA32", 2 * GIB),
            replace(zone("Normal", 134 * GIB), free_cma_bytes=free_cma_bytes),
            zone("Movable", 120 * GIB),
        ),
        free_bytes=240 * GIB,
        file_bytes=4 * GIB,
    )
    cxl = TreeNode(node_id=1, cpus="", zones=(zone("Movable", 512 * GIB),), free_bytes=512 * GIB)
    device = gpu("0000:17:00.0", (NVIDIA, 0x2330), 0x030200, 0, "nvidia")
    return _write(tmp, "movable", machine((cpu_node, cxl), (device, *OTHER_DEVICES)), tweaks)


def small(tmp: Path, *, deferred_bytes: int = 0, **tweaks: Unpack[Tweaks]) -> Path:
    """A virtual machine of 24 GiB, no GPU, memory on cgroup v1 and hugetlb on v2 (hybrid).

    `deferred_bytes` of them are initialised on demand only, hence in no zone yet.
    """
    normal = replace(zone("Normal", 21 * GIB - deferred_bytes), deferred_bytes=deferred_bytes)
    node = TreeNode(
        node_id=0,
        cpus="0-1",
        zones=(zone("DMA", 15 * MIB), zone("DMA32", 3 * GIB - 15 * MIB), normal),
        free_bytes=23 * GIB - deferred_bytes,
        file_bytes=GIB // 2,
    )
    described = replace(machine((node,), ()), release="6.18.44", cgroup=hybrid_cgroup())
    return _write(tmp, "small", replace(described, memlock="8388608"), tweaks)


def kubepod(
    tmp: Path,
    *,
    memory_limit_bytes: int = 16 * GIB,
    privileged: bool = True,
    **tweaks: Unpack[Tweaks],
) -> Path:
    """A container of a pod that requests no huge pages, on a node of 256 GiB.

    Privileged, it sees the host's cgroups and processes, as an agent does; else neither.
    """
    node = plain_node(0, "0-31", 256 * GIB)
    device = gpu("0000:17:00.0", (NVIDIA, 0x2330), 0x030200, 0, "nvidia")
    described = machine((node,), (device, *OTHER_DEVICES))
    described = replace(described, cgroup=kubepod_cgroup(memory_limit_bytes, privileged=privileged))
    if not privileged:
        described = replace(
            described,
            cap_eff=_POD_CAPABILITIES,
            pid_namespace="pid:[4026532871]",
            memlock="8388608",
        )
    return _write(tmp, "kubepod", described, tweaks)


def old_kernel(tmp: Path, **tweaks: Unpack[Tweaks]) -> Path:
    """Linux 5.10 on two nodes of 192 GiB, with 8 GiB of swap on and four NVIDIA A100."""
    nodes = tuple(plain_node(n, f"{24 * n}-{24 * n + 23}", 192 * GIB) for n in (0, 1))
    gpus = tuple(
        gpu(f"0000:{bus}:00.0", (NVIDIA, 0x20B2), 0x030200, node, "nvidia")
        for bus, node in (("31", 0), ("4b", 0), ("b1", 1), ("ca", 1))
    )
    described = replace(
        machine(nodes, (*gpus, *OTHER_DEVICES)),
        release="5.10.0-32-amd64",
        arch=None,
        swap_bytes=8 * GIB,
        memlock="65536",
    )
    return _write(tmp, "old_kernel", described, tweaks)


@dataclass(frozen=True, slots=True)
class TreeKind:
    """A tree by name, for tests that go through all of them."""

    name: str
    node_ids: tuple[int, ...]
    gpu_count: int

    def write(self, tmp: Path) -> Path:
        return _WRITERS[self.name](tmp)


_WRITERS = {
    writer.__name__: writer
    for writer in (
        two_socket_8gpu,
        eight_node_8gpu,
        gb200,
        fragmented,
        movable,
        small,
        kubepod,
        old_kernel,
    )
}

ALL_TREES = (
    TreeKind("two_socket_8gpu", (0, 1), 8),
    TreeKind("eight_node_8gpu", tuple(range(8)), 8),
    TreeKind("gb200", (0, 1, 2, 10, 18, 26), 4),
    TreeKind("fragmented", (0,), 1),
    TreeKind("movable", (0, 1), 1),
    TreeKind("small", (0,), 0),
    TreeKind("kubepod", (0,), 1),
    TreeKind("old_kernel", (0, 1), 4),
)


def _write(tmp: Path, name: str, described: TreeMachine, tweaks: Tweaks) -> Path:
    nodes = tuple(_tweaked(node, tweaks) if node.cpus else node for node in described.nodes)
    euid = tweaks.get("euid", described.euid)
    return write_machine(
        tmp / name,
        replace(
            described,
            nodes=nodes,
            release=tweaks.get("release", described.release),
            swap_bytes=tweaks.get("swap_bytes", described.swap_bytes),
            huge_sizes=tweaks.get("huge_sizes", described.huge_sizes),
            reserved={2 * MIB: tweaks.get("reserved_2mi", 0)},
            euid=euid,
            cap_eff=described.cap_eff if euid == 0 else 0,
        ),
    )


def _tweaked(node: TreeNode, tweaks: Tweaks) -> TreeNode:
    mid, big = tweaks.get("huge_2mi_per_node", 0), tweaks.get("huge_1gi_per_node", 0)
    pooled_bytes = mid * 2 * MIB + big * GIB
    free_bytes = tweaks.get("free_bytes_per_node", max(0, node.free_bytes - pooled_bytes))
    return replace(
        node,
        free_bytes=free_bytes,
        huge={2 * MIB: (mid, tweaks.get("huge_2mi_free_per_node", mid)), GIB: (big, big)},
    )
