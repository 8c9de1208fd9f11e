"""What a plan consists of: steps that apply carries out, each printable before it happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from hostprep.api.pool_spec import Placement
from hostprep.backing import Backing
from hostprep.errors import FailedError
from hostprep.node.facts import LedgerEntry
from hostprep.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One step for one pool, with what it is expected to move and to take."""

    kind: ClassVar[str]
    """CamelCase, for the times by kind of step."""
    text: ClassVar[str] = ""
    """The step in one line for a person; {0} is the action."""
    pool: str
    expected_bytes: int = 0
    expected_s: float = 0.0

    def describe(self) -> str:
        """Return the step in one line for a person."""
        return self.text.format(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropHandoff(Action):
    """Unpublish before anything that the handoff promises is touched."""

    kind: ClassVar[str] = "Withdraw"
    text: ClassVar[str] = "withdraw {0.what}: {0.why}"
    why: str
    what: str = "the handoff"


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePool(Action):
    """Make the pool's folder with its locks; adopt what exists."""

    kind: ClassVar[str] = "MakePool"
    text: ClassVar[str] = "make the pool's folder"
    gid: int | None
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _HugePages(Action):
    node_id: int
    page_bytes: int
    pages: int

    @property
    def entry(self) -> LedgerEntry:
        """What the ledger has of it."""
        return LedgerEntry(self.node_id, self.page_bytes, self.pages)

    @property
    def _pages(self) -> str:
        size = format_bytes(self.page_bytes)
        return f"{self.pages} huge pages of {size} on node {self.node_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveHugePages(_HugePages):
    """Add pages to one node's pool, with read-back, and one bounded compaction if it is short."""

    kind: ClassVar[str] = "Reserve"
    text: ClassVar[str] = "add {0._pages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnHugePages(_HugePages):
    """Give pages that the pool had added back to the node."""

    kind: ClassVar[str] = "Return"
    text: ClassVar[str] = "give {0._pages} back"


@dataclass(frozen=True, slots=True, kw_only=True)
class MountMemory(Action):
    """Have a mount of the backing at the folder, of that size; enlarge a tmpfs that is there.

    With `own_mount` False (no right to mount) the folder itself is used, on the tmpfs that
    holds the root.
    """

    kind: ClassVar[str] = "Mount"
    mount_dir: str
    backing: Backing
    size_bytes: int
    """Of all regions that shall live on it, with those that are there."""
    noswap: bool
    gid: int | None
    large_folios: bool = False
    """Let tmpfs take larger pieces than base pages where they lie free."""
    own_mount: bool = True

    def describe(self) -> str:  # noqa: D102
        if not self.own_mount:
            return f"use the folder {self.mount_dir} on the root's own tmpfs"
        kind = "hugetlbfs" if self.backing.is_hugetlb else "tmpfs"
        return f"mount {kind} for {self.backing} at {self.mount_dir}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmountMemory(Action):
    """Take the mount away, once no region is left on it."""

    kind: ClassVar[str] = "Unmount"
    text: ClassVar[str] = "unmount {0.mount_dir}"
    mount_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRegion(Action):
    """Keep a region that is right already."""

    kind: ClassVar[str] = "Adopt"
    region: str

    def describe(self) -> str:  # noqa: D102
        return f"adopt {self.region} ({format_bytes(self.expected_bytes)} resident)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRegion(Action):
    """Create, populate and verify one region under a temporary name, then give it its own."""

    kind: ClassVar[str] = "Populate"
    region: str
    mount_dir: str
    backing: Backing
    placement: Placement
    size_bytes: int
    node_ids: tuple[int, ...]
    """Nodes whose memory it may take: one, or all that it is interleaved over."""
    cpus: tuple[int, ...]
    """CPUs that the populating threads may run on."""
    threads: int
    large_folios: bool = False
    """Have the file system allocate each piece first: it takes the largest folios that are free."""
    gid: int | None
    mode: int

    @property
    def there_bytes(self) -> int:
        """What an interrupted run left of it, populated."""
        return self.size_bytes - self.expected_bytes

    def describe(self) -> str:  # noqa: D102
        there = f", {format_bytes(self.there_bytes)} of it there" if self.there_bytes else ""
        return (
            f"populate {self.region}: {format_bytes(self.size_bytes)} of {self.backing}, "
            f"{self.placement}, {self.threads} threads{there}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubRegion(Action):
    """Zero a dirty region that is not in use."""

    kind: ClassVar[str] = "Scrub"
    region: str
    why: str = ""
    """Of one that was kept for its owner for as long as the pool allows."""
    threads: int

    def describe(self) -> str:  # noqa: D102
        return f"scrub {self.region}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveRegion(Action):
    """Delete a region that is not in use; apply checks the lease again under the lock."""

    kind: ClassVar[str] = "Remove"
    text: ClassVar[str] = "remove {0.region}: {0.why}"
    region: str
    mount_dir: str
    why: str
    force: bool = False
    """Delete even what is leased; its memory comes back when the holder ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishHandoff(Action):
    """Verify every region and publish the handoff."""

    kind: ClassVar[str] = "Publish"
    text: ClassVar[str] = "publish the handoff"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovePool(Action):
    """Delete the pool's folder, last of all."""

    kind: ClassVar[str] = "RemovePool"
    text: ClassVar[str] = "remove the pool's folder"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What apply tried and found short: passed over by the next plan of the same run."""

    pool: str
    backing: Backing
    why: str
    node_id: int | None = None
    """The one NUMA node that was short; None: all that the backing was to be on."""


class ShortfallError(FailedError):
    """Raised by apply where a backing is short of pages: plan again without it (on that node)."""

    default_reason = "Shortfall"

    def __init__(self, short: Shortfall) -> None:
        super().__init__(f"{short.backing} for pool {short.pool}: {short.why}")
        self.short = short


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A backing that was preferred and could not be had, and why."""

    backing: Backing
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Unmet:
    """Why the pool cannot be had as asked, and what could be."""

    why: str
    possible_bytes: int
    remedy: str
    reason: str
    """CamelCase, for conditions."""
    never: bool = False
    """True where no waiting helps, as with a pool larger than the node: bad input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The outcome for one pool, beside its actions."""

    name: str
    wanted_bytes: int
    planned_bytes: int
    """Held once the plan is carried out: adopted and new."""
    backings: tuple[Backing, ...] = ()
    """Of the new regions, else of the adopted ones: several where NUMA nodes differ."""
    passed_over: tuple[PassedOver, ...] = ()
    notes: tuple[str, ...] = ()
    unmet: Unmet | None = None
    blocked: tuple[str, ...] = ()
    """Regions that are leased and wait for their release before they change (ResizeBlocked)."""
    page_table_bytes_per_process: int = 0
    """What each engine process that maps the whole pool pays out of its own memory limit."""

    @property
    def backing_words(self) -> str:
        """The backings for a person, such as `HugeTLB1Gi, HugeTLB2Mi`; empty without any."""
        return ", ".join(str(backing) for backing in self.backings)


Lane = tuple[Action, ...]
"""Actions that are carried out one after another."""


def stages(actions: Sequence[Action]) -> tuple[tuple[Lane, ...], ...]:
    """Return the actions as apply carries them out: stage after stage, a stage's lanes at once.

    Regions to populate that follow one another make one stage, with a lane for each placement: on
    a node one region after the other, all nodes at the same time. Every other action is a lane of
    a stage of its own.
    """
    found: list[tuple[Lane, ...]] = []
    for is_populating, together in groupby(actions, lambda each: isinstance(each, CreateRegion)):
        if not is_populating:
            found += [((action,),) for action in together]
            continue
        lanes: dict[Placement, list[Action]] = {}
        for action in together:
            if isinstance(action, CreateRegion):
                lanes.setdefault(action.placement, []).append(action)
        found.append(tuple(tuple(lane) for lane in lanes.values()))
    return tuple(found)


def _stage_s(stage: Sequence[Lane]) -> float:
    longest = max(sum(action.expected_s for action in lane) for lane in stage)
    populating = [each for lane in stage for each in lane if isinstance(each, CreateRegion)]
    cpus = {cpu for action in populating for cpu in action.cpus}
    if not cpus:
        return longest
    thread_seconds = sum(each.expected_s * min(each.threads, len(each.cpus)) for each in populating)
    return max(longest, thread_seconds / len(cpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Actions in the order in which they are carried out, and the outcome for each pool."""

    actions: tuple[Action, ...]
    pools: tuple[PoolPlan, ...]

    @property
    def expected_s(self) -> float:
        """Seconds from the first action's begin to the last one's end: the critical path.

        Stages follow one another, the lanes of a stage run side by side, and a lane's actions
        follow one another. Lanes that share CPUs are slower together than alone: a stage takes no
        less than the seconds that all its threads work, over the CPUs that there are for them.
        """
        return sum(_stage_s(stage) for stage in stages(self.actions))

    @property
    def expected_bytes_to_populate(self) -> int:
        """Bytes that will be newly made resident."""
        return sum(action.size_bytes for action in self.actions if isinstance(action, CreateRegion))

    @property
    def changes_anything(self) -> bool:
        """False where all that is asked for is there already."""
        return not all(isinstance(action, AdoptRegion | PublishHandoff) for action in self.actions)
