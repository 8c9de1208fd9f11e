"""Small pools for tests on real memory."""

from __future__ import annotations

from typing import Any

from hostprep.api.pool_spec import PoolSpec, RegionLayout
from hostprep.backing import MIB, Backing

__all__ = ["POOL", "pool_of"]

POOL = "kv"


def pool_of(
    *, regions: int = 1, mib: int = 8, backing: Backing = Backing.BASE, **changes: Any
) -> PoolSpec:
    """Return a pool of that many regions of `mib` MiB each."""
    fields: dict[str, Any] = {
        "name": POOL,
        "size_bytes": regions * mib * MIB,
        "backings": (backing,),
        "layout": RegionLayout.COUNT,
        "region_count": regions,
    }
    return PoolSpec(**(fields | changes))
