"""The folders that hold a pool's regions, each a mount: those there are, and a new region's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hostprep.backing import Backing
from hostprep.node.facts import Mount, PoolFacts, RegionFacts
from hostprep.node.plan.changes import Changes


def folders(pool: PoolFacts | None) -> dict[str, Backing | None]:
    """Return the pool's memory folders and what each holds; None where that is unknown."""
    if pool is None:
        return {}
    found: dict[str, Backing | None] = {
        _mount_dir(mount): mount.backing
        for mount in pool.mounts
        if _mount_dir(mount) == "mem" or _mount_dir(mount).startswith("mem-")
    }
    for region in pool.regions:
        found[region.mount_dir] = region.backing
    return dict(sorted(found.items()))


def choose_folders(
    changes: Changes, backings: Sequence[Backing], pool: PoolFacts | None
) -> dict[str, str]:
    """Return the folder of each new region by the region's name, folders of `backings` in order.

    A region goes where such lie already and there is room for it, else to a new folder: `mem` if
    that is free. Tmpfs is enlarged for it, and a hugetlbfs that an earlier version or another boot
    script mounted has no limit; any other is as large as it was made.
    """
    there, rooms = folders(pool), _rooms(changes, pool)
    found: dict[str, str] = {}
    for planned in sorted(changes.new, key=lambda planned: backings.index(planned.backing)):
        if planned.resumed is not None:
            found[planned.name] = planned.resumed.mount_dir
            continue
        name = next(
            (
                name
                for name, holds in there.items()
                if holds is planned.backing
                and rooms.get(name, planned.size_bytes) >= planned.size_bytes
            ),
            None,
        ) or _free_name(planned.backing, there)
        there[name] = planned.backing
        if name in rooms:
            rooms[name] -= planned.size_bytes
        found[planned.name] = name
    return found


def _rooms(changes: Changes, pool: PoolFacts | None) -> dict[str, int]:
    """Return the bytes that each folder of limited size has for new regions after the removals.

    A half-made region has reserved all its pages, or will: only the kernel knows which. Neither
    more than what is free now and comes back, for removed files may be kept by processes, and the
    kernel keeps bad pages, nor more than what those that stay leave.
    """
    gone = [removal.region for removal in changes.removed]
    rooms: dict[str, int] = {}
    for mount in pool.mounts if pool else ():
        if pool is None or mount.limit_bytes is None:
            continue
        here = [region for region in pool.regions if region.mount_dir == _mount_dir(mount)]
        back = sum(
            _taken_bytes(region) for region in here if region in gone and not region.has_bad_pages
        )
        stay = sum(_taken_bytes(region) for region in here if region not in gone)
        rooms[_mount_dir(mount)] = min(mount.free_bytes + back, mount.limit_bytes - stay)
    return rooms


def _taken_bytes(region: RegionFacts) -> int:
    # Not a finished one's size: an engine may have enlarged the file, and has no pages for it.
    return region.resident_bytes if region.finished else region.size_bytes


def _free_name(backing: Backing, there: dict[str, Backing | None]) -> str:
    beside = f"mem-{backing.value.lower()}"
    names = itertools.chain(("mem", beside), (f"{beside}-{n}" for n in itertools.count(1)))
    return next(name for name in names if name not in there)


def is_own_mount(mount_dir: str, pool: PoolFacts | None) -> bool:
    """Return whether that folder is a mount, not a part of the root's own tmpfs."""
    return pool is not None and any(_mount_dir(mount) == mount_dir for mount in pool.mounts)


def emptied(
    pool: PoolFacts | None, staying: Sequence[RegionFacts], used: Sequence[str]
) -> list[str]:
    """Return the folders that held something else before and hold nothing once the plan is done.

    One with a removed region's file stays until the processes that keep that file end.
    """
    kept = {region.mount_dir for region in staying}.union(used, pool.held_in if pool else ())
    return [name for name in folders(pool) if name not in kept]


def _mount_dir(mount: Mount) -> str:
    return mount.path.rsplit("/", 1)[-1]
