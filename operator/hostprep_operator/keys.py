"""What can be looked at, and in which kinds objects come."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

__all__ = ["Key", "Kind"]


class Kind(StrEnum):
    """The kinds of objects that the operator watches."""

    NODE = "node"
    POOL = "pool"
    HOST_MEMORY_NODE = "hostmemorynode"
    AGENT = "agent"


class Key(NamedTuple):
    """One thing to reconcile."""

    kind: Literal["node", "pool"]
    name: str
