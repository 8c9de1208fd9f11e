"""The fields of a HostMemoryPool, as pydantic models: nothing unknown, nothing converted silently.

Fields that only the cluster uses are checked here too: one file serves both.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from hostprep.backing import Backing
from hostprep.errors import BadInputError
from hostprep.units import parse_quantity

__all__ = ["MAX_REGIONS", "PoolResource", "SpecModel"]

MAX_REGIONS = 1024
_MAX_GID = (1 << 32) - 2  # (gid_t)-1 means "leave it" to chown(2)
_MODE = re.compile(r"0?[0-7]{3}", re.ASCII)
_OWNER_MAY = 0o600
LAYOUTS = ("PerNUMANode", "PerGPU", "Single")


def _fail(why: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("hostprep", "{why}", {"why": why, "remedy": remedy})


def _quantity(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _fail(f"{str(value)[:40]!r} is not a quantity", "write it like 8Gi or 512Mi")
    if isinstance(value, int) and value.bit_length() > 64:
        raise _fail("is more than a file can hold", "write it like 8Gi or 512Mi")
    try:
        return parse_quantity(str(value))
    except BadInputError as error:
        raise _fail(error.message, error.remedy or "write it like 8Gi") from error


def _quantity_or_zero(value: object) -> int:
    return 0 if value in (0, "0") and not isinstance(value, bool) else _quantity(value)


def _mode(value: object) -> int:
    if not isinstance(value, str) or _MODE.fullmatch(value) is None:
        shown = repr(value[:40]) if isinstance(value, str) else "a value without quotes"
        raise _fail(f"{shown} is no octal mode in quotes", 'write it like mode: "0660"')
    mode = int(value, 8)
    if mode & _OWNER_MAY != _OWNER_MAY:
        raise _fail(f"{value!r} bars the owner from reading or writing", 'use "0600" or more')
    return mode


def _backing(value: object) -> Backing:
    for backing in Backing:
        if value == backing.value:
            return backing
    raise _fail(
        f"there is no backing {str(value)[:40]!r}",
        "choose from " + ", ".join(backing.value for backing in Backing),
    )


def _regions(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_REGIONS:
        return value
    if isinstance(value, str) and value in LAYOUTS:
        return value
    raise _fail(
        f"{str(value)[:40]!r} is no way to cut a pool",
        f"choose from {', '.join(LAYOUTS)}, or a number from 1 to {MAX_REGIONS}",
    )


class _Model(BaseModel):
    """Unknown fields refused; numbers are numbers and text is text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


class Metadata(_Model):
    """What Kubernetes keeps of every object; only name and uid are used."""

    name: str
    uid: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: Any = None
    managed_fields: Any = None
    owner_references: Any = None


class Access(_Model):
    """Who may open the region files."""

    gid: Annotated[int | None, Field(ge=0, le=_MAX_GID)] = None
    mode: Annotated[int, BeforeValidator(_mode)] = 0o660


class Lease(_Model):
    """How long a claim may wait for its turn. Used by the cluster only."""

    max_wait_seconds: Annotated[int | None, Field(ge=0)] = None


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
    taint_key: Annotated[str | None, Field(min_length=1, max_length=316)] = None
    reclose: Reclose = Reclose()
    deadline_seconds: Annotated[int, Field(ge=1)] = 600
    on_deadline: Literal["StayClosed", "OpenWithout"] = "StayClosed"


class Accounting(_Model):
    """Whether the scheduler must know of the memory. Used by the cluster only."""

    require: bool = False


class Rollout(_Model):
    """How many nodes may change at once. Used by the cluster only."""

    max_unavailable: (
        Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^(100|[1-9][0-9]?)%$")]
    ) = 1


class SpecModel(_Model):
    """What is asked for."""

    node_selector: dict[str, str] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    size: Annotated[int | None, BeforeValidator(_quantity)] = None
    percent: Annotated[float | None, Field(gt=0, le=100, allow_inf_nan=False)] = None
    sizing: Any = None
    backings: tuple[Annotated[Backing, BeforeValidator(_backing)], ...] | None = None
    regions: Annotated[int | str, BeforeValidator(_regions)] = "PerNUMANode"
    reserve: Annotated[int, BeforeValidator(_quantity_or_zero)] | None = None
    access: Access = Access()
    lease: Lease | None = None
    scrub: Scrub | None = None
    attach: Attach | None = None
    readiness: Readiness | None = None
    accounting: Accounting | None = None
    boot: Literal["none", "systemd"] | None = None
    rollout: Rollout | None = None
    deletion_policy: Literal["Release", "Retain"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_sizes_and_backings(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "sizing" in value:
            raise _fail("sizing is not supported by this version", "give size")
        given = [field for field in ("size", "percent") if value.get(field) is not None]
        if len(given) != 1:
            why = "size and percent exclude each other" if given else "there is no size"
            raise _fail(why, "give one of size (8Gi) and percent (50)")
        backings = value.get("backings")
        if isinstance(backings, list):
            _check_order(backings)
            return {**value, "backings": tuple(backings)}
        return value


def _check_order(backings: list[Any]) -> None:
    if not backings:
        raise _fail("backings is empty", "name at least one, such as HugeTLB2Mi")
    for index, backing in enumerate(backings):
        if backing in backings[:index]:
            raise _fail(f"backings names {str(backing)[:40]!r} twice", "name each once, in order")


class PoolResource(_Model):
    """A whole HostMemoryPool. `status` is the cluster's and ignored."""

    api_version: Literal["hostprep.dev/v1alpha1"]
    kind: Literal["HostMemoryPool"]
    metadata: Metadata
    spec: SpecModel
    status: dict[str, Any] | None = None
