"""What a container gets that was given regions: mounts and variables. Pure.

Everything of the pool that the container sees is these mounts. They must suffice for claiming as
docs/handoff.md has it, on the very files that the agent and other claimers lock:

    <root>/<pool>               the view: handoff with these regions alone, claim.lock (a hard link)
    <root>/<pool>/tickets       the pool's: the agent sees who waits
    <root>/<pool>/links         the view's
    <root>/<pool>/state/REGION  the pool's: marks and sidecar are replaced by renaming, in a folder
    <root>/<pool>/mem/REGION    the file itself
    <root>/hostprep.pyz         exec, wait and attach; not a version of it, whose file may be gone
                                when kubelet restarts the container and mounts it again
    <root>/turnstile            the node's, where it is: engines of all pools take turns registering
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hostprep.client.handoff import Region
from hostprep.paths import TURNSTILE, PoolPaths

__all__ = ["Allocation", "Mount", "allocation_of", "view_name"]

_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the host in the container."""

    container_path: str
    host_path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to one container's request."""

    mounts: tuple[Mount, ...]
    envs: tuple[tuple[str, str], ...]


def view_name(regions: Collection[str]) -> str:
    """Return the name of the folder for a set of regions; the same for the same set."""
    name = "+".join(sorted(regions))
    return name if len(name) <= _MAX_NAME else hashlib.sha256(name.encode()).hexdigest()


def allocation_of(
    paths: PoolPaths, regions: Sequence[Region], *, zipapp: str, turns: bool = False
) -> Allocation:
    """Return what a container gets for these regions; `zipapp` is the name of a file of the root.

    `turns`: the root has a turnstile; a mount of what is not there would fail the pod. Paths are
    the same inside as outside. The view is read-only, whoever the container runs as: the folders
    for writing are mounts of their own. Shallow paths come first.
    """
    view = f"{paths.devices}/{view_name([region.name for region in regions])}"
    turnstile = f"{paths.root}/{TURNSTILE}"
    shared = [Mount(turnstile, turnstile, read_only=False)] if turns else []
    same = [paths.tickets, *(paths.state_of(region.name) for region in regions)]
    same += [paths.region_of(region.path) for region in regions]
    return Allocation(
        mounts=(
            Mount(paths.folder, view, read_only=True),
            Mount(f"{paths.root}/{zipapp}", f"{paths.root}/{zipapp}", read_only=True),
            *shared,
            Mount(paths.links, f"{view}/links", read_only=False),
            *(Mount(path, path, read_only=False) for path in same),
        ),
        envs=(
            ("HOSTPREP_ROOT", paths.root),
            ("HOSTPREP_POOL", paths.pool),
            ("HOSTPREP_REGION", ":".join(region.name for region in regions)),
        ),
    )
