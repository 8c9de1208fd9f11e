"""Reading raw JSON into small values: quantities, conditions, and policies that nodes share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal, DecimalException
from sys import intern
from typing import Any

from hostprep.api.conditions import Condition
from hostprep.api.names import DEVICE_RESOURCE_PREFIX

__all__ = [
    "condition_from",
    "condition_of_type",
    "devices_of",
    "huge_pages_requested",
    "memory_of",
    "parse_bytes",
    "shared_policy",
]

_SUFFIXES = {"m": Decimal("0.001"), "k": Decimal(1000)} | {
    letter + "i": Decimal(1 << shift)
    for letter, shift in zip("KMGTPE", range(10, 70, 10), strict=True)
}
_SUFFIXES |= {
    letter: Decimal(10) ** power for letter, power in zip("MGTPE", range(6, 21, 3), strict=True)
}
_MAX_SHARED = 1024
_shared_policies: dict[str, Mapping[str, Any]] = {}


def parse_bytes(text: object) -> int:
    """Return a resource quantity in bytes, rounded down; 0 for anything that is none.

    A Node's capacity is the API server's own text, and zero is common there.
    """
    text = str(text).strip()
    for size in (2, 1):
        if text[-size:] in _SUFFIXES and len(text) > size:
            return _number(text[:-size], _SUFFIXES[text[-size:]])
    return _number(text, Decimal(1))


def _number(text: str, factor: Decimal) -> int:
    try:
        value = Decimal(text) * factor
        return int(value) if value.is_finite() and 0 < value < Decimal(1 << 63) else 0
    except DecimalException:
        return 0


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
        intern(str(name).removeprefix(DEVICE_RESOURCE_PREFIX)): parse_bytes(amount)
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
                total[intern(str(name))] = total.get(str(name), 0) + parse_bytes(amount)
    return total


def memory_of(resources: Mapping[str, Any] | None) -> dict[str, int]:
    """Return `memory` and the huge pages among a Node's resources, in bytes."""
    return {
        intern(str(name)): parse_bytes(amount)
        for name, amount in (resources or {}).items()
        if name == "memory" or str(name).startswith("hugepages-")
    }
