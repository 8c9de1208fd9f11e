"""A pool as kubelet knows it: its resource and its devices; kubelet's folder and sockets in it."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hostprep.api.names import DEVICE_RESOURCE_PREFIX
from hostprep.api.node_resource import RegionStatus
from hostprep.errors import BadInputError

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
_LEASED = "Leased"
_MAX_SOCKET_PATH = 107
"""sun_path of unix(7), less the final zero; kubelet dials by the absolute path."""


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


def device_of(region: RegionStatus, *, scrubbed_on_claim: bool = False) -> Device:
    """Return a region as a device.

    Leased counts as healthy: kubelet knows that it is in use, and a device that changes its health
    with every lease would take the node's allocatable up and down with it. So does a region that
    retains an owner's bytes: they go to that owner's next container, or are zeroed once another
    one waits; and a dirty one that is zeroed once a claim waits for it (`scrub.when: OnClaim`).
    Only a claim decides whether a region may be had: a container that was given a dirty one waits
    in `attach` until it is clean.
    """
    usable = {"Free", "Retained", _LEASED} | ({"Dirty"} if scrubbed_on_claim else set())
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
    free = Counter(devices[n].numa_node for n in rest if n in devices and not devices[n].leased)
    enough = [(free[node], node) for node in free if node is not None and free[node] >= count]
    return min(enough, default=(0, None))[1]


# --- names and sockets


def resource_name(pool: str) -> str:
    """Return what pods ask for in `resources.limits`."""
    return f"{DEVICE_RESOURCE_PREFIX}{pool}"


def plugins_folder(kubelet_dir: str) -> str:
    """Return kubelet's folder for device plugins, below its root folder (`--root-dir`)."""
    return f"{kubelet_dir.rstrip('/')}/device-plugins"


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


def socket_identity(path: str) -> tuple[int, ...] | None:
    """Return what tells the socket at a path from the next one there; None where there is none.

    File systems use a number again at once: the change time tells them apart.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns
