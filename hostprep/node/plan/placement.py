"""Where a pool's regions go: NUMA nodes, sizes, planned layouts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hostprep.api.pool_spec import INTERLEAVE, Placement, PoolSpec, RegionLayout
from hostprep.api.slot_layout import SlotLayout, layout_text
from hostprep.backing import MIB, Backing
from hostprep.node.facts import Facts, NumaNode, RegionFacts
from hostprep.node.plan.actions import Unmet

_GRANULE = 2 * MIB


@dataclass(frozen=True, slots=True)
class Layout:
    """How many regions each placement gets, and the nodes that interleaved ones use."""

    counts: tuple[tuple[Placement, int], ...]
    nodes: tuple[NumaNode, ...]
    notes: tuple[str, ...] = ()

    @property
    def region_count(self) -> int:
        """Regions of the whole pool."""
        return sum(count for _, count in self.counts)

    @property
    def node_ids(self) -> tuple[int, ...]:
        """Nodes that take part."""
        return tuple(node.node_id for node in self.nodes)

    def count(self, placement: Placement) -> int:
        """Return how many regions shall have that placement; 0 where it is not wanted."""
        return dict(self.counts).get(placement, 0)


def eligible_nodes(facts: Facts) -> tuple[NumaNode, ...]:
    """Return the nodes whose memory is fit: with CPUs, and not all of it movable.

    Nodes without CPUs are memory of GPUs (GB200) or CXL expanders.
    """
    return tuple(n for n in facts.nodes if n.cpus and n.total_bytes and not _is_movable(n))


def memory_with_cpus(facts: Facts) -> int:
    """Return the bytes of NUMA nodes that have CPUs: what a pool's percent is a share of.

    MemTotal counts nodes without CPUs too: on GB200 the GPUs' own memory, which holds no pool.
    """
    without = sum(node.total_bytes for node in facts.nodes if not node.cpus)
    return max(0, facts.memory.total_bytes - without)


def _is_movable(node: NumaNode) -> bool:
    managed = sum(zone.managed_bytes for zone in node.zones)
    return managed > 0 and node.movable_bytes >= managed


def _excluded(facts: Facts) -> tuple[str, ...]:
    notes = []
    for node in facts.nodes:
        if not node.cpus and node.total_bytes:
            notes.append(
                f"node {node.node_id} has memory and no CPUs (of a GPU or CXL expander): left out"
            )
        elif node.cpus and _is_movable(node):
            notes.append(
                f"node {node.node_id} is wholly ZONE_MOVABLE, which pinning empties: left out"
            )
    return tuple(notes)


def lay_out(spec: PoolSpec, facts: Facts) -> Layout | Unmet:
    """Return the placements that the spec asks for on this machine."""
    nodes = eligible_nodes(facts)
    notes = _excluded(facts)
    if not nodes:
        return Unmet(
            why="no NUMA node has both CPUs and memory that may be pinned",
            possible_bytes=0,
            remedy="boot without movablecore, or give the pool to other machines",
            reason="NoNode",
        )
    if spec.layout is RegionLayout.PER_GPU:
        return _per_gpu(facts, nodes, notes)
    if spec.layout is RegionLayout.SINGLE:
        return Layout(((INTERLEAVE, 1),), nodes, notes)
    placements = [Placement(node.node_id) for node in nodes]
    if spec.layout is RegionLayout.COUNT:
        count = spec.region_count or 1
        placements = [placements[index % len(nodes)] for index in range(count)]
    return Layout(tuple(Counter(placements).items()), nodes, notes)


def _per_gpu(facts: Facts, nodes: tuple[NumaNode, ...], notes: tuple[str, ...]) -> Layout | Unmet:
    if not facts.gpus:
        return Unmet(
            why="regions are asked for per GPU, and no GPU is on the PCI bus",
            possible_bytes=0,
            remedy="use regions: PerNUMANode, or give the pool to machines with GPUs",
            reason="NoGpu",
            never=True,
        )
    node_ids = {node.node_id for node in nodes}
    placements: list[Placement] = []
    for gpu in sorted(facts.gpus, key=lambda gpu: gpu.pci_address):
        if gpu.numa_node in node_ids:
            placements.append(Placement(gpu.numa_node))
        elif gpu.numa_node is None and len(nodes) == 1:
            placements.append(Placement(nodes[0].node_id))
        else:
            placements.append(INTERLEAVE)
            where = "no NUMA node" if gpu.numa_node is None else f"node {gpu.numa_node}, left out"
            notes = (*notes, f"GPU {gpu.pci_address} tells {where}: its region is interleaved")
    return Layout(tuple(Counter(placements).items()), nodes, notes)


def granule_bytes(backing: Backing, share_bytes: int, base_page_bytes: int) -> int:
    """Return what sizes of regions are multiples of, for regions of about that size.

    Base regions of 2 MiB and more are cut at 2 MiB too, so that another backing may follow.
    """
    if backing is not Backing.BASE:
        return backing.page_bytes
    return _GRANULE if share_bytes >= _GRANULE else base_page_bytes


def cut(deficit_bytes: int, share_bytes: int, missing: int, granule: int) -> tuple[int, ...]:
    """Return the sizes of the regions that make up a deficit at one placement.

    First the `missing` ones of a share each, then one for the rest if it is a granule or more.
    """
    sizes: list[int] = []
    left = deficit_bytes
    while left >= granule:
        wanted = min(share_bytes, left) if len(sizes) < missing else left
        size = wanted // granule * granule
        if size == 0:
            break
        sizes.append(size)
        left -= size
    return tuple(sizes)


def pages_per_node(
    size_bytes: int, page_bytes: int, placement: Placement, node_ids: tuple[int, ...]
) -> dict[int, int]:
    """Return the pages that a region takes on each node, rounded up where it is interleaved."""
    pages = -(-size_bytes // page_bytes)
    if placement.node is not None:
        return {placement.node: pages}
    return dict.fromkeys(node_ids, -(-pages // len(node_ids)))


def layout_of(region: RegionFacts, sizing: SlotLayout | None) -> dict[str, Any] | None:
    """Return the layout that a region is to be published with.

    A leased one keeps what it has: the ranks that join its holder must read what that read.
    One that is too small (leased when the pool was sized again) has none.
    """
    if region.leased and region.layout:
        kept: dict[str, Any] = json.loads(region.layout)
        return kept
    if sizing is None or region.size_bytes < sizing.size_bytes:
        return None
    return sizing.to_json()


def right_layouts(regions: Iterable[RegionFacts], sizing: SlotLayout | None) -> bool:
    """Return whether all regions are published with the layouts that they are to have."""
    return all(region.layout == layout_text(layout_of(region, sizing)) for region in regions)
