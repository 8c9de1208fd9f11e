"""What agent and worker say to each other: one JSON object a line, both sides of one version."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from hostprep.api.pool_spec import PoolSpec
from hostprep.node.boot import BootUnit

__all__ = [
    "Done",
    "Failure",
    "GateLook",
    "HugePageLook",
    "Look",
    "Message",
    "Outcome",
    "PoolDone",
    "PoolLook",
    "Problem",
    "Progress",
    "RegionLook",
    "Round",
    "RoundDone",
    "Wanted",
    "decode",
    "encode",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One pool as the agent wants it."""

    spec: PoolSpec
    key: str
    """Of the entry that it was made from: an outcome with another key answers another entry."""
    leave_dirty: bool = False
    """The next claim scrubs, not the agent (`scrub.when: OnClaim`)."""
    at_boot: bool = False
    """Its pages are reserved at every boot, by a unit on the node (`boot: systemd`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Request: look at everything, and bring the pools to what is wanted, in the background.

    While work for other wishes is under way that is stopped first; the next round begins anew.
    """

    number: int
    """Of this request; the answer repeats it."""
    wanted: tuple[Wanted, ...]
    held: tuple[str, ...] = ()
    """Pools to be planned for and left as they are."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something is not as asked for, and what to do."""

    reason: str
    message: str
    waits: bool = False
    """Others are in the way for now: it is no failure yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLook:
    """One region as the kernel shows it. Promised and gone: state Damaged, with no size."""

    name: str
    size_bytes: int
    backing: str
    placement: str
    state: str
    sound: bool
    """Published in a handoff of this boot, and found to be as that says."""
    message: str = ""
    holder: str = ""
    """Who leases it, as far as is known."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One promise of a handoff that the kernel does not bear out."""

    region: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLook:
    """The gate of an engine that leases a region, or of the last one that did."""

    region: str
    state: str
    """Closed, Open, Degraded; Unknown where the engine's board cannot be read."""
    run: str = ""
    """Stands for one run of the engine: the generation of its board."""
    is_running: bool = True
    """Whether that run goes on."""
    open_after_s: float | None = None
    """From the first rank's joining to the gate's opening; None unless the gate said so."""
    registered_bytes: int = 0
    """By the ranks that live."""
    longest_chunk_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLook:
    """One pool's folder."""

    name: str
    generation: int
    """Of the handoff."""
    published: bool
    """A handoff of this boot stands and matches all regions that are sound."""
    regions: tuple[RegionLook, ...]
    problems: tuple[Problem, ...] = ()
    gates: tuple[GateLook, ...] = ()
    failure: str = ""
    """Why the pool could not be looked at; nothing is planned for it then."""


@dataclass(frozen=True, slots=True)
class HugePageLook:
    """One size of huge pages, in pages."""

    page_bytes: int
    total: int
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one verification round found."""

    boot_id: str
    pools: tuple[PoolLook, ...]
    huge_pages: tuple[HugePageLook, ...]
    took_s: float
    warnings: tuple[str, ...] = ()

    def pool(self, name: str) -> PoolLook | None:
        """Return what was found of that pool."""
        return next((pool for pool in self.pools if pool.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where one pool stands in relation to what is wanted."""

    name: str
    key: str
    pending: bool = False
    """Work on it is under way, other than scrubbing."""
    wanted_bytes: int = 0
    planned_bytes: int = 0
    """Held once the plan is carried out."""
    regions: tuple[str, ...] = ()
    """Names of what makes up `planned_bytes`, where something was changed for it."""
    backing: str = ""
    unmet: Failure | None = None
    error: Failure | None = None
    blocked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[tuple[str, float], ...] = ()
    """Seconds by kind of step, where something was changed."""


@dataclass(frozen=True, slots=True)
class RoundDone:
    """Answer to Round; outcomes are missing while other work is under way."""

    number: int
    look: Look
    outcomes: tuple[Outcome, ...]
    busy: bool
    boot: BootUnit = field(default_factory=BootUnit)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work on a pool is."""

    pool: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PoolDone:
    """Work on a pool has ended; what was populated counts whatever the outcome."""

    outcome: Outcome
    look: Look
    populated: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """All work has ended, or was stopped; `error` concerns all pools."""

    stopped: bool = False
    error: Failure | None = None


Message = Round | RoundDone | Progress | PoolDone | Done
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Round, RoundDone, Progress, PoolDone, Done)
}


def encode(message: Message) -> bytes:
    """Return a message as one line."""
    document = {"kind": type(message).__name__, **asdict(message)}
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Read a line. Raises ValueError for anything that is no message."""
    try:
        document = json.loads(line)
        message: Message = _object(_KINDS[document["kind"]], document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message: {line[:80]!r}") from error
    return message


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _value(kind: Any, value: Any) -> Any:
    """Return JSON as what the annotation says: dataclasses, tuples, enums and plain values."""
    if get_origin(kind) is types.UnionType:
        some = next(one for one in get_args(kind) if one is not types.NoneType)
        return None if value is None else _value(some, value)
    if get_origin(kind) is tuple:
        return _items(get_args(kind), value)
    if is_dataclass(kind):
        return _object(kind, value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


def _items(kinds: tuple[Any, ...], values: Any) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_value(kinds[0], item) for item in values)
    return tuple(_value(kind, item) for kind, item in zip(kinds, values, strict=True))


def _object(kind: Any, value: Any) -> Any:
    hints = _hints(kind)
    return kind(
        **{field.name: _value(hints[field.name], value[field.name]) for field in fields(kind)}
    )
