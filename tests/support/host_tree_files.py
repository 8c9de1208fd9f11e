"""Writes a described machine as procfs and sysfs files, in the shapes that Linux prints."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from hostprep.backing import GIB, KIB, MIB

BOOT_ID = "3f1c9a52-8d0e-4b6f-9a77-5c2e1d0b4a68"
SIZES_X86 = (2 * MIB, GIB)
ROOT_PID_NAMESPACE = "pid:[4026531836]"
ROOT_CGROUP_NAMESPACE = "cgroup:[4026531835]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeZone:
    """A zone; `crumbled` has nearly no free block of 2 MiB or more."""

    name: str
    managed_bytes: int
    free_cma_bytes: int = 0
    deferred_bytes: int = 0
    crumbled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """A NUMA node; its free memory is dealt out over its zones by their size."""

    node_id: int
    cpus: str
    zones: tuple[TreeZone, ...]
    free_bytes: int
    file_bytes: int = 0
    slab_bytes: int = 0
    huge: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(total, free) pages by page size."""

    @property
    def managed_bytes(self) -> int:
        return sum(zone.managed_bytes for zone in self.zones)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePci:
    """A device on the PCI bus."""

    address: str
    pci_class: int
    vendor: int
    device: int
    numa_node: int = -1
    driver: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCgroup:
    """A process's cgroups: /proc/self/cgroup, the mounts, the files in them."""

    own: str
    mounts: tuple[str, ...]
    files: dict[str, str]
    namespace: str = ROOT_CGROUP_NAMESPACE


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMachine:
    """A machine and the process that looks at it."""

    nodes: tuple[TreeNode, ...]
    cgroup: TreeCgroup
    pci: tuple[TreePci, ...] = ()
    release: str = "6.8.0-60-generic"
    arch: str | None = "x86_64"
    """None: a kernel before 6.1, which does not say."""
    page_bytes: int = 4 * KIB
    huge_sizes: tuple[int, ...] = SIZES_X86
    reserved: dict[int, int] = field(default_factory=dict)
    swap_bytes: int = 0
    thp: tuple[str, str, str] = ("madvise", "madvise", "never")
    euid: int = 0
    cap_eff: int = (1 << 41) - 1
    pid_namespace: str = ROOT_PID_NAMESPACE
    memlock: str = "unlimited"


def write_machine(folder: Path, machine: TreeMachine) -> Path:
    """Write the machine's files below the folder and return it, ready for HostRoot."""
    files = {
        **_kernel_files(machine),
        **_memory_files(machine),
        **_process_files(machine),
        **machine.cgroup.files,
    }
    for node in machine.nodes:
        files.update(_node_files(machine, node))
    for device in machine.pci:
        files.update(_pci_files(device))
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    _write_links(folder, machine)
    return folder


def _write_links(folder: Path, machine: TreeMachine) -> None:
    namespaces = folder / "proc/self/ns"
    namespaces.mkdir(parents=True)
    (namespaces / "pid").symlink_to(machine.pid_namespace)
    (namespaces / "cgroup").symlink_to(machine.cgroup.namespace)
    (folder / "proc/self/auxv").write_bytes(
        struct.pack("=QQQQQQ", 16, 0xBFEBFBFF, 6, machine.page_bytes, 0, 0)
    )
    for device in machine.pci:
        if device.driver is not None:
            link = folder / f"sys/bus/pci/devices/{device.address}/driver"
            link.symlink_to(f"../../../../bus/pci/drivers/{device.driver}")


def _kernel_files(machine: TreeMachine) -> dict[str, str]:
    files = {
        "proc/sys/kernel/osrelease": f"{machine.release}\n",
        "proc/sys/kernel/random/boot_id": f"{BOOT_ID}\n",
        "proc/uptime": "86412.55 19310442.17\n",
    }
    if machine.arch is not None:
        files["proc/sys/kernel/arch"] = f"{machine.arch}\n"
    choices = ("always", "defer", "defer+madvise", "madvise", "never")
    for knob, choice in zip(("enabled", "defrag", "shmem_enabled"), machine.thp, strict=True):
        shown = " ".join(f"[{word}]" if word == choice else word for word in choices)
        files[f"sys/kernel/mm/transparent_hugepage/{knob}"] = f"{shown}\n"
    return files


