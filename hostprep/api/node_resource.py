"""The HostMemoryNode resource: what one node must hold (operator), and what it holds (agent)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hostprep.api.codec import JsonObject, json_field
from hostprep.api.conditions import Condition, format_time, parse_time
from hostprep.api.versions import choice

# What another agent's status lacks reads as nothing, and is no error.
_TEXT = json_field(fallback="")
_NUMBER = json_field(fallback=0)
_OPTIONAL = json_field(omit_empty=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEntry(JsonObject):
    """One item of `spec.pools`: what the node must hold, or must give back."""

    name: str
    uid: str = ""
    generation: int = 0
    """The HostMemoryPool's generation that the policy was copied from."""
    absent: bool = field(
        default=False,
        metadata=json_field(
            key="state",
            encode=lambda absent: "Absent" if absent else "Present",
            decode=lambda state: state == "Absent",
        ),
    )
    """`state: Absent`: the only instruction that releases memory."""
    release_after_s: float | None = field(
        default=None,
        metadata=json_field(
            key="releaseAfter", omit_empty=True, encode=format_time, decode=parse_time
        ),
    )
    """The pool asks for the node no more: not before this, in whole seconds since the epoch, it
    becomes Absent. Until then it is Present as any other, for the agent too."""
    policy: Mapping[str, Any] = field(default_factory=dict, metadata=json_field(omit_empty=True))

    @property
    def uses_devices(self) -> bool:
        """Whether the regions are kubelet's to hand out (`attach.mode: DevicePlugin`)."""
        return not self.absent and choice(self.policy, "attach", "mode") == "DevicePlugin"

    @property
    def reserved_at_boot(self) -> bool:
        """Whether the agent installs a unit for the next boots (`boot: Systemd`)."""
        return not self.absent and choice(self.policy, "boot") == "Systemd"

    @property
    def scrubbed_on_claim(self) -> bool:
        """Whether regions stay dirty until the next claim (`scrub.when: OnClaim`)."""
        return choice(self.policy, "scrub", "when") == "OnClaim"


def entries_of(document: Mapping[str, Any]) -> tuple[PoolEntry, ...]:
    """Return a HostMemoryNode's `spec.pools`."""
    spec = document.get("spec") or {}
    return tuple(PoolEntry.from_json(item) for item in spec.get("pools") or ())


POLICY_FIELDS = (
    "size",
    "percent",
    "regionSize",
    "sizing",
    "backings",
    "regions",
    "reserve",
    "priority",
    "access",
    "lease",
    "scrub",
    "retention",
    "attach",
    "boot",
    "deletionPolicy",
    "release",
)
"""Fields of a HostMemoryPool's spec that a node needs: copied verbatim. Others, such as readiness
and rollout, are the operator's own: changing them rewrites no HostMemoryNode."""

OPERATORS_FIELDS = ("release", "deletionPolicy")
"""Those of them that only the operator reads, when the pool is gone: changing them changes no
memory, and takes no turn."""


