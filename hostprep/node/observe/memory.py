"""Memory: the machine, its NUMA nodes and zones, huge-page pools, transparent huge pages."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hostprep.linux.numa import ZoneCounts, parse_zoneinfo
from hostprep.linux.procfs import parse_bracketed, parse_cpu_list, parse_huge_folder, parse_meminfo
from hostprep.node.facts import HugePages, HugePageTotals, MemoryFacts, NumaNode, ThpFacts, Zone
from hostprep.node.observe.host import HostRoot, Warn

_NODES_FOLDER = "/sys/devices/system/node"
_NODE = re.compile(r"node(\d{1,5})", re.ASCII)
_BUDDY = re.compile(r"Node (\d{1,5}), zone +(\w{1,32})((?: +\d{1,18})+) *", re.ASCII)

ZoneKey = tuple[int, str]
"""NUMA node and zone name."""
MACHINE_FOLDER = "/sys/kernel/mm/hugepages"


def observe_memory(host: HostRoot, page_bytes: int, warn: Warn) -> MemoryFacts:
    """Return the machine's memory; zeros, hence no capacity, where the kernel gives none."""
    info = parse_meminfo(host.read_text("/proc/meminfo") or "")
    missing = [key for key in ("MemTotal", "MemFree", "MemAvailable") if key not in info]
    if missing:
        warn(f"/proc/meminfo does not tell {', '.join(missing)}")
    free = info.get("MemFree", 0)
    return MemoryFacts(
        total_bytes=info.get("MemTotal", 0),
        available_bytes=info.get("MemAvailable", free),
        free_bytes=free,
        swap_total_bytes=info.get("SwapTotal", 0),
        page_bytes=page_bytes,
        corrupted_bytes=info.get("HardwareCorrupted", 0),
    )


def reclaimable_bytes(info: dict[str, int]) -> int:
    """Return what the kernel could drop: the file cache, and half of the reclaimable slab.

    An estimate, as si_mem_available() in mm/show_mem.c makes one. Shmem is on the anonymous
    lists, so it is not counted.
    """
    file_cache = info.get("Active(file)", 0) + info.get("Inactive(file)", 0)
    return file_cache + info.get("SReclaimable", 0) // 2


def observe_nodes(host: HostRoot, page_bytes: int, warn: Warn) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes by number; one made from the whole machine where there are none."""
    zones = observe_zones(host, page_bytes, warn)
    machine = parse_meminfo(host.read_text("/proc/meminfo") or "")
    matches = (_NODE.fullmatch(name) for name in host.list_dir(_NODES_FOLDER))
    node_ids = sorted(int(match[1]) for match in matches if match is not None)

    def numa_node(node_id: int, info: dict[str, int], cpus: str, huge_pages: str) -> NumaNode:
        return NumaNode(
            node_id=node_id,
            cpus=_cpus(host, cpus, warn),
            total_bytes=info.get("MemTotal", 0),
            free_bytes=info.get("MemFree", 0),
            reclaimable_bytes=reclaimable_bytes(info),
            zones=zones.get(node_id, NodeZones()).zones,
            huge_pages=observe_node_huge_pages(host, huge_pages, warn),
        )

    if not node_ids:  # a kernel built without NUMA
        return (numa_node(0, machine, "/sys/devices/system/cpu/online", MACHINE_FOLDER),)
    nodes = []
    for node_id in node_ids:
        folder = f"{_NODES_FOLDER}/node{node_id}"
        info = parse_meminfo(host.read_text(f"{folder}/meminfo") or "")
        if "MemTotal" not in info or "MemFree" not in info:
            warn(f"{folder}/meminfo cannot be read: node {node_id} counts as empty")
        nodes.append(numa_node(node_id, info, f"{folder}/cpulist", f"{folder}/hugepages"))
    unmanaged = {node_id: known.unmanaged_bytes for node_id, known in zones.items()}
    return share_deferred(tuple(nodes), machine.get("MemTotal", 0), unmanaged)


def _cpus(host: HostRoot, path: str, warn: Warn) -> tuple[int, ...]:
    cpus = parse_cpu_list(host.read_text(path) or "") if host.exists(path) else None
    if cpus is None:
        warn(f"{path} cannot be read: taken as no CPUs")
        return ()
    return cpus


def share_deferred(
    nodes: tuple[NumaNode, ...], machine_bytes: int, unmanaged_bytes: dict[int, int]
) -> tuple[NumaNode, ...]:
    """Give each node its part of the memory that the kernel counts but has not initialised.

    Kernels that initialise struct pages on demand (small virtual machines) count all memory in
    /proc/meminfo at once, but in a node's own numbers only what was needed so far. The gap is
    free and unfragmented. It is shared by what each node has present but not managed;
    elsewhere the two agree and nothing changes.
    """
    gap = machine_bytes - sum(node.total_bytes for node in nodes)
    unmanaged = sum(unmanaged_bytes.get(node.node_id, 0) for node in nodes)
    if gap <= 0 or unmanaged <= 0:
        return nodes
    gap = min(gap, unmanaged)
    shares = [gap * unmanaged_bytes.get(node.node_id, 0) // unmanaged for node in nodes]
    return tuple(
        replace(
            node,
            total_bytes=node.total_bytes + share,
            free_bytes=node.free_bytes + share,
            deferred_bytes=share,
        )
        for node, share in zip(nodes, shares)
    )


@dataclass(frozen=True, slots=True)
class NodeZones:
    """The zones of one node that hold memory."""

    zones: tuple[Zone, ...] = ()
    unmanaged_bytes: int = 0
    """Present, but not in the allocator's hands: reserved at boot, or not initialised yet."""


