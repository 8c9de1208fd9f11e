"""Leases as a launcher sees them, of regions that do not exist."""

from __future__ import annotations

from hostprep.backing import MIB, Backing
from hostprep.client.handoff import Handoff, Region
from hostprep.client.lease import Lease
from hostprep.paths import PoolPaths


def leases_of(*sizes_bytes: int, root: str = "/run/hostprep") -> list[Lease]:
    """Return a lease of a region of each of these sizes, in 2 MiB pages, of the pool kv."""
    regions = tuple(
        Region(
            name=f"node0-{index}",
            path=f"mem/node0-{index}",
            st_dev=1,
            st_ino=index,
            size_bytes=size_bytes,
            backing=Backing.HUGETLB_2MI,
            page_bytes=2 * MIB,
            placement="node:0",
            pinned=True,
        )
        for index, size_bytes in enumerate(sizes_bytes)
    )
    handoff = Handoff("kv", "", 1, "boot", "0", regions)
    paths = PoolPaths(root, "kv")
    return [Lease(paths, handoff, region, 9 + i, "1ea5e") for i, region in enumerate(regions)]
