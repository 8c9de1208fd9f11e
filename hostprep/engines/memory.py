"""Which region is an engine's: what a plugin inside the engine asks first.

Under `hostprep exec` the lease is there already, and every process of the engine joins it.
Otherwise the engine's own configuration names a pool, and its one process claims a region of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hostprep.client.attach import Attachment, attach, join, join_end
from hostprep.client.environment import LeaseEnvironment
from hostprep.client.handoff import Region, read_handoff
from hostprep.client.owner import Owner, read_token_file
from hostprep.errors import BadInputError, NotReadyError
from hostprep.paths import PoolPaths, canonical_root, check_pool_name, default_root
from hostprep.units import format_exact

MEMORY_KEYS = ("hostprep.pool", "hostprep.root", "hostprep.region")
"""The keys of an engine's configuration by which it names its memory."""

_claimed: dict[tuple[str, str, str], Attachment] = {}


@dataclass(frozen=True)
class EngineRegion:
    """An engine's region, for a process that does not map it, such as a scheduler."""

    paths: PoolPaths
    region: Region
    lease_id: str

    @property
    def board(self) -> str:
        """Where the ranks that share this region report their progress."""
        return self.paths.board(self.region.name)


def engine_memory(
    config: Mapping[str, Any],
    *,
    size_bytes: int = 1,
    index: int = 0,
    processes: int = 1,
) -> Attachment:
    """Return an engine's memory, mapped with every page present.

    Under `hostprep exec`: the lease's region number `index` (counted over again where there are
    fewer: a data-parallel replica's number is global), joined by this process. Else a region
    claimed as `config` says by "hostprep.pool", "hostprep.root" and "hostprep.region"; asked
    again, the same process gets the same attachment, until that is closed. Such a claim serves
    one process only, so that `processes` must be 1.

    Raises BadInputError for a region smaller than `size_bytes`, and where there is neither a
    lease nor a pool's name; NotReadyError and BusyError as `attach` and `join` do.
    """
    if _is_under_exec():
        lease = _lease_for(config)
        memory = join(region=lease.regions[index % len(lease.regions)])
    else:
        memory = _claim(config, size_bytes, processes)
    try:
        _check(memory.region, memory.handoff.pool, size_bytes)
    except BadInputError:
        memory.close()
        raise
    return memory


def engine_region(
    config: Mapping[str, Any],
    *,
    size_bytes: int = 1,
    index: int = 0,
    processes: int = 1,
) -> EngineRegion:
    """Return the same region, without mapping it where it need not be claimed.

    Raises as `engine_memory` does.
    """
    if _is_under_exec():
        lease = _lease_for(config)
        paths = PoolPaths(canonical_root(lease.root), lease.pool)
        region = _region_of(paths, lease.regions[index % len(lease.regions)])
        found = EngineRegion(paths, region, lease.lease_id)
    else:
        memory = _claim(config, size_bytes, processes)
        paths = PoolPaths(_root(config), memory.handoff.pool)
        found = EngineRegion(paths, memory.region, memory.lease_id)
    _check(found.region, paths.pool, size_bytes)
    return found


def engine_region_end(config: Mapping[str, Any], size_bytes: int, *, index: int = 0) -> memoryview:
    """Return the last bytes of the same region, mapped; the rest of it is not.

    Raises as `engine_memory` does.
    """
    if _is_under_exec():
        lease = _lease_for(config)
        return join_end(size_bytes, region=lease.regions[index % len(lease.regions)])
    return _claim(config, size_bytes, 1).buffer[-size_bytes:]


def _is_under_exec() -> bool:
    return "HOSTPREP_LEASE" in os.environ


def _lease_for(config: Mapping[str, Any]) -> LeaseEnvironment:
    """Return the surrounding lease. Raises BadInputError where the configuration means another."""
    lease = LeaseEnvironment.read()
    claimed = {
        "hostprep.pool": {lease.pool},
        "hostprep.root": {lease.root, canonical_root(lease.root)},
        "hostprep.region": set(lease.regions),
    }
    for key, held in claimed.items():
        if config.get(key) not in (None, *held):
            raise BadInputError(
                f"the configuration's {key} is {config[key]!r}, and `hostprep exec` claimed "
                f"{', '.join(sorted(held))}",
                reason="OtherMemory",
                remedy=f"leave {key} out of the configuration, or claim that one",
            )
    return lease


def _claim(config: Mapping[str, Any], size_bytes: int, processes: int) -> Attachment:
    pool, region = config.get("hostprep.pool"), config.get("hostprep.region")
    if not pool:
        raise BadInputError(
            "this engine was given no prepared memory",
            reason="NoMemory",
            remedy="start it by `hostprep exec POOL -- CMD`, or name a pool by "
            '"hostprep.pool" in its configuration',
        )
    if processes > 1:
        raise BadInputError(
            f"{processes} processes of this engine need the memory, and a claim by its "
            "configuration serves one",
            reason="SeveralProcesses",
            remedy=f"start it by `hostprep exec {pool} -- CMD`: all of them join that lease",
        )
    root, pool, region = key = (_root(config), check_pool_name(str(pool)), str(region or ""))
    if key not in _claimed or not _is_open(_claimed[key]):
        if region:  # before it is taken: a region that was claimed in vain has to be scrubbed
            _check(_region_of(PoolPaths(root, pool), region), pool, size_bytes)
        _claimed[key] = attach(
            pool,
            region=region or None,
            size_bytes=size_bytes,
            root=root,
            owner=_owner(config),
        )
    return _claimed[key]


def _owner(config: Mapping[str, Any]) -> Owner | None:
    path, name = config.get("hostprep.owner_file"), config.get("hostprep.warm")
    if not path and not name:
        return None
    if not path or not isinstance(name, str):
        raise BadInputError(
            "hostprep.warm and hostprep.owner_file go together: a name, and the file of a token",
            reason="BadOwner",
            remedy='give both, such as "hostprep.warm": "chat-70b", or start the engine by '
            "`hostprep exec --warm NAME --owner-file FILE`",
        )
    return Owner(read_token_file(str(path))[0], {"engine": "vllm-offloading"}, name)


def _region_of(paths: PoolPaths, name: str) -> Region:
    region = read_handoff(paths).region(name)
    if region is None:
        raise NotReadyError(f"pool {paths.pool} has no region {name}", reason="NoSuchRegion")
    return region


def _is_open(memory: Attachment) -> bool:
    try:
        return bool(memory.buffer.nbytes)
    except ValueError:
        return False


def _root(config: Mapping[str, Any]) -> str:
    return canonical_root(str(config.get("hostprep.root") or default_root()))


def _check(region: Region, pool: str, size_bytes: int) -> None:
    if region.size_bytes < size_bytes:
        raise BadInputError(
            f"the engine asks for {format_exact(size_bytes)}, and region {region.name} of pool "
            f"{pool} has {format_exact(region.size_bytes)}",
            reason="RegionTooSmall",
            remedy="ask for less, or claim a larger region (`hostprep exec --size`)",
        )
