"""Regions as kubelet's devices, and what a container gets that was given some. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hostprep.api.names import DEVICE_RESOURCE_PREFIX
from hostprep.client.handoff import Region
from hostprep.paths import TURNSTILE, PoolPaths

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
_LEASED = "Leased"
_MAX_VIEW_NAME = 200


@dataclass(frozen=True, slots=True)
class Device:
    """A region as kubelet knows it."""

    name: str
    healthy: bool
    numa_node: int | None
    """None for an interleaved region: it is on all of them."""
    leased: bool = False

    @property
    def health(self) -> str:
        """As the device plugin API writes it."""
        return HEALTHY if self.healthy else UNHEALTHY


def resource_name(pool: str) -> str:
    """Return what pods ask for in `resources.limits`."""
    return f"{DEVICE_RESOURCE_PREFIX}{pool}"


def device_of(name: str, *, placement: str, state: str, scrubbed_on_claim: bool = False) -> Device:
    """Return a region as a device; `state` is a word of `PoolFacts.state_of`.

    Leased counts as healthy: kubelet knows that it is in use, and a device that changes its health
    with every lease would take the node's allocatable up and down with it. So does a region that
    retains an owner's bytes: they go to that owner's next container, or are zeroed once another
    one waits; and a dirty one that is zeroed once a claim waits for it (`scrub.when: OnClaim`).
    Only a claim decides whether a region may be had: a container that was given a dirty one waits
    in `attach` until it is clean.
    """
    usable = {"Free", "Retained", _LEASED} | ({"Dirty"} if scrubbed_on_claim else set())
    prefix, _, number = placement.partition(":")
    return Device(
        name=name,
        healthy=state in usable,
        numa_node=int(number) if prefix == "node" else None,
        leased=state == _LEASED,
    )


def preferred(
    devices: Mapping[str, Device],
    available: Sequence[str],
    *,
    must_include: Sequence[str] = (),
    count: int,
) -> tuple[str, ...]:
    """Return which of the available devices to give a container that wants `count` of them.

    Those that are not leased come first (kubelet takes a device for free when its pod has ended,
    and does not know of leases outside of pods); among them all of one NUMA node, where one has
    enough: the node of what must be included, else the one with the fewest to spare.
    """
    chosen = list(dict.fromkeys(must_include))[:count]
    rest = sorted(set(available) - set(chosen))
    node = _best_node(devices, chosen, rest, count)

    def rank(name: str) -> tuple[bool, bool, str]:
        device = devices.get(name)
        away = device is None or device.numa_node != node
        return (device is None or device.leased, away, name)

    return tuple(chosen + sorted(rest, key=rank)[: count - len(chosen)])


def _best_node(
    devices: Mapping[str, Device], chosen: Sequence[str], rest: Iterable[str], count: int
) -> int | None:
    for name in chosen:
        if name in devices:
            return devices[name].numa_node
    free = [devices[n].numa_node for n in rest if n in devices and not devices[n].leased]
    return min(_with_enough(free, count), default=(0, None))[1]


def _with_enough(nodes: Collection[int | None], count: int) -> list[tuple[int, int]]:
    """Return (how many are free, node) for each NUMA node that could give all of them."""
    sizes = ((list(nodes).count(node), node) for node in set(nodes) if node is not None)
    return [(size, node) for size, node in sizes if size >= count]


# --- allocation


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
    return name if len(name) <= _MAX_VIEW_NAME else hashlib.sha256(name.encode()).hexdigest()


def allocation_of(
    paths: PoolPaths, regions: Sequence[Region], *, zipapp: str, turns: bool = False
) -> Allocation:
    """Return what a container gets for these regions; `zipapp` is the name of a file of the root.

    Everything of the pool that the container sees is these mounts. They must suffice for claiming
    as docs/handoff.md has it, on the very files that the agent and other claimers lock:

        <root>/<pool>               the view: handoff with these regions alone, claim.lock (a link)
        <root>/<pool>/tickets       the pool's: the agent sees which claims wait
        <root>/<pool>/links         the view's
        <root>/<pool>/state/REGION  the pool's: marks and sidecar are replaced by renaming
        <root>/<pool>/mem/REGION    the file itself
        <root>/hostprep.pyz         exec, wait and attach; not a version of it, whose file may be
                                    gone when kubelet restarts the container and mounts it again
        <root>/turnstile            the node's, if any: engines of all pools take turns registering

    `turns`: the root has a turnstile; a mount of what does not exist would fail the pod. Paths are
    the same inside as outside. The view is read-only, whatever user the container runs as: the
    folders for writing are mounts of their own. Shallow paths come first.
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
