"""The HostMemoryNode resource: what one node must hold (operator), and what it holds (agent)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hostprep.api.conditions import Condition
from hostprep.api.times import format_time, parse_time

__all__ = [
    "HugePageStatus",
    "NodeStatus",
    "Phase",
    "PoolEntry",
    "PoolStatus",
    "RegionStatus",
    "Step",
    "entries_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEntry:
    """One item of `spec.pools`: what the node must hold, or must give back."""

    name: str
    uid: str = ""
    generation: int = 0
    """The HostMemoryPool's generation that the policy was copied from."""
    absent: bool = False
    """`state: Absent`: the only instruction that releases memory."""
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uses_devices(self) -> bool:
        """Whether the regions are kubelet's to hand out (`attach.mode: devicePlugin`)."""
        attach = self.policy.get("attach")
        mode = attach.get("mode") if isinstance(attach, Mapping) else None
        return mode == "devicePlugin" and not self.absent

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PoolEntry:
        """Read one item. Raises KeyError without a name."""
        return cls(
            name=str(document["name"]),
            uid=str(document.get("uid") or ""),
            generation=int(document.get("generation") or 0),
            absent=document.get("state") == "Absent",
            policy=document.get("policy") or {},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the item as the API server takes it."""
        document: dict[str, Any] = {
            "name": self.name,
            "uid": self.uid,
            "generation": self.generation,
            "state": "Absent" if self.absent else "Present",
        }
        if self.policy:
            document["policy"] = dict(self.policy)
        return document


def entries_of(document: Mapping[str, Any]) -> tuple[PoolEntry, ...]:
    """Return a HostMemoryNode's `spec.pools`."""
    spec = document.get("spec") or {}
    return tuple(PoolEntry.from_json(item) for item in spec.get("pools") or ())


class Phase(StrEnum):
    """Where a pool stands on a node."""

    PENDING = "Pending"
    """Not begun."""
    PREPARING = "Preparing"
    READY = "Ready"
    """All that is asked for is populated, pinned, published, and was verified in the last round."""
    RESIZING = "Resizing"
    """Sound and published in part while regions are added, removed or rebuilt, or wait to be."""
    DEGRADED = "Degraded"
    """Some regions are damaged, gone or shrunk; the sound ones are published."""
    FAILED = "Failed"
    """Cannot be had; the reason says why and the message what to do."""
    RELEASING = "Releasing"
    """Asked to be absent; waits for leases, or is being released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionStatus:
    """One region as the agent found it in its last round."""

    name: str
    size_bytes: int
    backing: str
    placement: str
    state: str
    """Free, Leased, Dirty, Retained, Damaged, Unpublished or Unfinished."""
    message: str = ""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RegionStatus:
        """Read one item."""
        return cls(
            name=str(document.get("name", "")),
            size_bytes=int(document.get("sizeBytes") or 0),
            backing=str(document.get("backing") or ""),
            placement=str(document.get("placement") or ""),
            state=str(document.get("state") or ""),
            message=str(document.get("message") or ""),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the item as the API server takes it."""
        document: dict[str, Any] = {
            "name": self.name,
            "sizeBytes": self.size_bytes,
            "backing": self.backing,
            "placement": self.placement,
            "state": self.state,
        }
        return document | ({"message": self.message} if self.message else {})


@dataclass(frozen=True, slots=True)
class Step:
    """How long one kind of work took in the last preparation that changed something."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """One item of `status.pools`. A pool that was released has none."""

    name: str
    uid: str = ""
    generation: int = 0
    """Of the entry that it answers."""
    phase: Phase = Phase.PENDING
    reason: str = ""
    message: str = ""
    backing: str = ""
    wanted_bytes: int = 0
    ready_bytes: int = 0
    """Sound and published."""
    progress_percent: int | None = None
    """Of what is to be populated; only while preparing."""
    regions_leased: int = 0
    blocked: tuple[str, ...] = ()
    """Regions that must change and are leased (ResizeBlocked)."""
    handoff_generation: int = 0
    ready_since_s: float | None = None
    steps: tuple[Step, ...] = ()
    regions: tuple[RegionStatus, ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PoolStatus:
        """Read one item; an unknown phase (of a newer agent) is not ready."""
        phase = document.get("phase")
        return cls(
            name=str(document.get("name", "")),
            uid=str(document.get("uid") or ""),
            generation=int(document.get("generation") or 0),
            phase=Phase(phase) if phase in set(Phase) else Phase.PENDING,
            reason=str(document.get("reason") or ""),
            message=str(document.get("message") or ""),
            backing=str(document.get("backing") or ""),
            wanted_bytes=int(document.get("wantedBytes") or 0),
            ready_bytes=int(document.get("readyBytes") or 0),
            progress_percent=document.get("progressPercent"),
            regions_leased=int(document.get("regionsLeased") or 0),
            blocked=tuple(document.get("blocked") or ()),
            handoff_generation=int(document.get("handoffGeneration") or 0),
            ready_since_s=parse_time(document.get("readySince")),
            steps=tuple(
                Step(str(step.get("name")), float(step.get("seconds") or 0))
                for step in document.get("steps") or ()
            ),
            regions=tuple(RegionStatus.from_json(item) for item in document.get("regions") or ()),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the item as the API server takes it."""
        document: dict[str, Any] = {
            "name": self.name,
            "uid": self.uid,
            "generation": self.generation,
            "phase": self.phase.value,
            "reason": self.reason,
            "message": self.message,
            "backing": self.backing,
            "wantedBytes": self.wanted_bytes,
            "readyBytes": self.ready_bytes,
            "regionsLeased": self.regions_leased,
            "handoffGeneration": self.handoff_generation,
            "regions": [region.to_json() for region in self.regions],
        }
        if self.progress_percent is not None:
            document["progressPercent"] = self.progress_percent
        if self.blocked:
            document["blocked"] = list(self.blocked)
        if self.ready_since_s is not None:
            document["readySince"] = format_time(self.ready_since_s)
        if self.steps:
            document["steps"] = [{"name": s.name, "seconds": s.seconds} for s in self.steps]
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePageStatus:
    """One size of huge pages on the node, in pages: needed to tell what kubelet may offer."""

    page_bytes: int
    total: int
    held: int
    """By our pools: as regions, or added for them."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> HugePageStatus:
        """Read one item."""
        return cls(
            page_bytes=int(document.get("pageBytes") or 0),
            total=int(document.get("total") or 0),
            held=int(document.get("held") or 0),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the item as the API server takes it."""
        return {"pageBytes": self.page_bytes, "total": self.total, "held": self.held}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """The whole `status` of a HostMemoryNode."""

    observed_generation: int = 0
    """The HostMemoryNode's generation that the agent has read and acts upon."""
    boot_id: str = ""
    agent_version: str = ""
    summary: str = ""
    """One short line for the printer column."""
    pools: tuple[PoolStatus, ...] = ()
    huge_pages: tuple[HugePageStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None) -> NodeStatus:
        """Read a status; an empty one where there is none yet."""
        document = document or {}
        return cls(
            observed_generation=int(document.get("observedGeneration") or 0),
            boot_id=str(document.get("bootID") or ""),
            agent_version=str(document.get("agentVersion") or ""),
            summary=str(document.get("summary") or ""),
            pools=tuple(PoolStatus.from_json(item) for item in document.get("pools") or ()),
            huge_pages=tuple(
                HugePageStatus.from_json(item) for item in document.get("hugePages") or ()
            ),
            conditions=tuple(Condition.from_json(c) for c in document.get("conditions") or ()),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the status as the API server takes it."""
        return {
            "observedGeneration": self.observed_generation,
            "bootID": self.boot_id,
            "agentVersion": self.agent_version,
            "summary": self.summary,
            "pools": [pool.to_json() for pool in self.pools],
            "hugePages": [pages.to_json() for pages in self.huge_pages],
            "conditions": [condition.to_json() for condition in self.conditions],
        }

    def pool(self, name: str) -> PoolStatus | None:
        """Return what is said of that pool."""
        return next((pool for pool in self.pools if pool.name == name), None)
