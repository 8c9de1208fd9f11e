"""From what the last look found to what kubelet is told. Pure."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hostprep.api.names import DEVICE_RESOURCE_PREFIX
from hostprep.errors import BadInputError

__all__ = [
    "HEALTHY",
    "UNHEALTHY",
    "Device",
    "RegionState",
    "device_of",
    "preferred",
    "resource_name",
    "socket_name",
]

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
_LEASED = "Leased"
_MAX_SOCKET_PATH = 107
"""sun_path of unix(7), less the final zero; kubelet dials by the absolute path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionState:
    """One region as the last look found it."""

    name: str
    placement: str
    """`node:N` or `interleave`."""
    state: str
    """One word of `PoolFacts.state_of`."""
    scrubbed_on_claim: bool = False
    """Zeroed once somebody waits for it, and not before (`scrub.when: OnClaim`)."""


@dataclass(frozen=True, slots=True)
class Device:
    """A region as kubelet knows it."""

    name: str
    healthy: bool
    numa_node: int | None
    """None for an interleaved region: it is as near to one node as to the other."""
    leased: bool = False

    @property
    def health(self) -> str:
        """The API's word for it."""
        return HEALTHY if self.healthy else UNHEALTHY


def resource_name(pool: str) -> str:
    """Return what pods ask for in `resources.limits`."""
    return f"{DEVICE_RESOURCE_PREFIX}{pool}"


def socket_name(folder: str, pool: str) -> str:
    """Return the file name of a pool's socket; shortened where the path would be too long.

    Raises BadInputError for a folder that leaves no room for any.
    """
    short = hashlib.sha256(pool.encode()).hexdigest()[:12]
    for name in (f"hostprep-{pool}.sock", f"hostprep-{short}.sock"):
        if len(os.fsencode(f"{folder}/{name}")) <= _MAX_SOCKET_PATH:
            return name
    raise BadInputError(
        f"no socket fits into {folder}: its path is too long",
        reason="BadKubeletDir",
        remedy=f"give kubelet a --root-dir of at most {_MAX_SOCKET_PATH - 42} characters",
    )


def device_of(region: RegionState) -> Device:
    """Return the region as a device.

    Leased counts as healthy: kubelet knows that it is in use, and a device that changes its health
    with every lease would take the node's allocatable up and down with it. So does a region that
    keeps an owner's bytes: they go to that owner's next container, or are zeroed as soon as
    another one waits. Nobody but a claim judges whether a region may be had: a container that was
    given a dirty one waits in `attach` until it is clean.
    """
    usable = {"Free", "Retained", _LEASED} | ({"Dirty"} if region.scrubbed_on_claim else set())
    prefix, _, number = region.placement.partition(":")
    return Device(
        name=region.name,
        healthy=region.state in usable,
        numa_node=int(number) if prefix == "node" else None,
        leased=region.state == _LEASED,
    )


def preferred(
    devices: Mapping[str, Device],
    available: Sequence[str],
    *,
    must_include: Sequence[str] = (),
    count: int,
) -> tuple[str, ...]:
    """Return which of the available devices to give a container that wants `count` of them.

    Those that nobody leases come first (kubelet takes a device for free when its pod has ended,
    and never hears of leases outside of pods); among them all of one NUMA node, where one has
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
