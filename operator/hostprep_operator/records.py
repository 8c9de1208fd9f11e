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

from hostprep.api.codec import JsonObject, json_field
from hostprep.api.conditions import Condition, ConditionStatus, parse_time
from hostprep.api.names import (
    CLUSTER_AUTOSCALER_TAINT,
    DEVICE_RESOURCE_PREFIX,
    HOST_MEMORY_READY,
    HOST_MEMORY_RELEASING,
    HUGE_PAGES_ACCOUNTED,
    MARKS_ANNOTATION,
    MEMORY_ACCOUNTED,
)
from hostprep.api.node_resource import (
    NodeStatus,
    Phase,
    PoolEntry,
    PoolStatus,
    entries_of,
    policy_of,
)
from hostprep.api.selector import NodeSelection
from hostprep.units import parse_capacity

OUR_CONDITIONS = (
    HOST_MEMORY_READY,
    MEMORY_ACCOUNTED,
    HUGE_PAGES_ACCOUNTED,
    HOST_MEMORY_RELEASING,
)
"""Node conditions that the operator writes, in the order in which it writes them."""
_QUIET_PHASES = (Phase.PENDING, Phase.PREPARING, Phase.READY)
"""Phases whose message is progress at most: it would wake the operator for nothing."""
POOL_COUNTS = (
    "selected",
    "ready",
    "updated",
    "preparing",
    "blocked",
    "degraded",
    "failed",
    "leaving",
    "releasing",
    "unavailable",
    "leased",
)
"""Whole numbers in a HostMemoryPool's status."""
DEFAULT_GRACE_S = 600.0
"""As the CustomResourceDefinition has it: for entries that were written before it had any."""
DEFAULT_MAX_UNAVAILABLE = "10%"
GONE = -1
"""Generation of a pool that is gone: what was granted while it was there holds no more."""
_VIRTUAL_NODES = (
    ("eks.amazonaws.com/compute-type", "fargate"),
    ("type", "virtual-kubelet"),
)
"""Labels of nodes that are no machines: a pool of all nodes does not mean them."""
_MAX_SHARED = 1024
_shared_policies: dict[str, Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclose(JsonObject):
    """What closes a node again, by cause: `Taint`, or `LabelOnly`."""

    reboot: str = "Taint"
    repair: str = "LabelOnly"
    resize: str = "LabelOnly"


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness(JsonObject):
    """`spec.readiness`: how nodes are marked."""

    required: bool = True
    profile: str = "ClusterAutoscaler"
    taint_key: str | None = None
    reclose: Reclose = field(default_factory=Reclose)
    deadline_s: float = field(default=600.0, metadata=json_field(key="deadlineSeconds"))
    on_deadline: str = "StayClosed"

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
class Partition:
    """`spec.rollout.partition`: the nodes that alone begin anything; one of the two is set."""

    nodes: int | str | None = None
    """So many, or a share such as 10%, in the order of their names."""
    selection: NodeSelection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """`spec.rollout`: how what the pool asks for reaches its nodes."""

    max_unavailable: int | str = DEFAULT_MAX_UNAVAILABLE
    """A number of nodes, or a share such as 10%."""
    paused: bool = False
    partition: Partition | None = None

    @classmethod
    def from_spec(cls, document: Mapping[str, Any] | None) -> Rollout:
        """Read `spec.rollout` of a pool."""
        rollout = document or {}
        given = rollout.get("partition")
        partition = None
        if given:
            labels = given.get("nodeSelector")
            partition = Partition(
                nodes=given.get("nodes"),
                selection=NodeSelection.from_spec({"nodeSelector": labels}) if labels else None,
            )
        return cls(
            max_unavailable=rollout.get("maxUnavailable") or DEFAULT_MAX_UNAVAILABLE,
            paused=bool(rollout.get("paused")),
            partition=partition,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRules:
    """`spec.release`: when memory goes that is no longer asked for."""

    grace_s: float = DEFAULT_GRACE_S
    """For how long it is kept; 0: by the explicit word Immediately."""

    @classmethod
    def from_policy(cls, policy: Mapping[str, Any]) -> ReleaseRules:
        """Read a pool's spec, or an entry's copy of it; what cannot be read is the default."""
        release = policy.get("release") or {}
        if release.get("when") == "Immediately":
            return cls(grace_s=0.0)
        grace_s = release.get("gracePeriodSeconds")
        if isinstance(grace_s, int) and not isinstance(grace_s, bool) and grace_s > 0:
            return cls(grace_s=float(grace_s))
        return cls()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of every object. Times are seconds since the epoch."""

    name: str
    uid: str
    resource_version: str = field(default="", compare=False)
    generation: int = 0
    created_s: float = 0.0
    deleting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord(Record):
    """A HostMemoryPool."""

    priority: int = 0
    selection: NodeSelection = field(default_factory=lambda: NodeSelection.from_spec({}))
    policy: Mapping[str, Any] = field(default_factory=dict)
    """The fields that nodes get, verbatim."""
    readiness: Readiness = field(default_factory=Readiness)
    accounting_require: bool = False
    rollout: Rollout = field(default_factory=Rollout)
    release: ReleaseRules = field(default_factory=ReleaseRules)
    deletion_policy: str = "Release"
    gone: bool = False
    """Deleted, by a read of the API server, while nodes still have entries of it."""
    observed_generation: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of the status, by the names in POOL_COUNTS."""
    ready_size: str = ""
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PoolRecord:
        """Read a HostMemoryPool. Raises KeyError without a name."""
        spec, status = document.get("spec") or {}, document.get("status") or {}
        return cls(
            **_common(document),
            priority=int(spec.get("priority") or 0),
            selection=NodeSelection.from_spec(spec),
            policy=_shared_policy(policy_of(spec)),
            readiness=Readiness.from_json(spec.get("readiness")),
            accounting_require=bool((spec.get("accounting") or {}).get("require")),
            rollout=Rollout.from_spec(spec.get("rollout")),
            release=ReleaseRules.from_policy(spec),
            deletion_policy=spec.get("deletionPolicy") or "Release",
            observed_generation=int(status.get("observedGeneration") or 0),
            counts={name: int(status[name]) for name in POOL_COUNTS if name in status},
            ready_size=str(status.get("readySize") or ""),
            conditions={c["type"]: _condition(c) for c in status.get("conditions") or ()},
        )

    @property
    def rank(self) -> tuple[int, float, str]:
        """Pools in the order in which they rule: by priority, age and name."""
        return (-self.priority, self.created_s, self.name)

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is to hold the pool."""
        if self.gone or not self.selection.matches(labels):
            return False
        return not self.selection.selects_all or not any(
            labels.get(key) == value for key, value in _VIRTUAL_NODES
        )

    def as_gone(self) -> PoolRecord:
        """Return what is left to go by once the pool was deleted: nobody can pause it any more."""
        rollout = Rollout(max_unavailable=self.rollout.max_unavailable)
        return replace(self, gone=True, generation=GONE, rollout=rollout)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord(Record):
    """A Node, as far as selecting and marking it goes."""

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
    """See `resources_of`."""
    allocatable: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> NodeRecord:
        """Read a Node. Raises KeyError without a name."""
        metadata, status = document["metadata"], document.get("status") or {}
        ready, ready_since_s = _ready(document)
        return cls(
            **_common(document),
            labels={intern(k): intern(v) for k, v in (metadata.get("labels") or {}).items()},
            taints=tuple((document.get("spec") or {}).get("taints") or ()),
            boot_id=(status.get("nodeInfo") or {}).get("bootID") or "",
            ready=ready,
            ready_since_s=ready_since_s,
            conditions={
                c["type"]: _condition(c)
                for c in status.get("conditions") or ()
                if c.get("type") in OUR_CONDITIONS
            },
            marks=(metadata.get("annotations") or {}).get(MARKS_ANNOTATION) or "",
            capacity=resources_of(status.get("capacity")),
            allocatable=resources_of(status.get("allocatable")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryNodeRecord(Record):
    """A HostMemoryNode."""

    owner_uid: str = ""
    """Of the Node that owns it; empty where none does."""
    entries: tuple[PoolEntry, ...] = ()
    status: NodeStatus = field(default_factory=NodeStatus)
    """Without what is progress, and without what only people read."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> HostMemoryNodeRecord:
        """Read a HostMemoryNode. Raises KeyError without a name."""
        owners = document["metadata"].get("ownerReferences") or ()
        status = NodeStatus.from_json(_of_interest(document.get("status") or {}))
        return cls(
            **_common(document),
            owner_uid=next((o.get("uid") or "" for o in owners if o.get("kind") == "Node"), ""),
            entries=tuple(map(_entry, entries_of(document))),
            status=replace(status, pools=tuple(map(_report, status.pools))),
        )

    def entry(self, name: str) -> PoolEntry | None:
        """Return the entry of that pool."""
        return next((entry for entry in self.entries if entry.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord(Record):
    """The Pod of a node's agent. Its readiness is its last verification round."""

    node_name: str
    """Empty while none is assigned."""
    ready: bool = False
    ready_since_s: float = 0.0
    """When it became ready, or stopped to be; the Pod's creation until then."""
    huge_pages_bytes: Mapping[str, int] = field(default_factory=dict)
    """What it asks kubelet for, by resource: a placeholder for the pools' pages, which it does
    not use in its own cgroup. So the scheduler gives them to no other pod."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> AgentRecord:
        """Read a Pod. Raises KeyError without a name."""
        spec = document.get("spec") or {}
        ready, ready_since_s = _ready(document)
        return cls(
            **_common(document),
            node_name=intern(spec.get("nodeName") or ""),
            ready=ready == "True",
            ready_since_s=ready_since_s,
            huge_pages_bytes=_huge_pages_requested(spec.get("containers") or ()),
        )


def resources_of(resources: Mapping[str, Any] | None) -> dict[str, int]:
    """Return a Node's memory and huge pages, in bytes, and its regions that are devices."""
    return {
        intern(name): parse_capacity(amount)
        for name, amount in (resources or {}).items()
        if name == "memory" or name.startswith(("hugepages-", DEVICE_RESOURCE_PREFIX))
    }


def _common(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Record."""
    metadata = document["metadata"]
    return {
        "name": intern(metadata["name"]),
        "uid": intern(metadata.get("uid") or ""),
        "resource_version": metadata.get("resourceVersion") or "",
        "generation": int(metadata.get("generation") or 0),
        "created_s": _created_s(document),
        "deleting": bool(metadata.get("deletionTimestamp")),
    }


def _created_s(document: Mapping[str, Any]) -> float:
    return parse_time(document["metadata"].get("creationTimestamp")) or 0.0


def _ready(document: Mapping[str, Any]) -> tuple[ConditionStatus, float]:
    """Return the condition Ready of a Node or Pod, and since when it is so."""
    for item in (document.get("status") or {}).get("conditions") or ():
        if item.get("type") == "Ready":
            ready = Condition.from_json(item)
            return ready.status, ready.since_s or _created_s(document)
    return "Unknown", _created_s(document)


def _condition(item: Mapping[str, Any]) -> Condition:
    """Read a condition, its strings interned."""
    read = Condition.from_json(item)
    return replace(
        read, type=intern(read.type), reason=intern(read.reason), message=intern(read.message)
    )


def _entry(read: PoolEntry) -> PoolEntry:
    return replace(
        read, name=intern(read.name), uid=intern(read.uid), policy=_shared_policy(read.policy)
    )


_STATUS_KEYS = ("observedGeneration", "bootID", "hugePages")
_CONDITIONS = ("ResizeBlocked", "Releasing")
"""Those of the agent's that tell since when a node is in a state; they have no others' names."""
_POOL_KEYS = (
    *("name", "uid", "generation", "phase", "reason", "message", "backing", "readyBytes"),
    "regionsLeased",
)


def _of_interest(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a status without what is progress or for people: decoding costs, 5,000 times."""
    kept = {key: status[key] for key in _STATUS_KEYS if key in status}
    pools = status.get("pools") or ()
    # Without their words, which are no news here and may change with every lease.
    conditions = [
        {key: condition.get(key) for key in ("type", "status", "lastTransitionTime")}
        for condition in status.get("conditions") or ()
        if condition.get("type") in _CONDITIONS and condition.get("status") == "True"
    ]
    return {**kept, "pools": list(map(_pool_of_interest, pools)), "conditions": conditions}


def _pool_of_interest(pool: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: pool[key] for key in _POOL_KEYS if key in pool}
    return {**kept, "regions": list(map(_region_of_interest, pool.get("regions") or ()))}


def _region_of_interest(region: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size and the pages, and what there are events of; a lease is no news."""
    found = {"sizeBytes": region.get("sizeBytes"), "backing": region.get("backing")}
    kept, given_up = region.get("kept") or {}, region.get("givenUp")
    if kept.get("refused") or given_up:
        found["name"] = region.get("name")
        found["kept"] = kept if kept.get("refused") else None
        found["givenUp"] = given_up
    return found


def _report(read: PoolStatus) -> PoolStatus:
    quiet = read.phase in _QUIET_PHASES
    return replace(
        read,
        name=intern(read.name),
        uid=intern(read.uid),
        reason="" if quiet else intern(read.reason),
        message="" if quiet else read.message,
        backing=intern(read.backing),
        regions_leased=min(read.regions_leased, 1),  # how many is no news
        regions=tuple(replace(it, backing=intern(it.backing)) for it in read.regions),
    )


def _shared_policy(policy: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return one object for equal policies: thousands of nodes carry the same few."""
    if len(_shared_policies) > _MAX_SHARED:
        _shared_policies.clear()
    return _shared_policies.setdefault(json.dumps(policy, sort_keys=True), policy)


def _huge_pages_requested(containers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the huge pages that a Pod's containers ask for, in bytes by resource."""
    total: dict[str, int] = {}
    for container in containers:
        requests = (container.get("resources") or {}).get("requests") or {}
        for name, amount in requests.items():
            if name.startswith("hugepages-"):
                total[intern(name)] = total.get(name, 0) + parse_capacity(amount)
    return total
