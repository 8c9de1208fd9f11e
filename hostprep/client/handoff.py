"""The handoff's content. The contract is docs/handoff.md and the JSON Schema beside this file.

Plain frozen dataclasses: slots would need Python 3.10, and engines bring 3.9.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from hostprep.backing import MIB, Backing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["SCHEMA", "AttachAdvice", "Handoff", "Region"]

SCHEMA = "hostprep.dev/handoff/v1"


@dataclass(frozen=True)
class AttachAdvice:
    """What the agent, which knows the node, advises the engine that attaches."""

    register_chunk_bytes: int = 256 * MIB
    """First chunk for cuMemHostRegister; below 512 MiB the driver's table stays small."""
    populate_read_threads: int = 1
    """Threads for MADV_POPULATE_READ of base pages before registering."""
    skip_register: bool = False
    """True where GPUs use the host's page tables (ATS): registering would gain nothing."""


@dataclass(frozen=True)
class Region:
    """One populated file, and everything that an engine can check about it."""

    name: str
    path: str
    """Relative to the handoff's folder."""
    st_dev: int
    st_ino: int
    size_bytes: int
    backing: Backing
    page_bytes: int
    placement: str
    """`node:N` or `interleave`."""
    pinned: bool
    layout: Mapping[str, Any] | None = None
    """Offsets of pool groups, where the pool was sized for a model."""
    attach: AttachAdvice = AttachAdvice()

    @property
    def numa_node(self) -> int | None:
        """The node that holds all pages; None if they are interleaved."""
        prefix, _, number = self.placement.partition(":")
        return int(number) if prefix == "node" else None

    def to_json(self) -> dict[str, Any]:
        """Return the region as the handoff holds it."""
        return {
            "name": self.name,
            "path": self.path,
            "st_dev": self.st_dev,
            "st_ino": self.st_ino,
            "size_bytes": self.size_bytes,
            "backing": self.backing.value,
            "page_bytes": self.page_bytes,
            "placement": self.placement,
            "pinned": self.pinned,
            "layout": self.layout,
            "attach": {
                "register_chunk_bytes": self.attach.register_chunk_bytes,
                "populate_read_threads": self.attach.populate_read_threads,
                "skip_register": self.attach.skip_register,
            },
        }


@dataclass(frozen=True)
class Handoff:
    """One pool on one node, as published."""

    pool: str
    pool_uid: str
    generation: int
    """Counts publications of this boot that changed something."""
    boot_id: str
    agent_version: str
    regions: tuple[Region, ...]

    def region(self, name: str) -> Region | None:
        """Return the region of that name."""
        return next((region for region in self.regions if region.name == name), None)

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        document = {
            "schema": SCHEMA,
            "pool": self.pool,
            "pool_uid": self.pool_uid,
            "generation": self.generation,
            "boot_id": self.boot_id,
            "agent_version": self.agent_version,
            "regions": [region.to_json() for region in self.regions],
        }
        return json.dumps(document, indent=1).encode() + b"\n"
