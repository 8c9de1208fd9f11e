"""The operator's record of each object: slim, frozen, and equal where nothing relevant changed.

Two equal records mean that there is nothing to do. `resource_version` takes no part in the
comparison, so the cache stores every record and only wakes a worker for one that differs:
heartbeats, kubelet's image lists and an agent's progress all compare equal. Strings that repeat
from node to node are interned, policies are shared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Any

from hostprep.api.conditions import Condition, ConditionStatus, parse_time
from hostprep.api.names import (
    CLUSTER_AUTOSCALER_TAINT,
    DEVICE_RESOURCE_PREFIX,
    HOST_MEMORY_READY,
    HUGE_PAGES_ACCOUNTED,
    MARKS_ANNOTATION,
    MEMORY_ACCOUNTED,
)
from hostprep.api.node_resource import HugePageStatus, Phase, PoolEntry, entries_of, policy_of
from hostprep.units import parse_capacity

OUR_CONDITIONS = (HOST_MEMORY_READY, MEMORY_ACCOUNTED, HUGE_PAGES_ACCOUNTED)
"""Node conditions that the operator writes, in the order in which it writes them."""
_QUIET_PHASES = (Phase.PENDING, Phase.PREPARING, Phase.READY)
"""Phases whose message is progress at most: it would wake the operator for nothing."""
POOL_COUNTS = (
    "selected",
    "ready",
    "updated",
    "preparing",
    "degraded",
    "failed",
    "releasing",
    "unavailable",
)
"""Whole numbers in a HostMemoryPool's status."""
_MAX_SHARED = 1024
_shared_policies: dict[str, Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclose:
    """What closes a node again, by cause: `Taint`, or `LabelOnly`."""

    reboot: str = "Taint"
    repair: str = "LabelOnly"
    resize: str = "LabelOnly"


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """`spec.readiness`: how nodes are marked."""

    required: bool = True
    profile: str = "ClusterAutoscaler"
    taint_key: str | None = None
    reclose: Reclose = field(default_factory=Reclose)
    deadline_s: float = 600.0
    on_deadline: str = "StayClosed"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Readiness:
        """Read the field; what is missing gets the resource's defaults."""
        reclose = document.get("reclose") or {}
        return cls(
            required=document.get("required", True) is not False,
            profile=document.get("profile") or "ClusterAutoscaler",
            taint_key=document.get("taintKey") or None,
            reclose=Reclose(
                reboot=reclose.get("reboot") or "Taint",
                repair=reclose.get("repair") or "LabelOnly",
                resize=reclose.get("resize") or "LabelOnly",
            ),
            deadline_s=float(document.get("deadlineSeconds") or 600),
            on_deadline=document.get("onDeadline") or "StayClosed",
        )

    @property
    def taint(self) -> str | None:
        """The taint key that is ours to set and remove; None where the profile uses none."""
        if self.profile not in ("ClusterAutoscaler", "Karpenter"):
            return None
        return self.taint_key or CLUSTER_AUTOSCALER_TAINT

    @property
    def policy(self) -> tuple[object, ...]:
        """What only one pool of a node can decide (see `Conflicted`)."""
        return (self.profile, self.taint, self.reclose, self.deadline_s, self.on_deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord:
    """A HostMemoryPool."""

    name: str
    uid: str
    resource_version: str = field(default="", compare=False)
    generation: int = 0
    created_s: float = 0.0
    priority: int = 0
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Empty selects every node."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """The fields that nodes get, verbatim."""
    readiness: Readiness = field(default_factory=Readiness)
    accounting_require: bool = False
    max_unavailable: int | str = 1
    """A number of nodes, or a share such as 10%."""
    deletion_policy: str = "Release"
    observed_generation: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of the status, by the names in POOL_COUNTS."""
    ready_size: str = ""
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    deleting: bool = False

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PoolRecord:
        """Read a HostMemoryPool. Raises KeyError without a name."""
        metadata, spec = document["metadata"], document.get("spec") or {}
        status = document.get("status") or {}
        return cls(
            name=intern(metadata["name"]),
            uid=intern(metadata.get("uid") or ""),
            resource_version=metadata.get("resourceVersion") or "",
            generation=int(metadata.get("generation") or 0),
            created_s=parse_time(metadata.get("creationTimestamp")) or 0.0,
            priority=int(spec.get("priority") or 0),
            node_selector=dict(spec.get("nodeSelector") or {}),
            policy=shared_policy(policy_of(spec)),
            readiness=Readiness.from_json(spec.get("readiness") or {}),
            accounting_require=bool((spec.get("accounting") or {}).get("require")),
            max_unavailable=(spec.get("rollout") or {}).get("maxUnavailable") or 1,
            deletion_policy=spec.get("deletionPolicy") or "Release",
            observed_generation=int(status.get("observedGeneration") or 0),
            counts={name: int(status[name]) for name in POOL_COUNTS if name in status},
            ready_size=str(status.get("readySize") or ""),
            conditions={c["type"]: condition_from(c) for c in status.get("conditions") or ()},
            deleting=bool(metadata.get("deletionTimestamp")),
        )

    @property
    def rank(self) -> tuple[int, float, str]:
        """Pools in the order in which they rule: by priority, age and name."""
        return (-self.priority, self.created_s, self.name)

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether every pair of the selector stands among a node's labels."""
        return all(labels.get(key) == value for key, value in self.node_selector.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A Node, as far as selecting and marking it goes. Sizes in bytes, times in s."""

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
    """An agent's report of one pool, less its progress and its list of regions."""

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
        """Return the report of that pool."""
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
    """Of the Node that owns it; empty where none does."""
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
    not use in its own cgroup. So the scheduler gives them to no other pod."""

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