def observe_zones(host: HostRoot, page_bytes: int, warn: Warn) -> dict[int, NodeZones]:
    """Return the zones by NUMA node; without /proc/zoneinfo only free memory counts."""
    counts = parse_zoneinfo(host.read_text("/proc/zoneinfo") or "")
    buddies = parse_buddyinfo(host.read_text("/proc/buddyinfo") or "")
    if not counts:
        warn("/proc/zoneinfo cannot be read: movable and CMA memory is not recognised")
        counts = {key: _from_buddies(blocks) for key, blocks in buddies.items()}
    if not buddies:
        warn("/proc/buddyinfo cannot be read: free memory counts as fragmented")
    nodes: dict[int, NodeZones] = {}
    for (node_id, name), count in counts.items():
        known = nodes.get(node_id, NodeZones())
        zone = Zone(
            name=name,
            managed_bytes=count.managed * page_bytes,
            free_bytes=count.free * page_bytes,
            free_cma_bytes=count.nr_free_cma * page_bytes,
            low_watermark_bytes=count.low * page_bytes,
            free_blocks=buddies.get((node_id, name), ()),
        )
        nodes[node_id] = NodeZones(
            zones=(*known.zones, zone) if count.managed else known.zones,
            unmanaged_bytes=known.unmanaged_bytes
            + max(0, count.present - count.managed) * page_bytes,
        )
    return nodes


def _from_buddies(blocks: tuple[int, ...]) -> ZoneCounts:
    free = sum(count << order for order, count in enumerate(blocks))
    return ZoneCounts(free=free, present=free, managed=free)


def parse_buddyinfo(text: str) -> dict[ZoneKey, tuple[int, ...]]:
    """Return the free blocks by order of every zone. Lines of any other shape are skipped."""
    matches = (_BUDDY.fullmatch(line) for line in text.split("\n"))
    return {
        (int(match[1]), match[2]): tuple(int(count) for count in match[3].split())
        for match in matches
        if match is not None
    }


def observe_node_huge_pages(host: HostRoot, folder: str, warn: Warn) -> tuple[HugePages, ...]:
    """Return the pools in a node's `hugepages` folder, smallest page first."""
    return tuple(
        HugePages(
            page_bytes=page_bytes,
            total=_count(host, f"{path}/nr_hugepages", warn),
            free=_count(host, f"{path}/free_hugepages", warn),
            surplus=_count(host, f"{path}/surplus_hugepages", warn),
        )
        for page_bytes, path in _pool_folders(host, folder)
    )


def observe_huge_page_totals(host: HostRoot, warn: Warn) -> tuple[HugePageTotals, ...]:
    """Return the machine's pools, smallest page first."""
    return tuple(
        HugePageTotals(
            page_bytes=page_bytes,
            total=_count(host, f"{path}/nr_hugepages", warn),
            free=_count(host, f"{path}/free_hugepages", warn),
            reserved=_count(host, f"{path}/resv_hugepages", warn),
            surplus=_count(host, f"{path}/surplus_hugepages", warn),
            overcommit=_count(host, f"{path}/nr_overcommit_hugepages", warn),
        )
        for page_bytes, path in _pool_folders(host, MACHINE_FOLDER)
    )


def _pool_folders(host: HostRoot, folder: str) -> list[tuple[int, str]]:
    sizes = ((parse_huge_folder(name), name) for name in host.list_dir(folder))
    return sorted((size, f"{folder}/{name}") for size, name in sizes if size)


def _count(host: HostRoot, path: str, warn: Warn) -> int:
    value = host.read_int(path)
    if value is None or value < 0:
        warn(f"{path} cannot be read: taken as 0")
        return 0
    return value


def observe_thp(host: HostRoot) -> ThpFacts:
    """Return the knobs; `unknown` for one that this kernel does not have."""
    defrag, shmem_enabled = (
        parse_bracketed(host.read_text(f"/sys/kernel/mm/transparent_hugepage/{knob}") or "")
        for knob in ("defrag", "shmem_enabled")
    )
    return ThpFacts(defrag or "unknown", shmem_enabled or "unknown")
