"""What the operator keeps of a HostMemoryPool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import Any

from hostprep.api.conditions import Condition
from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from hostprep.api.pool_policy import policy_of
from hostprep.api.times import parse_time
from hostprep_operator.parsing import condition_from, shared_policy

__all__ = ["POOL_COUNTS", "PoolRecord", "Readiness", "Reclose"]

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
