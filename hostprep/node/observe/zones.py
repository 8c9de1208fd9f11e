"""Zones of NUMA nodes, from /proc/zoneinfo and /proc/buddyinfo."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostprep.linux.zones import ZoneCounts, parse_zoneinfo
from hostprep.node.facts import Zone

if TYPE_CHECKING:
    from hostprep.node.observe.host import HostRoot, Warn

__all__ = ["NodeZones", "observe_zones", "parse_buddyinfo"]

_BUDDY = re.compile(r"Node (\d{1,5}), zone +(\w{1,32})((?: +\d{1,18})+) *", re.ASCII)

ZoneKey = tuple[int, str]
"""NUMA node and zone name."""


@dataclass(frozen=True, slots=True)
class NodeZones:
    """The zones of one node that hold memory."""

    zones: tuple[Zone, ...] = ()
    unmanaged_bytes: int = 0
    """Present, but not in the allocator's hands: reserved at boot, or not initialised yet."""


def observe_zones(host: HostRoot, page_bytes: int, warn: Warn) -> dict[int, NodeZones]:
    """Return the zones by NUMA node; without /proc/zoneinfo what is free counts as all there is."""
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
        zone = _zone(name, count, buddies.get((node_id, name), ()), page_bytes)
        nodes[node_id] = NodeZones(
            zones=(*known.zones, zone) if count.managed else known.zones,
            unmanaged_bytes=known.unmanaged_bytes
            + max(0, count.present - count.managed) * page_bytes,
        )
    return nodes


def _zone(name: str, count: ZoneCounts, blocks: tuple[int, ...], page_bytes: int) -> Zone:
    return Zone(
        name=name,
        managed_bytes=count.managed * page_bytes,
        free_bytes=count.free * page_bytes,
        free_cma_bytes=count.nr_free_cma * page_bytes,
        low_watermark_bytes=count.low * page_bytes,
        free_blocks=blocks,
    )


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
