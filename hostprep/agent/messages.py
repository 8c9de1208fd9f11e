"""Messages between agent and worker: one JSON object a line, both sides of one version."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, get_args

from hostprep.api import codec
from hostprep.api.node_resource import HugePageStatus, RegionStatus
from hostprep.api.pool_spec import PoolSpec
from hostprep.node.boot import BootUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredPool:
    """One pool as the agent wants it."""

    spec: PoolSpec
    key: str
    """Of the entry that it was made from: a result with another key answers another entry."""
    leave_dirty: bool = False
    """The next claim scrubs, not the agent (`scrub.when: OnClaim`)."""
    at_boot: bool = False
    """A unit on the node reserves its pages at every boot (`boot: Systemd`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileRequest:
    """Request: observe everything, and bring the pools to the desired state in the background.

    Work for other pools that is under way is stopped first; the next request starts again.
    """

    number: int
    """Of this request; the result repeats it."""
    pools: tuple[DesiredPool, ...]
    held: tuple[str, ...] = ()
    """Pools to be planned for and left as they are."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something is not as desired, and what to do."""

    reason: str
    message: str
    waits: bool = False
    """Others are in the way for now: not a failure yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionObservation(RegionStatus):
    """One region's status and what only the agent uses of it.

    Published and gone: state Damaged, without a size.
    """

    sound: bool
    """Published in a handoff of this boot, and found to be as the handoff says."""
    problem: str = ""
    """The reason why it is not as the handoff says, or marked as damaged."""
    holder: str = ""
    """The process that leases it, as far as is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateObservation:
    """The gate of an engine that leases a region, or of the last one that did."""

    region: str
    state: str
    """Closed, Open, Degraded; Unknown where the engine's board cannot be read."""
    run: str = ""
    """Identifies one run of the engine: the generation of its board."""
    is_running: bool = True
    """Whether that run goes on."""
    open_after_s: float | None = None
    """From the first rank's joining to the gate's opening; None unless the gate said so."""
    registered_bytes: int = 0
    """By the ranks that are alive."""
    longest_chunk_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptObservation:
    """What a region keeps for its owner, and what the engine reported of it."""

    region: str
    size_bytes: int
    name: str
    """What people call it; empty where the owner gave none."""
    since_s: float
    """When the owner first claimed the region, by the clock."""
    state: str
    """Of the region."""
    is_leased: bool
    unheld_s: float = 0.0
    """Seconds since it was first seen without a holder."""
    gives_way: str = ""
    """Why it is about to be zeroed: AgeLimit or Waiters; empty where it is not."""
    reported_s: float = 0.0
    """When the engine decided what to do with the contents, by the clock; 0: it did not say."""
    recovered_blocks: int = 0
    recovered_bytes: int = 0
    kept_blocks: int = 0
    loaded_blocks: int = 0
    """Loads of recovered blocks since."""
    refused: tuple[str, ...] = ()
    """Fields of the identity that differ, or are unknown."""


@dataclass(frozen=True, slots=True)
class LeaseWait:
    """How long the engine waited that leases regions, or did so last."""

    lease_id: str
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObservation:
    """One pool's folder."""

    name: str
    generation: int
    """Of the handoff."""
    published: bool
    """A handoff of this boot exists and matches all regions that are sound."""
    regions: tuple[RegionObservation, ...]
    gates: tuple[GateObservation, ...] = ()
    kept: tuple[KeptObservation, ...] = ()
    waiters: int | None = None
    """Claims that wait for a lease; None where that could not be seen."""
    waits: tuple[LeaseWait, ...] = ()
    """Of the last lease of each region, as its engine noted it; each lease once."""
    failure: str = ""
    """Why the pool could not be observed; nothing is planned for it then."""

    @property
    def named_regions(self) -> tuple[RegionObservation, ...]:
        """Each name once: an unfinished region may have a finished namesake."""
        chosen: dict[str, RegionObservation] = {}
        for region in self.regions:
            if region.name not in chosen or chosen[region.name].state == "Unfinished":
                chosen[region.name] = region
        return tuple(chosen.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one verification round found."""

    boot_id: str
    pools: tuple[PoolObservation, ...]
    huge_pages: tuple[HugePageStatus, ...]
    took_s: float

    def pool(self, name: str) -> PoolObservation | None:
        """Return what was found of that pool."""
        return next((pool for pool in self.pools if pool.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolResult:
    """How far one pool is from its desired state."""

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
class ReconcileResult:
    """Answer to ReconcileRequest; results are missing while other work is under way."""

    number: int
    observation: Observation
    results: tuple[PoolResult, ...]
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
    """Work on a pool has ended; what was populated counts whether or not it succeeded."""

    result: PoolResult
    observation: Observation
    populated: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """All work has ended, or was stopped; `error` concerns all pools."""

    stopped: bool = False
    error: Failure | None = None


Message = ReconcileRequest | ReconcileResult | Progress | PoolDone | Done
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as one line."""
    document = {"kind": type(message).__name__, "message": codec.encode(message)}
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Read a line. Raises ValueError for anything that is not a message."""
    try:
        document = json.loads(line)
        kind: type[Any] = _KINDS[document["kind"]]
        message: Message = codec.decode(kind, document["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message: {line[:80]!r}") from error
    return message
