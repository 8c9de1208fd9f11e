"""The fields of a HostMemoryPool, as pydantic models: nothing unknown, nothing converted silently.

Fields that only the cluster uses are checked here too: one file serves both. Bounds, choices and
defaults are read from the CustomResourceDefinition.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from hostprep.api import pool_checks as check
from hostprep.api.schema import constraints, default
from hostprep.backing import Backing

_Whole = Annotated[int, BeforeValidator(check.whole)]


class _Model(BaseModel):
    """Unknown fields refused; numbers are numbers and text is text; null is the same as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """Do as the API server does with `field: null`; an unknown field stays, to be refused."""
        if not isinstance(value, dict):
            return value
        known = {field.alias for field in cls.model_fields.values()}
        return {key: item for key, item in value.items() if item is not None or key not in known}


class Metadata(_Model):
    """What Kubernetes keeps of every object; only name and uid are used."""

    name: str
    uid: str | None = None
    labels: Annotated[dict[str, str | None] | None, AfterValidator(check.labels)] = None
    annotations: Annotated[
        dict[str, str | None] | None, AfterValidator(check.object_annotations)
    ] = None
    generation: int | None = None
    resource_version: str | None = None
    namespace: Any = None
    creation_timestamp: Any = None
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: Any = None
    finalizers: Any = None
    managed_fields: Any = None
    owner_references: Any = None
    self_link: Any = None


class Access(_Model):
    """Who may open the region files."""

    gid: Annotated[_Whole | None, constraints("spec.access.gid")]
    mode: Annotated[int, BeforeValidator(check.mode), default("spec.access.mode")]


class Lease(_Model):
    """How long a claim may wait for its turn. Used by the cluster only."""

    max_wait_seconds: Annotated[_Whole | None, constraints("spec.lease.maxWaitSeconds")]


class Scrub(_Model):
    """When a region is zeroed between two owners. Used by the cluster only."""

    when: Annotated[str, constraints("spec.scrub.when")]


class Retention(_Model):
    """How long a region keeps its contents for an owner who may come back."""

    max_age_seconds: Annotated[_Whole | None, constraints("spec.retention.maxAgeSeconds")]


class Attach(_Model):
    """How pods reach the regions. Used by the cluster only."""

    mode: Annotated[str, constraints("spec.attach.mode")]


class Reclose(_Model):
    """What closes a node again, by cause. Used by the cluster only."""

    reboot: Annotated[str, constraints("spec.readiness.reclose.reboot")]
    repair: Annotated[str, constraints("spec.readiness.reclose.repair")]
    resize: Annotated[str, constraints("spec.readiness.reclose.resize")]


class Readiness(_Model):
    """How the node is marked. Used by the cluster only."""

    required: Annotated[bool, constraints("spec.readiness.required")]
    profile: Annotated[str, constraints("spec.readiness.profile")]
    taint_key: Annotated[
        str | None, constraints("spec.readiness.taintKey"), AfterValidator(check.taint_key)
    ]
    reclose: Annotated[Reclose, default("spec.readiness.reclose")]
    deadline_seconds: Annotated[_Whole, constraints("spec.readiness.deadlineSeconds")]
    on_deadline: Annotated[str, constraints("spec.readiness.onDeadline")]

    @field_validator("taint_key")
    @classmethod
    def _check_that_it_is_used(cls, value: str | None, info: Any) -> str | None:
        if info.data.get("profile") in ("NodeReadinessController", "None"):
            raise check.fail(
                "has no effect with this profile",
                "remove it, or use profile ClusterAutoscaler or Karpenter",
            )
        return value


class Accounting(_Model):
    """Whether the scheduler must know of the memory. Used by the cluster only."""

    require: Annotated[bool, constraints("spec.accounting.require")]


class Rollout(_Model):
    """How many nodes may change at once. Used by the cluster only."""

    max_unavailable: Annotated[
        int | str,
        BeforeValidator(check.max_unavailable),
        default("spec.rollout.maxUnavailable"),
    ]