def _memory_files(machine: TreeMachine) -> dict[str, str]:
    nodes = machine.nodes
    deferred = sum(zone.deferred_bytes for node in nodes for zone in node.zones)
    free = sum(sum(zone_free_bytes(machine, node)) for node in nodes) + deferred
    total = sum(node.managed_bytes for node in nodes) + deferred
    file_bytes = sum(node.file_bytes for node in nodes)
    slab = sum(node.slab_bytes for node in nodes)
    info = {
        "MemTotal": total,
        "MemFree": free,
        "MemAvailable": min(total, free + file_bytes + slab // 2),
        "Active(file)": file_bytes // 4,
        "Inactive(file)": file_bytes - file_bytes // 4,
        "SwapTotal": machine.swap_bytes,
        "SwapFree": machine.swap_bytes,
        "Shmem": 64 * MIB,
        "SReclaimable": slab,
    }
    files = {
        "proc/meminfo": "".join(
            f"{key + ':':<16}{value // KIB:>8} kB\n" for key, value in info.items()
        )
        + "HugePages_Total:       0\nHugepagesize:       2048 kB\n",
        "proc/zoneinfo": "".join(_zoneinfo(machine, node) for node in nodes),
        "proc/buddyinfo": "".join(_buddyinfo(machine, node) for node in nodes),
    }
    for size in machine.huge_sizes:
        pools = [node.huge.get(size, (0, 0)) for node in nodes]
        counts = {
            "nr_hugepages": sum(total for total, _ in pools),
            "free_hugepages": sum(free for _, free in pools),
            "resv_hugepages": machine.reserved.get(size, 0),
            "surplus_hugepages": 0,
            "nr_overcommit_hugepages": 0,
        }
        for name, count in counts.items():
            files[f"sys/kernel/mm/hugepages/hugepages-{size // KIB}kB/{name}"] = f"{count}\n"
    return files


def zone_free_bytes(machine: TreeMachine, node: TreeNode) -> list[int]:
    """Return the free bytes of each zone, in whole pages; the last zone has the remainder."""
    page, managed = machine.page_bytes, max(1, node.managed_bytes)
    free = min(node.free_bytes, node.managed_bytes)
    shares = [zone.managed_bytes * free // managed // page * page for zone in node.zones[:-1]]
    return [*shares, (free - sum(shares)) // page * page]


def free_blocks(free_pages: int, orders: int, *, crumbled: bool) -> list[int]:
    """Return block counts by order that add up to the free pages."""
    if not crumbled:
        largest = orders - 1
        rest = free_pages & ((1 << largest) - 1)
        return [*((rest >> order) & 1 for order in range(largest)), free_pages >> largest]
    blocks = [0] * orders
    blocks[9] = free_pages // 1000 >> 9
    blocks[3] = (free_pages // 3) >> 3
    blocks[0] = free_pages - (blocks[9] << 9) - (blocks[3] << 3)
    return blocks


def _buddyinfo(machine: TreeMachine, node: TreeNode) -> str:
    orders = 11 if machine.page_bytes == 4 * KIB else 14
    lines = []
    for zone, free in zip(node.zones, zone_free_bytes(machine, node), strict=True):
        counts = free_blocks(free // machine.page_bytes, orders, crumbled=zone.crumbled)
        shown = "".join(f"{count:>6} " for count in counts)
        lines.append(f"Node {node.node_id}, zone {zone.name:>8} {shown}\n")
    return "".join(lines)


def _zoneinfo(machine: TreeMachine, node: TreeNode) -> str:
    page = machine.page_bytes
    text = ""
    for zone, free in zip(node.zones, zone_free_bytes(machine, node), strict=True):
        managed, pages = zone.managed_bytes // page, free // page
        present = managed + zone.deferred_bytes // page
        text += (
            f"Node {node.node_id}, zone {zone.name:>8}\n"
            "  per-node stats\n      nr_inactive_file 45568\n"
            f"  pages free     {pages}\n        boost    0\n        min      {managed // 4000}\n"
            f"        low      {managed // 3200}\n        high     {managed // 2700}\n"
            f"        spanned  {present}\n        present  {present}\n"
            f"        managed  {managed}\n        cma      {zone.free_cma_bytes // page}\n"
            "        protection: (0, 2991, 31977, 31977, 31977)\n"
            f"      nr_free_pages {pages}\n      nr_free_cma  {zone.free_cma_bytes // page}\n"
            "  pagesets\n    cpu: 0\n              count: 231\n              high:  378\n"
            "  node_unreclaimable:  0\n  start_pfn:           4096\n"
        )
    unused = (
        f"Node {node.node_id}, zone   Device\n  pages free     0\n        min      0\n"
        "        low      0\n        spanned  0\n        present  0\n        managed  0\n"
    )
    return text + unused


def _node_files(machine: TreeMachine, node: TreeNode) -> dict[str, str]:
    folder = f"sys/devices/system/node/node{node.node_id}"
    info = {
        "MemTotal": node.managed_bytes,
        "MemFree": sum(zone_free_bytes(machine, node)),
        "Active(file)": node.file_bytes // 4,
        "Inactive(file)": node.file_bytes - node.file_bytes // 4,
        "SReclaimable": node.slab_bytes,
    }
    lines = [
        f"Node {node.node_id} {key + ':':<14}{value // KIB:>10} kB\n" for key, value in info.items()
    ]
    files = {
        f"{folder}/meminfo": "".join(lines) + f"Node {node.node_id} HugePages_Total:     0\n",
        f"{folder}/cpulist": f"{node.cpus}\n",
    }
    for size in machine.huge_sizes:
        total, free = node.huge.get(size, (0, 0))
        pool = f"{folder}/hugepages/hugepages-{size // KIB}kB"
        files[f"{pool}/nr_hugepages"] = f"{total}\n"
        files[f"{pool}/free_hugepages"] = f"{free}\n"
        files[f"{pool}/surplus_hugepages"] = "0\n"
    return files


def _pci_files(device: TreePci) -> dict[str, str]:
    folder = f"sys/bus/pci/devices/{device.address}"
    return {
        f"{folder}/class": f"0x{device.pci_class:06x}\n",
        f"{folder}/vendor": f"0x{device.vendor:04x}\n",
        f"{folder}/device": f"0x{device.device:04x}\n",
        f"{folder}/numa_node": f"{device.numa_node}\n",
    }


def _process_files(machine: TreeMachine) -> dict[str, str]:
    cpus = ",".join(node.cpus for node in machine.nodes if node.cpus)
    mounts = (
        "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw",
        "23 22 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw",
        "24 22 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:6 - sysfs sysfs rw",
        "26 22 0:25 / /run rw,nosuid,nodev shared:5 - tmpfs tmpfs rw,mode=755,inode64",
        "27 25 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64",
        "28 25 0:30 / /dev/hugepages rw,relatime shared:17 - hugetlbfs hugetlbfs rw,pagesize=2M",
        *machine.cgroup.mounts,
    )
    return {
        "proc/self/mountinfo": "".join(f"{line}\n" for line in mounts),
        "proc/self/cgroup": machine.cgroup.own,
        "proc/self/status": (
            f"Name:\thostprep\nUid:\t{machine.euid}\t{machine.euid}\t{machine.euid}\t{machine.euid}\n"
            f"CapEff:\t{machine.cap_eff:016x}\nCpus_allowed_list:\t{cpus}\n"
        ),
        "proc/self/limits": (
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            f"Max locked memory         {machine.memlock:<21}{machine.memlock:<21}bytes     \n"
        ),
    }


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
