"""When to write the status: never what is there already, progress rarely, all else at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hostprep.api.node_resource import NodeStatus, Phase, PoolStatus

__all__ = ["PROGRESS_EVERY_S", "due_at", "is_only_progress", "merge_patch"]

PROGRESS_EVERY_S = 10.0
_MOVING = (Phase.PREPARING, Phase.RESIZING, Phase.DEGRADED, Phase.RELEASING)
_NOT_YET = ("", "Unfinished", "Unpublished")


def due_at(
    server: NodeStatus, wanted: NodeStatus, *, now_s: float, last_write_s: float | None
) -> float | None:
    """Return when the status is to be written: now, later, or (None) not at all."""
    if server == wanted:
        return None
    if last_write_s is not None and is_only_progress(server, wanted):
        return max(now_s, last_write_s + PROGRESS_EVERY_S)
    return now_s


def is_only_progress(old: NodeStatus, new: NodeStatus) -> bool:
    """Whether nothing changed but how far the work is."""
    return _essence(old, new) == _essence(new, old)


def _essence(status: NodeStatus, other: NodeStatus) -> NodeStatus:
    conditions = tuple(replace(condition, message="") for condition in status.conditions)
    pools = tuple(_essence_of(pool, other.pool(pool.name)) for pool in status.pools)
    return replace(status, summary="", huge_pages=(), pools=pools, conditions=conditions)


def _essence_of(pool: PoolStatus, other: PoolStatus | None) -> PoolStatus:
    """Return the pool without what moves while it is worked on."""
    pool = replace(pool, progress_percent=None, message="")
    if other is None or not (pool.phase is other.phase and pool.phase in _MOVING):
        return pool
    theirs = {region.name: region.state for region in other.regions}
    regions = tuple(
        region
        for region in pool.regions
        if region.state not in _NOT_YET and theirs.get(region.name, "") not in _NOT_YET
    )
    return replace(pool, ready_bytes=0, wanted_bytes=0, handoff_generation=0, regions=regions)


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch from one object's fields to another's (RFC 7396).

    Lists are replaced whole, objects field by field, and what went is named with null.
    """
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch
