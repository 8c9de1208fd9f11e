"""What of a HostMemoryPool's spec a node needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

POLICY_FIELDS = (
    "size",
    "percent",
    "sizing",
    "backings",
    "regions",
    "reserve",
    "priority",
    "access",
    "lease",
    "scrub",
    "attach",
    "boot",
    "deletionPolicy",
)
"""Fields of a HostMemoryPool's spec that a node needs: copied verbatim. Others, such as readiness
and rollout, are the operator's own: changing them rewrites no HostMemoryNode."""


def policy_of(pool_spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node's part of a HostMemoryPool's spec."""
    return {name: pool_spec[name] for name in POLICY_FIELDS if name in pool_spec}