def policy_of(pool_spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node's part of a HostMemoryPool's spec."""
    return {name: pool_spec[name] for name in POLICY_FIELDS if name in pool_spec}


class Phase(StrEnum):
    """Where a pool stands on a node."""

    PENDING = "Pending"
    """Not begun."""
    PREPARING = "Preparing"
    READY = "Ready"
    """All that is asked for is populated, resident, published and verified in the last round."""
    RESIZING = "Resizing"
    """Sound and published in part while regions are added, removed or rebuilt, or wait to be."""
    BLOCKED = "Blocked"
    """Sound and published as before: a change waits for leases, and for nothing else."""
    DEGRADED = "Degraded"
    """Some regions are damaged, gone or shrunk; the sound ones are published."""
    FAILED = "Failed"
    """Cannot be had; the reason says why and the message what to do."""
    RELEASING = "Releasing"
    """Asked to be absent; waits for leases, or is being released."""


def _time(key: str) -> dict[str, Any]:
    return json_field(key=key, omit_empty=True, encode=format_time, decode=parse_time)


MAX_REFUSED = 16
MAX_FIELD = 80
_FIELDS = frozenset(
    (
        *("additional", "attention", "cache", "compilation", "directory", "drafter", "engine"),
        *("environment", "groups", "hash", "identity", "kernel", "kv_connector", "kv_transfer"),
        *("layout", "load", "lora", "mamba", "model", "model_runner_v2", "packages", "parallel"),
        *("platform", "pooler", "quant", "ranks", "row_bytes", "scheduler", "speculative"),
        *("tokenizer", "weight_transfer", "weights"),
    )
)
OTHER_FIELD = "other"


def field_label(name: str) -> str:
    """Return the part of an identity's field that serves as a label's value: one of a few.

    Any engine of the pool may have written the name.
    """
    first = name.partition(".")[0].removesuffix("_config")
    return first if first in _FIELDS else OTHER_FIELD


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStatus(JsonObject):
    """What a region keeps for its owner. Names of fields only: values may be paths."""

    name: str = field(metadata=_TEXT)
    since_s: float | None = field(default=None, metadata=_time("since"))
    """When the owner first claimed the region."""
    reported_s: float | None = field(default=None, metadata=_time("reportedAt"))
    """When the engine decided whether to use what was kept."""
    recovered_blocks: int | None = field(default=None, metadata=_OPTIONAL)
    refused: tuple[str, ...] = field(default=(), metadata=_OPTIONAL)
    """Fields for which it did not, at most MAX_REFUSED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp(JsonObject):
    """What a region kept and keeps no longer, though its owner did not ask for that."""

    name: str = field(metadata=_TEXT)
    at_s: float | None = field(default=None, metadata=_time("at"))
    reason: str = field(metadata=_TEXT)
    """AgeLimit, Waiters, Claimed, Removed or Other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionStatus(JsonObject):
    """One region as the agent found it in its last round."""

    name: str = field(metadata=_TEXT)
    size_bytes: int = field(metadata=_NUMBER)
    backing: str = field(metadata=_TEXT)
    placement: str = field(metadata=_TEXT)
    state: str = field(metadata=_TEXT)
    """Free, Leased, Dirty, Retained, Damaged, Unpublished or Unfinished."""
    message: str = field(default="", metadata=_OPTIONAL)
    kept: KeptStatus | None = field(default=None, metadata=_OPTIONAL)
    given_up: GivenUp | None = field(default=None, metadata=_OPTIONAL)
    """The last time that it gave up what it kept."""


@dataclass(frozen=True, slots=True)
class Step(JsonObject):
    """How long one kind of work took in the last preparation that changed something."""

    name: str = field(metadata=_TEXT)
    seconds: float = field(metadata=_NUMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus(JsonObject):
    """One item of `status.pools`. A pool that was released has none."""

    name: str = field(metadata=_TEXT)
    uid: str = ""
    generation: int = 0
    """Of the entry that it answers."""
    phase: Phase = field(default=Phase.PENDING, metadata=json_field(fallback=Phase.PENDING))
    """One that is not known (of a newer agent) is not ready."""
    reason: str = ""
    message: str = ""
    backing: str = ""
    wanted_bytes: int = 0
    ready_bytes: int = 0
    """Sound and published."""
    progress_percent: int | None = field(default=None, metadata=_OPTIONAL)
    """Of what is to be populated; only while preparing."""
    regions_leased: int = 0
    blocked: tuple[str, ...] = field(default=(), metadata=_OPTIONAL)
    """Regions that must change and are leased (ResizeBlocked)."""
    handoff_generation: int = 0
    ready_since_s: float | None = field(default=None, metadata=_time("readySince"))
    steps: tuple[Step, ...] = field(default=(), metadata=_OPTIONAL)
    regions: tuple[RegionStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePageStatus(JsonObject):
    """One size of huge pages on the node, in pages: needed to tell what kubelet may offer."""

    page_bytes: int = field(metadata=_NUMBER)
    total: int = field(metadata=_NUMBER)
    held: int = field(metadata=_NUMBER)
    """By our pools: as regions, or added for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(JsonObject):
    """The whole `status` of a HostMemoryNode."""

    observed_generation: int = 0
    """The HostMemoryNode's generation that the agent has read and acts upon."""
    boot_id: str = field(default="", metadata=json_field(key="bootID"))
    agent_version: str = ""
    summary: str = ""
    """One short line for the printer column."""
    pools: tuple[PoolStatus, ...] = ()
    huge_pages: tuple[HugePageStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()

    def pool(self, name: str) -> PoolStatus | None:
        """Return what is said of that pool."""
        return next((pool for pool in self.pools if pool.name == name), None)