class SizingGroup(_Model):
    """Slots of one size in every region."""

    name: Annotated[str, constraints("spec.sizing.groups[].name"), AfterValidator(check.group_name)]
    kind: Annotated[str, constraints("spec.sizing.groups[].kind")]
    window_tokens: Annotated[_Whole | None, constraints("spec.sizing.groups[].windowTokens")]
    slot_bytes: Annotated[_Whole, constraints("spec.sizing.groups[].slotBytes")]
    min_slots: Annotated[_Whole, constraints("spec.sizing.groups[].minSlots")]
    slots: Annotated[_Whole, constraints("spec.sizing.groups[].slots")]

    @model_validator(mode="after")
    def _check_slots(self) -> Self:
        if self.slots < self.min_slots:
            why = f"is {self.slots}, less than minSlots, {self.min_slots}"
            raise check.fail(why, "size the pool again with hostprep size", field="slots")
        if self.kind == "Recurrent" and self.window_tokens is not None:
            why = "has no meaning for a recurrent group"
            raise check.fail(why, "remove it", field="windowTokens")
        return self


class Sizing(_Model):
    """What each region holds, made by `hostprep size`: the pool has the size of its regions."""

    model: Annotated[str | None, constraints("spec.sizing.model")]
    tokens_per_block: Annotated[_Whole, constraints("spec.sizing.tokensPerBlock")]
    directory: Annotated[bool | None, constraints("spec.sizing.directory")]
    integration: Annotated[
        str | None, constraints("spec.sizing.integration"), AfterValidator(check.integration)
    ]
    regions_per_engine: Annotated[_Whole | None, constraints("spec.sizing.regionsPerEngine")]
    region_bytes: Annotated[_Whole | None, constraints("spec.sizing.regionBytes")]
    groups: Annotated[tuple[SizingGroup, ...], BeforeValidator(check.groups)]

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if sum(group.slot_bytes * group.slots for group in self.groups) > check.MAX_SIZE_BYTES:
            raise check.fail("are more than any node has", "write at most 1Pi", field="groups")
        return self


class PolicyModel(_Model):
    """What a node needs to know of a pool: copied verbatim into its HostMemoryNode."""

    size: Annotated[int | None, BeforeValidator(check.quantity), default("spec.size")]
    percent: Annotated[float | None, constraints("spec.percent"), AllowInfNan(allow_inf_nan=False)]
    sizing: Annotated[Sizing | None, default("spec.sizing")]
    backings: Annotated[
        tuple[Annotated[Backing, BeforeValidator(check.backing)], ...],
        BeforeValidator(check.backings),
        default("spec.backings"),
    ]
    regions: Annotated[int | str, BeforeValidator(check.regions), default("spec.regions")]
    reserve: Annotated[
        int | None,
        BeforeValidator(partial(check.quantity, zero=True)),
        default("spec.reserve"),
    ]
    priority: Annotated[_Whole, constraints("spec.priority")]
    access: Annotated[Access, default("spec.access")]
    lease: Annotated[Lease | None, default("spec.lease")]
    scrub: Annotated[Scrub, default("spec.scrub")]
    retention: Annotated[Retention | None, default("spec.retention")]
    attach: Annotated[Attach, default("spec.attach")]
    boot: Annotated[str, constraints("spec.boot")]
    deletion_policy: Annotated[str, constraints("spec.deletionPolicy")]

    @model_validator(mode="after")
    def _check_handoff(self) -> Self:
        """Keep what every reader must read (4 MiB) from growing beyond it."""
        groups = len(self.sizing.groups) if self.sizing else 0
        most = check.MAX_GROUPS_IN_ALL
        if isinstance(self.regions, int) and self.regions * groups > most:
            why = f"has {groups} groups for each of {self.regions} regions"
            remedy = f"ask for fewer regions: {most} groups in all fit the handoff"
            raise check.fail(why, remedy, field="sizing")
        return self

    @model_validator(mode="before")
    @classmethod
    def _check_sizes(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = [field for field in ("size", "percent", "sizing") if value.get(field) is not None]
        if len(given) != 1:
            why = f"{' and '.join(given)} exclude each other" if given else "there is no size"
            raise check.fail(why, "give one of size (8Gi), percent (50) and sizing")
        return value


class SpecModel(PolicyModel):
    """What is asked for: the node's part, and what the operator keeps to itself."""

    node_selector: Annotated[dict[str, str], AfterValidator(check.selector)] = {}
    readiness: Annotated[Readiness, default("spec.readiness")]
    accounting: Annotated[Accounting, default("spec.accounting")]
    rollout: Annotated[Rollout, default("spec.rollout")]


class PoolResource(_Model):
    """A whole HostMemoryPool. `status` is the cluster's and ignored."""

    api_version: Literal["hostprep.dev/v1alpha1"]
    kind: Literal["HostMemoryPool"]
    metadata: Metadata
    spec: SpecModel
    status: dict[str, Any] | None = None
