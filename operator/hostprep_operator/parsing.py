"""Reading raw JSON into small values: quantities, conditions, and policies that nodes share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from sys import intern
from typing import Any

from hostprep.api.conditions import Condition
from hostprep.api.names import DEVICE_RESOURCE_PREFIX
from hostprep.units import parse_capacity

__all__ = [
    "condition_from",
    "condition_of_type",
    "devices_of",
    "huge_pages_requested",
    "memory_of",
    "shared_policy",
]

_MAX_SHARED = 1024
_shared_policies: dict[str, Mapping[str, Any]] = {}


def shared_policy(policy: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return one object for equal policies: thousands of nodes carry the same few."""
    if len(_shared_policies) > _MAX_SHARED:
        _shared_policies.clear()
    return _shared_policies.setdefault(json.dumps(policy, sort_keys=True), policy)


def condition_from(item: Mapping[str, Any]) -> Condition:
    """Read a condition, its strings interned."""
    read = Condition.from_json(item)
    return Condition(
        type=intern(read.type),
        status=read.status,
        reason=intern(read.reason),
        message=intern(read.message),
        since_s=read.since_s,
        observed_generation=read.observed_generation,
    )


def condition_of_type(items: Iterable[Mapping[str, Any]], wanted: str) -> Condition | None:
    """Return the condition of that type."""
    return next((Condition.from_json(item) for item in items if item.get("type") == wanted), None)


def devices_of(resources: Mapping[str, Any] | None) -> dict[str, int]:
    """Return how many regions of each pool kubelet has among a Node's resources."""
    return {
        intern(str(name).removeprefix(DEVICE_RESOURCE_PREFIX)): parse_capacity(amount)
        for name, amount in (resources or {}).items()
        if str(name).startswith(DEVICE_RESOURCE_PREFIX)
    }


def huge_pages_requested(containers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the huge pages that a Pod's containers ask for, in bytes by resource."""
    total: dict[str, int] = {}
    for container in containers:
        requests = (container.get("resources") or {}).get("requests") or {}
        for name, amount in requests.items():
            if str(name).startswith("hugepages-"):
                total[intern(str(name))] = total.get(str(name), 0) + parse_capacity(amount)
    return total


def memory_of(resources: Mapping[str, Any] | None) -> dict[str, int]:
    """Return `memory` and the huge pages among a Node's resources, in bytes."""
    return {
        intern(str(name)): parse_capacity(amount)
        for name, amount in (resources or {}).items()
        if name == "memory" or str(name).startswith("hugepages-")
    }
