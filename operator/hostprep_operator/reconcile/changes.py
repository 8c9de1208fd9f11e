"""The input and output of a reconcile: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from hostprep.api.pool_checks import OUR_TAINTS
from hostprep_operator.records import (
    GONE,
    AgentRecord,
    HostMemoryNodeRecord,
    NodeRecord,
    PoolRecord,
)

NodeState: TypeAlias = Literal["ready", "closed", "waiting", "unknown", "releasing"]
"""By the status of HostMemoryReady; waiting: its required pools all wait for their first turn, and
nothing closed it; releasing: no required pool asks for the node any more, and it has not given all
memory back."""
Cause: TypeAlias = Literal["join", "reboot", "repair", "resize"]
"""Why a node was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the command line that decide about nodes."""

    liveness: Literal["pods", "off"] = "pods"
    """Whether an agent is alive while its Pod is Ready, or not looked at (agents run by hand)."""
    agent_grace_s: float = 60.0
    """For how long a node or an agent may be away before the answer is Unknown."""
    taint_keys: frozenset[str] | None = None
    """Keys of the taints that may be set and removed; None: any with one of OUR_TAINTS in it."""

    def may_write_taint(self, key: str | None) -> bool:
        """Whether a taint of that key may be set and removed; there may be none, too.

        Pools of before that rule may have another program's, which would go from ready nodes.
        """
        if key is None:
            return True
        is_ours = any(word in key for word in OUR_TAINTS)
        return is_ours and (self.taint_keys is None or key in self.taint_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """The nodes on which one pool lets something begin, by the pool as it was then."""

    uid: str = ""
    generation: int = 0
    nodes: frozenset[str] = frozenset()

    def hold(self, pool: PoolRecord | None) -> bool:
        """Whether they hold for the pool as it is now, None where it is gone.

        It may have been paused since, or deleted.
        """
        if pool is None:
            return self.generation == GONE
        return (pool.uid, pool.generation) == (self.uid, self.generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The input of one reconcile of a node.

    Made only when the first lists of pools, nodes, HostMemoryNodes and agents are complete: a
    cache that is not filled yet looks like a cluster in which everything was deleted.
    """

    node: NodeRecord | None
    hmn: HostMemoryNodeRecord | None
    pools: tuple[PoolRecord, ...] = ()
    """All pools that exist, selecting this node or not."""
    gone_pools: frozenset[str] = frozenset()
    """Names that do not exist, by a read of the API server."""
    former_pools: Mapping[str, PoolRecord] = field(default_factory=dict)
    """Pools that are gone as they were last, as far as this operator saw them: their rules hold for
    what they leave behind."""
    agent: AgentRecord | None = None
    agent_missing_since_s: float | None = None
    """Since when no agent Pod is on the node; None: since the node joined."""
    granted: frozenset[str] = frozenset()
    """Pools whose rollout lets something begin on this node now."""
    settings: Settings = field(default_factory=Settings)
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CreateHostMemoryNode:
    """Create the object. AlreadyExists: reconcile again."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteHostMemoryNode:
    """Delete the object, with both as preconditions."""

    uid: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class PatchHostMemoryNodeSpec:
    """Merge-patch the object; `metadata.resourceVersion` is in the patch."""

    patch: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PatchNode:
    """Merge-patch metadata and spec of the Node; `spec.taints` is the whole list.

    `metadata.resourceVersion` is in the patch. Where a write to the same Node precedes it in the
    same reconcile, the shell puts that write's answer's resourceVersion there: the one before
    was guarded by the version this was computed from, so no change of others can be lost between.
    """

    patch: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PatchNodeStatus:
    """Strategic-merge-patch the status: conditions by type. Guarded as PatchNode is."""

    patch: Mapping[str, Any]


Write: TypeAlias = (
    CreateHostMemoryNode
    | DeleteHostMemoryNode
    | PatchHostMemoryNodeSpec
    | PatchNode
    | PatchNodeStatus
)


@dataclass(frozen=True, slots=True)
class EventNote:
    """An event for people, posted once the writes of its reconcile succeeded."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """For metrics; what happened counts once the writes succeeded."""

    state: NodeState | None = None
    """None: no required pool selects the node."""
    opened: bool = False
    closed_cause: Cause | None = None
    """Of a closing that these writes carry out."""
    closed_since_s: float | None = None
    """While the node is closed."""
    seconds_to_ready: float | None = None
    """From closing (at joining: as soon as a pool selects it) to the opening in these writes."""
    deadline_exceeded: bool = False
    reboot_detected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanges:
    """The result for a node: its writes in order, stopping at the first that fails."""

    writes: tuple[Write, ...] = ()
    events: tuple[EventNote, ...] = ()
    unknown_pools: frozenset[str] = frozenset()
    """Pools that the node's entries or labels name and the cache lacks: ask the API server.

    Either the pool is there (add it to `pools`) or it is not (add it to `gone_pools`). Until
    then nothing that depends on them is written.
    """
    recheck_at_s: float | None = None
    """When time alone changes the answer."""
    facts: NodeFacts = field(default_factory=NodeFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChanges:
    """The result for a pool."""

    status_patch: Mapping[str, Any] | None = None
    """Merge patch of the status subresource; None where it says all already."""
    grants: Grants = field(default_factory=Grants)
    """Nodes that were not among them before need a reconcile."""
    recheck_at_s: float | None = None
    """When time alone changes the answer: the next grace period is over."""
    events: tuple[EventNote, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """By the names in POOL_COUNTS."""
    since_s: Mapping[str, float] = field(default_factory=dict)
    """State to when the node that has been in it longest came into it, by what objects say."""
