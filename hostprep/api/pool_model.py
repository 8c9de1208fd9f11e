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
    Field,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from hostprep.api import pool_checks as check
from hostprep.api.schema import Choices, constraints, default
from hostprep.api.versions import SERVED_API_VERSIONS
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

    mode: Annotated[str | None, constraints("spec.attach.mode")]


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


class Partition(_Model):
    """The nodes that a roll-out reaches for now. Used by the cluster only."""

    nodes: Annotated[
        int | str | None,
        BeforeValidator(check.partition_nodes),
        default("spec.rollout.partition.nodes"),
    ]
    node_selector: Annotated[
        dict[str, str] | None,
        AfterValidator(check.canaries),
        default("spec.rollout.partition.nodeSelector"),
    ]

    @model_validator(mode="after")
    def _check_that_it_is_one(self) -> Self:
        if (self.nodes is None) == (self.node_selector is None):
            raise check.fail(
                "has both nodes and nodeSelector, or neither of them",
                'give one of nodes (1 or "10%") and nodeSelector',
            )
        return self


class Rollout(_Model):
    """Which nodes may change, and how many at once. Used by the cluster only."""

    max_unavailable: Annotated[
        int | str,
        BeforeValidator(check.max_unavailable),
        default("spec.rollout.maxUnavailable"),
    ]
    paused: Annotated[bool, constraints("spec.rollout.paused")]
    partition: Annotated[Partition | None, default("spec.rollout.partition")]


class Release(_Model):
    """When memory goes back that the pool no longer wants. Used by the cluster only."""

    when: Annotated[str, constraints("spec.release.when")]
    grace_period_seconds: Annotated[_Whole, constraints("spec.release.gracePeriodSeconds")]


class Expression(_Model):
    """One requirement of a node's labels. Used by the cluster only."""

    key: Annotated[
        str,
        constraints("spec.nodeSelectorTerms[].matchExpressions[].key"),
        AfterValidator(check.term_key),
    ]
    operator: Annotated[str, constraints("spec.nodeSelectorTerms[].matchExpressions[].operator")]
    values: Annotated[
        tuple[Annotated[str, AfterValidator(check.term_value)], ...] | None,
        BeforeValidator(check.term_values),
        default("spec.nodeSelectorTerms[].matchExpressions[].values"),
    ]

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if (self.operator in ("In", "NotIn")) != bool(self.values):
            why = "are given with In and NotIn, and with no other operator"
            raise check.fail(why, "give at least one with In, and none with Exists", field="values")
        return self


class Term(_Model):
    """Requirements that must all hold. Used by the cluster only."""

    match_expressions: Annotated[
        tuple[Expression, ...],
        BeforeValidator(check.terms),
        default("spec.nodeSelectorTerms[].matchExpressions"),
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
    percent: Annotated[
        float | None, constraints("spec.percent"), AfterValidator(check.whole_percent)
    ]
    region_size: Annotated[int | None, BeforeValidator(check.quantity), default("spec.regionSize")]
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
    boot: Annotated[str | None, constraints("spec.boot")]
    deletion_policy: Annotated[str, constraints("spec.deletionPolicy")]
    release: Annotated[Release | None, default("spec.release")]

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
        sizes = ("size", "percent", "regionSize", "sizing")
        given = [field for field in sizes if value.get(field) is not None]
        if len(given) != 1:
            why = f"{' and '.join(given)} exclude each other" if given else "there is no size"
            remedy = "give one of size (8Gi), percent (50), regionSize (8Gi) and sizing"
            raise check.fail(why, remedy)
        return value


class StoredPolicyModel(PolicyModel):
    """A policy as nodes have it, which may be that of a pool that an earlier version took."""

    percent: Annotated[float | None, Field(gt=0, le=100), AllowInfNan(allow_inf_nan=False)] = None
    """A fraction too."""


class SpecModel(PolicyModel):
    """What is asked for: the node's part, and what the operator keeps to itself.

    Without a cluster nobody selects nodes: so a file without any selection is taken here, which the
    API server refuses.
    """

    all_nodes: Annotated[bool | None, constraints("spec.allNodes")]
    node_selector: Annotated[dict[str, str], AfterValidator(check.selector)] = {}
    node_selector_terms: Annotated[
        tuple[Term, ...] | None,
        BeforeValidator(check.terms),
        default("spec.nodeSelectorTerms"),
    ]
    readiness: Annotated[Readiness, default("spec.readiness")]
    accounting: Annotated[Accounting, default("spec.accounting")]
    rollout: Annotated[Rollout, default("spec.rollout")]
    deletion_protection: Annotated[str, constraints("spec.deletionProtection")]

    @model_validator(mode="after")
    def _check_selection(self) -> Self:
        if self.all_nodes and (self.node_selector or self.node_selector_terms is not None):
            raise check.fail(
                "excludes nodeSelector and nodeSelectorTerms",
                "remove it, or remove them",
                field="allNodes",
            )
        return self


class PoolResource(_Model):
    """A whole HostMemoryPool. `status` is the cluster's and ignored."""

    api_version: Annotated[str, Choices(SERVED_API_VERSIONS)]
    kind: Literal["HostMemoryPool"]
    metadata: Metadata
    spec: SpecModel
    status: dict[str, Any] | None = None
