"""NUMA nodes, from /sys/devices/system/node."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from hostprep.linux.procfs import parse_cpu_list, parse_meminfo
from hostprep.node.facts import NumaNode
from hostprep.node.observe.hugepages import MACHINE_FOLDER, observe_node_huge_pages
from hostprep.node.observe.memory import reclaimable_bytes
from hostprep.node.observe.zones import NodeZones, observe_zones

if TYPE_CHECKING:
    from hostprep.node.observe.host import HostRoot, Warn

__all__ = ["observe_nodes", "share_deferred"]

_NODES = "/sys/devices/system/node"
_NODE = re.compile(r"node(\d{1,5})", re.ASCII)


def observe_nodes(host: HostRoot, page_bytes: int, warn: Warn) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes by number; one made from the whole machine where there are none."""
    zones = observe_zones(host, page_bytes, warn)
    machine = parse_meminfo(host.read_text("/proc/meminfo") or "")
    matches = (_NODE.fullmatch(name) for name in host.list_dir(_NODES))
    node_ids = sorted(int(match[1]) for match in matches if match is not None)
    if not node_ids:
        return (_whole_machine(host, machine, zones, warn),)
    nodes = tuple(_node(host, node_id, zones, warn) for node_id in node_ids)
    unmanaged = {node_id: known.unmanaged_bytes for node_id, known in zones.items()}
    return share_deferred(nodes, machine.get("MemTotal", 0), unmanaged)


def _node(host: HostRoot, node_id: int, zones: dict[int, NodeZones], warn: Warn) -> NumaNode:
    folder = f"{_NODES}/node{node_id}"
    info = parse_meminfo(host.read_text(f"{folder}/meminfo") or "")
    if "MemTotal" not in info or "MemFree" not in info:
        warn(f"{folder}/meminfo cannot be read: node {node_id} counts as empty")
    return NumaNode(
        node_id=node_id,
        cpus=_cpus(host, f"{folder}/cpulist", warn),
        total_bytes=info.get("MemTotal", 0),
        free_bytes=info.get("MemFree", 0),
        reclaimable_bytes=reclaimable_bytes(info),
        zones=zones.get(node_id, NodeZones()).zones,
        huge_pages=observe_node_huge_pages(host, f"{folder}/hugepages", warn),
    )


def _whole_machine(
    host: HostRoot, info: dict[str, int], zones: dict[int, NodeZones], warn: Warn
) -> NumaNode:
    """Return node 0 of a kernel built without NUMA, which has no folder for it."""
    return NumaNode(
        node_id=0,
        cpus=_cpus(host, "/sys/devices/system/cpu/online", warn),
        total_bytes=info.get("MemTotal", 0),
        free_bytes=info.get("MemFree", 0),
        reclaimable_bytes=reclaimable_bytes(info),
        zones=zones.get(0, NodeZones()).zones,
        huge_pages=observe_node_huge_pages(host, MACHINE_FOLDER, warn),
    )


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
    free and unfragmented. It is dealt out by what each node has present but not managed;
    elsewhere the two agree and nothing changes.
    """
    gap = machine_bytes - sum(node.total_bytes for node in nodes)
    unmanaged = sum(unmanaged_bytes.get(node.node_id, 0) for node in nodes)
    if gap <= 0 or unmanaged <= 0:
        return nodes
    gap = min(gap, unmanaged)
    return tuple(
        _with_deferred(node, gap * unmanaged_bytes.get(node.node_id, 0) // unmanaged)
        for node in nodes
    )


def _with_deferred(node: NumaNode, deferred_bytes: int) -> NumaNode:
    return replace(
        node,
        total_bytes=node.total_bytes + deferred_bytes,
        free_bytes=node.free_bytes + deferred_bytes,
        deferred_bytes=deferred_bytes,
    )
