"""The fields of a HostMemoryPool, as pydantic models: nothing unknown, nothing converted silently.

Fields that only the cluster uses are checked here too: one file serves both. The same fields,
bounds and defaults stand in charts/hostprep/files/crds; tests hold them together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from hostprep.api import pool_checks as check
from hostprep.api.pool_checks import MAX_REGIONS
from hostprep.api.pool_spec import DEFAULT_BACKINGS
from hostprep.backing import Backing
from hostprep.layout import MAX_SLOTS

__all__ = ["MAX_REGIONS", "PolicyModel", "PoolResource", "SpecModel"]

_MAX_GID = (1 << 32) - 2  # (gid_t)-1 means "leave it" to chown(2)
_DAY_S = 86_400
_MAX_GROUPS_IN_ALL = 8192
_MAX_TOKENS = (1 << 31) - 1
_MAX_SLOT_BYTES = 1 << 32  # times the most slots it is still within 64 bits, for CEL
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

    gid: Annotated[_Whole | None, Field(ge=0, le=_MAX_GID)] = None
    mode: Annotated[int, BeforeValidator(check.mode)] = 0o660


class Lease(_Model):
    """How long a claim may wait for its turn. Used by the cluster only."""

    max_wait_seconds: Annotated[_Whole | None, Field(ge=0, le=7 * _DAY_S)] = None


class Scrub(_Model):
    """When a region is zeroed between two owners. Used by the cluster only."""

    when: Literal["OnRelease", "OnClaim"] = "OnRelease"


class Attach(_Model):
    """How pods reach the regions. Used by the cluster only."""

    mode: Literal["hostPath", "devicePlugin"] = "hostPath"


Reclosing = Literal["Taint", "LabelOnly"]


class Reclose(_Model):
    """What closes a node again, by cause. Used by the cluster only."""

    reboot: Reclosing = "Taint"
    repair: Reclosing = "LabelOnly"
    resize: Reclosing = "LabelOnly"


class Readiness(_Model):
    """How the node is marked. Used by the cluster only."""

    required: bool = True
    profile: Literal["ClusterAutoscaler", "Karpenter", "NodeReadinessController", "None"] = (
        "ClusterAutoscaler"
    )
    taint_key: Annotated[
        str | None, Field(min_length=1, max_length=316), AfterValidator(check.taint_key)
    ] = None
    reclose: Reclose = Reclose()
    deadline_seconds: Annotated[_Whole, Field(ge=1, le=_DAY_S)] = 600
    on_deadline: Literal["StayClosed", "OpenWithout"] = "StayClosed"

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

    require: bool = False


class Rollout(_Model):
    """How many nodes may change at once. Used by the cluster only."""

    max_unavailable: Annotated[int | str, BeforeValidator(check.max_unavailable)] = 1


class SizingGroup(_Model):
    """Slots of one size in every region."""

    name: Annotated[str, Field(min_length=1, max_length=63), AfterValidator(check.group_name)]
    kind: Literal["Attention", "Recurrent"] = "Attention"
    window_tokens: Annotated[_Whole | None, Field(ge=1, le=_MAX_TOKENS)] = None
    slot_bytes: Annotated[_Whole, Field(ge=1, le=_MAX_SLOT_BYTES)]
    min_slots: Annotated[_Whole, Field(ge=1, le=MAX_SLOTS)] = 1
    slots: Annotated[_Whole, Field(ge=1, le=MAX_SLOTS)]

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

    model: Annotated[str | None, Field(max_length=128)] = None
    tokens_per_block: Annotated[_Whole, Field(ge=1, le=1 << 20)]
    groups: Annotated[tuple[SizingGroup, ...], BeforeValidator(check.groups)]

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if sum(group.slot_bytes * group.slots for group in self.groups) > check.MAX_SIZE_BYTES:
            raise check.fail("are more than any node has", "write at most 1Pi", field="groups")
        return self


class PolicyModel(_Model):
    """What a node needs to know of a pool: copied verbatim into its HostMemoryNode."""

    size: Annotated[int | None, BeforeValidator(check.quantity)] = None
    percent: Annotated[float | None, Field(gt=0, le=100, allow_inf_nan=False)] = None
    sizing: Sizing | None = None
    backings: Annotated[
        tuple[Annotated[Backing, BeforeValidator(check.backing)], ...],
        BeforeValidator(check.backings),
    ] = DEFAULT_BACKINGS
    regions: Annotated[int | str, BeforeValidator(check.regions)] = "PerNUMANode"
    reserve: Annotated[int | None, BeforeValidator(check.quantity_or_zero)] = None
    priority: Annotated[_Whole, Field(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    access: Access = Access()
    lease: Lease = Lease()
    scrub: Scrub = Scrub()
    attach: Attach = Attach()
    boot: Literal["none", "systemd"] = "none"
    deletion_policy: Literal["Release", "Retain"] = "Release"

    @model_validator(mode="after")
    def _check_handoff(self) -> Self:
        """Keep what every reader must read (4 MiB) from growing beyond it."""
        groups = len(self.sizing.groups) if self.sizing else 0
        if isinstance(self.regions, int) and self.regions * groups > _MAX_GROUPS_IN_ALL:
            why = f"has {groups} groups for each of {self.regions} regions"
            remedy = f"ask for fewer regions: {_MAX_GROUPS_IN_ALL} groups in all fit the handoff"
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
    readiness: Readiness = Readiness()
    accounting: Accounting = Accounting()
    rollout: Rollout = Rollout()


class PoolResource(_Model):
    """A whole HostMemoryPool. `status` is the cluster's and ignored."""

    api_version: Literal["hostprep.dev/v1alpha1"]
    kind: Literal["HostMemoryPool"]
    metadata: Metadata
    spec: SpecModel
    status: dict[str, Any] | None = None
