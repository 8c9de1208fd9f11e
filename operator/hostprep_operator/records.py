"""What the operator keeps of each object: slim, frozen, and equal where nothing of ours changed.

Two equal records mean that nothing is to be done. `resource_version` takes no part in the
comparison, so a cache stores every record and only wakes somebody for one that differs: heartbeats,
kubelet's image lists and an agent's progress all compare equal. Strings that repeat from node to
node are interned, policies are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Any

from hostprep.api.conditions import Condition, ConditionStatus
from hostprep.api.names import (
    HOST_MEMORY_READY,
    HUGE_PAGES_ACCOUNTED,
    MARKS_ANNOTATION,
    MEMORY_ACCOUNTED,
)
from hostprep.api.node_resource import HugePageStatus, Phase, PoolEntry, entries_of
from hostprep.api.times import parse_time
from hostprep_operator.parsing import (
    condition_from,
    condition_of_type,
    devices_of,
    huge_pages_requested,
    memory_of,
    shared_policy,
)
from hostprep_operator.pool_record import POOL_COUNTS, PoolRecord, Readiness, Reclose

__all__ = [
    "OUR_CONDITIONS",
    "POOL_COUNTS",
    "AgentRecord",
    "HostMemoryNodeRecord",
    "NodeRecord",
    "PoolRecord",
    "PoolReport",
    "Readiness",
    "Reclose",
    "StatusRecord",
]

OUR_CONDITIONS = (HOST_MEMORY_READY, MEMORY_ACCOUNTED, HUGE_PAGES_ACCOUNTED)
"""Node conditions that the operator writes, in the order in which it writes them."""
_QUIET_PHASES = (Phase.PENDING, Phase.PREPARING, Phase.READY)
"""Phases whose message is progress at most: it would wake the operator for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A Node, as far as selecting, judging and marking it goes. Sizes in bytes, times in s."""

    name: str
    uid: str
    resource_version: str = field(default="", compare=False)
    created_s: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, Any], ...] = ()
    """Verbatim: a patch writes the list whole, others' taints included."""
    boot_id: str = ""
    ready: ConditionStatus = "Unknown"
    """Kubelet's own condition Ready."""
    ready_since_s: float = 0.0
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """Ours only, by type."""
    marks: str = ""
    """The annotation's text; see marks.py."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """`memory` and `hugepages-*`."""
    allocatable: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    """Regions that kubelet has to hand out, by pool."""
    deleting: bool = False

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> NodeRecord:
        """Read a Node. Raises KeyError without a name."""
        metadata, status = document["metadata"], document.get("status") or {}
        conditions = status.get("conditions") or ()
        created_s = parse_time(metadata.get("creationTimestamp")) or 0.0
        ready = condition_of_type(conditions, "Ready")
        return cls(
            name=intern(metadata["name"]),
            uid=metadata.get("uid") or "",
            resource_version=metadata.get("resourceVersion") or "",
            created_s=created_s,
            labels={intern(k): intern(v) for k, v in (metadata.get("labels") or {}).items()},
            taints=tuple((document.get("spec") or {}).get("taints") or ()),
            boot_id=(status.get("nodeInfo") or {}).get("bootID") or "",
            ready=ready.status if ready else "Unknown",
            ready_since_s=(ready.since_s if ready else None) or created_s,
            conditions={
                c["type"]: condition_from(c) for c in conditions if c.get("type") in OUR_CONDITIONS
            },
            marks=(metadata.get("annotations") or {}).get(MARKS_ANNOTATION) or "",
            capacity=memory_of(status.get("capacity")),
            allocatable=memory_of(status.get("allocatable")),
            devices=devices_of(status.get("allocatable")),
            deleting=bool(metadata.get("deletionTimestamp")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """What an agent says of one pool, less its progress and its list of regions."""

    name: str
    uid: str = ""
    generation: int = 0
    phase: Phase = Phase.PENDING
    reason: str = ""
    message: str = ""
    backing: str = ""
    wanted_bytes: int = 0
    ready_bytes: int = 0
    shared_bytes: int = 0
    """In tmpfs: ordinary memory, which no count of huge pages shows."""
    damaged: tuple[str, ...] = ()
    """Regions by name."""
    regions: int = 0
    """How many there are."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PoolReport:
        """Read one item of `status.pools`; an unknown phase is not ready."""
        phase = document.get("phase")
        known = Phase(phase) if phase in set(Phase) else Phase.PENDING
        regions = document.get("regions") or ()
        quiet = known in _QUIET_PHASES
        return cls(
            name=intern(str(document.get("name", ""))),
            uid=intern(str(document.get("uid") or "")),
            generation=int(document.get("generation") or 0),
            phase=known,
            reason="" if quiet else intern(str(document.get("reason") or "")),
            message="" if quiet else str(document.get("message") or ""),
            backing=intern(str(document.get("backing") or "")),
            wanted_bytes=int(document.get("wantedBytes") or 0),
            ready_bytes=int(document.get("readyBytes") or 0),
            shared_bytes=sum(
                int(region.get("sizeBytes") or 0)
                for region in regions
                if not str(region.get("backing") or "").startswith("HugeTLB")
            ),
            damaged=tuple(str(r.get("name")) for r in regions if r.get("state") == "Damaged"),
            regions=len(regions),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRecord:
    """A HostMemoryNode's status."""

    observed_generation: int = 0
    boot_id: str = ""
    pools: tuple[PoolReport, ...] = ()
    huge_pages: tuple[HugePageStatus, ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StatusRecord:
        """Read a status, which may be empty still."""
        return cls(
            observed_generation=int(document.get("observedGeneration") or 0),
            boot_id=str(document.get("bootID") or ""),
            pools=tuple(PoolReport.from_json(item) for item in document.get("pools") or ()),
            huge_pages=tuple(
                HugePageStatus.from_json(item) for item in document.get("hugePages") or ()
            ),
        )

    def pool(self, name: str) -> PoolReport | None:
        """Return what is said of that pool."""
        return next((report for report in self.pools if report.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryNodeRecord:
    """A HostMemoryNode."""

    name: str
    uid: str
    resource_version: str = field(default="", compare=False)
    generation: int = 0
    created_s: float = 0.0
    owner_uid: str = ""
    """Of the Node that owns it; empty where nobody does."""
    entries: tuple[PoolEntry, ...] = ()
    status: StatusRecord = field(default_factory=StatusRecord)
    deleting: bool = False

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> HostMemoryNodeRecord:
        """Read a HostMemoryNode. Raises KeyError without a name."""
        metadata = document["metadata"]
        owners = metadata.get("ownerReferences") or ()
        return cls(
            name=intern(metadata["name"]),
            uid=metadata.get("uid") or "",
            resource_version=metadata.get("resourceVersion") or "",
            generation=int(metadata.get("generation") or 0),
            created_s=parse_time(metadata.get("creationTimestamp")) or 0.0,
            owner_uid=next((o.get("uid") or "" for o in owners if o.get("kind") == "Node"), ""),
            entries=tuple(_entry(e) for e in entries_of(document)),
            status=StatusRecord.from_json(document.get("status") or {}),
            deleting=bool(metadata.get("deletionTimestamp")),
        )

    def entry(self, name: str) -> PoolEntry | None:
        """Return the entry of that pool."""
        return next((entry for entry in self.entries if entry.name == name), None)


def _entry(read: PoolEntry) -> PoolEntry:
    return replace(
        read, name=intern(read.name), uid=intern(read.uid), policy=shared_policy(read.policy)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """The Pod of a node's agent. Its readiness is its last verification round."""

    node_name: str
    name: str
    uid: str
    resource_version: str = field(default="", compare=False)
    ready: bool = False
    ready_since_s: float = 0.0
    """When it became ready, or stopped to be; the Pod's creation until then."""
    deleting: bool = False
    huge_pages_bytes: Mapping[str, int] = field(default_factory=dict)
    """What it asks kubelet for, by resource: a placeholder for the pools' pages, which it does
    not use in its own cgroup. So the scheduler gives them to nobody else."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> AgentRecord:
        """Read a Pod; `node_name` is empty while none is assigned. Raises KeyError."""
        metadata, status = document["metadata"], document.get("status") or {}
        spec = document.get("spec") or {}
        ready = condition_of_type(status.get("conditions") or (), "Ready")
        created_s = parse_time(metadata.get("creationTimestamp")) or 0.0
        return cls(
            node_name=intern(spec.get("nodeName") or ""),
            name=metadata["name"],
            uid=metadata.get("uid") or "",
            resource_version=metadata.get("resourceVersion") or "",
            huge_pages_bytes=huge_pages_requested(spec.get("containers") or ()),
            ready=ready is not None and ready.status == "True",
            ready_since_s=(ready.since_s if ready else None) or created_s,
            deleting=bool(metadata.get("deletionTimestamp")),
        )
