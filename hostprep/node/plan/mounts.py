"""Which folder of a pool holds which backing."""

from __future__ import annotations

from collections.abc import Iterable

from hostprep.backing import GIB, KIB, MIB, Backing
from hostprep.node.facts import Mount, PoolFacts, RegionFacts

__all__ = ["backing_of_mount", "folders", "folders_for", "is_own_mount"]

_SUFFIXES = {"K": KIB, "M": MIB, "G": GIB}


def folders(pool: PoolFacts | None) -> dict[str, Backing | None]:
    """Return the pool's memory folders and what each holds; None where it cannot be told."""
    if pool is None:
        return {}
    found: dict[str, Backing | None] = {
        _name(mount): backing_of_mount(mount)
        for mount in pool.mounts
        if _name(mount) == "mem" or _name(mount).startswith("mem-")
    }
    for region in pool.regions:
        found[region.mount_dir] = region.backing
    return dict(sorted(found.items()))


def folders_for(backings: Iterable[Backing], pool: PoolFacts | None) -> dict[Backing, str]:
    """Return where new regions go: where such lie already, else in `mem` if that is free."""
    there = folders(pool)
    found: dict[Backing, str] = {}
    for backing in backings:
        held = next((name for name, holds in there.items() if holds is backing), None)
        found[backing] = held or ("mem" if "mem" not in there else f"mem-{backing.value.lower()}")
        there[found[backing]] = backing
    return found


def is_own_mount(mount_dir: str, pool: PoolFacts | None) -> bool:
    """Return whether that folder is a mount, not a part of the root's own tmpfs."""
    return pool is not None and any(_name(mount) == mount_dir for mount in pool.mounts)


def emptied(pool: PoolFacts | None, staying: Iterable[RegionFacts], used: set[str]) -> list[str]:
    """Return the folders that held something else before and hold nothing once the plan is done."""
    kept = {region.mount_dir for region in staying} | used
    return [name for name in folders(pool) if name not in kept]


def backing_of_mount(mount: Mount) -> Backing | None:
    """Return the backing that a mount of ours gives."""
    if mount.fs_type == "hugetlbfs":
        text = mount.option("pagesize") or ""
        size = int(text[:-1]) * _SUFFIXES.get(text[-1], 0) if text[:-1].isdecimal() else 0
        return next((b for b in Backing if b.is_hugetlb and b.page_bytes == size), None)
    if mount.fs_type == "tmpfs":
        return Backing.THP if mount.option("huge") == "always" else Backing.BASE
    return None


def _name(mount: Mount) -> str:
    return mount.path.rsplit("/", 1)[-1]
