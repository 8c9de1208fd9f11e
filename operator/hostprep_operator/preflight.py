"""What has to be true before an uninstall may begin. Pure: objects in, refusals out.

Each refusal names the nodes or pools, what to do about them, and the word for `--force` that
accepts them as they are. A missing right has no such word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hostprep.units import format_bytes
from hostprep_operator.records import NodeRecord

FORCE_WORDS = {
    "leased": "releasing begins although engines use the memory: each node gives it back when its "
    "last lease ends, and the command waits for them until its timeout",
    "unreachable": "these nodes are not waited for: their memory stays taken until an agent runs "
    "there again, or they reboot",
    "protected": "pools with deletionProtection Always are deleted too",
}
"""What each word of `--force` accepts."""
SHOWN = 10
"""So many names are in a refusal, beside the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHeld:
    """What a node holds of one pool, as its agent reported it."""

    size_bytes: int = 0
    regions: int = 0
    leased: int = 0
    """Regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A HostMemoryNode, as far as an uninstall needs it."""

    name: str
    uid: str = ""
    version: str = ""
    owner_uid: str = ""
    """Of the Node that owns it."""
    generation: int = 0
    observed_generation: int = 0
    boot_id: str = ""
    entries: tuple[Mapping[str, Any], ...] = ()
    """`spec.pools`, verbatim."""
    retained: frozenset[str] = frozenset()
    """Pools of entries whose memory is to stay: deletionPolicy Retain."""
    held: Mapping[str, PoolHeld] = field(default_factory=dict)
    """`status.pools` by name, of the entries that are to release. A pool that was released is
    not there."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any], kept_pools: frozenset[str]) -> Holder:
        """Read a HostMemoryNode; `kept_pools` have deletionPolicy Retain. Raises KeyError."""
        metadata, status = document["metadata"], document.get("status") or {}
        owners = metadata.get("ownerReferences") or ()
        entries = tuple((document.get("spec") or {}).get("pools") or ())
        retained = frozenset(e["name"] for e in entries if _is_retained(e, kept_pools))
        to_release = {entry["name"] for entry in entries} - retained
        return cls(
            name=metadata["name"],
            uid=metadata.get("uid") or "",
            version=metadata.get("resourceVersion") or "",
            owner_uid=next((o.get("uid") or "" for o in owners if o.get("kind") == "Node"), ""),
            generation=int(metadata.get("generation") or 0),
            observed_generation=int(status.get("observedGeneration") or 0),
            boot_id=status.get("bootID") or "",
            entries=entries,
            retained=retained,
            held={
                pool["name"]: _held(pool)
                for pool in status.get("pools") or ()
                if pool["name"] in to_release
            },
        )

    @property
    def size_bytes(self) -> int:
        """The memory of all pools."""
        return sum(pool.size_bytes for pool in self.held.values())

    @property
    def leased(self) -> dict[str, PoolHeld]:
        """The pools with leased regions."""
        return {name: pool for name, pool in self.held.items() if pool.leased}

    @property
    def told(self) -> bool:
        """Whether every entry says Absent: it is the agent's turn."""
        return all(entry.get("state") == "Absent" for entry in self.entries)

    def released(self, name: str) -> bool:
        """Whether the agent has read the entries, and holds nothing of that pool any more."""
        return self.observed_generation >= self.generation and name not in self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A check that failed."""

    check: str
    """`leased`, `unreachable`, `protected` or `rights`."""
    message: str
    remedy: str
    total: int
    first: tuple[str, ...]
    """At most SHOWN names of `total`."""

    @property
    def text(self) -> str:
        """All of it, for people."""
        more = self.total - len(self.first)
        names = ", ".join(self.first) + (f" and {more} more" if more > 0 else "")
        return f"{self.check}: {self.message}: {names}; {self.remedy}"


def check_leased(holders: Iterable[Holder], nodes: Mapping[str, NodeRecord]) -> Refusal | None:
    """Refuse where engines use the memory now. Leases of a boot that is over are gone."""
    found = [
        f"{holder.name} ({_leases(holder)})"
        for holder in holders
        if holder.leased and _is_of_this_boot(holder, nodes.get(holder.name))
    ]
    return _refusal(
        "leased",
        found,
        f"engines use the memory of {_nodes(len(found))}",
        "stop these engines first",
    )


def check_unreachable(holders: Iterable[Holder], reachable: frozenset[str]) -> Refusal | None:
    """Refuse where memory is held and no agent could release it."""
    found = [
        f"{holder.name} ({format_bytes(holder.size_bytes)})"
        for holder in holders
        if holder.held and holder.name not in reachable
    ]
    return _refusal(
        "unreachable",
        found,
        f"{_nodes(len(found))} with memory held and no agent that is Ready",
        "have the agent's Pod run there again, or delete the Node if the machine is gone",
    )


def check_protected(pools: Iterable[Mapping[str, Any]]) -> Refusal | None:
    """Refuse pools whose manifest says that they are never to be deleted."""
    found = [
        pool["metadata"]["name"]
        for pool in pools
        if (pool.get("spec") or {}).get("deletionProtection") == "Always"
    ]
    return _refusal(
        "protected",
        found,
        "pools with deletionProtection Always",
        "set it to WhileLeased or None",
    )


def check_rights(missing: Sequence[str]) -> Refusal | None:
    """Refuse where a right is missing that a later step would lack."""
    if not missing:
        return None
    return Refusal(
        check="rights",
        message="this account may not",
        remedy="use an account with these rights",
        total=len(missing),
        first=tuple(missing[:SHOWN]),
    )


def reachable_nodes(
    holders: Iterable[Holder], nodes: Mapping[str, NodeRecord], agents: Mapping[str, bool] | None
) -> frozenset[str]:
    """Return the nodes whose agent can act: its Pod and its Node are Ready.

    `agents`: whether the agent's Pod on a node is Ready; None: agents have no Pods. A node that
    does not exist counts as well: its memory went with it.
    """
    names = {holder.name for holder in holders}
    if agents is None:
        return frozenset(names)
    return frozenset(
        name
        for name in names
        if name not in nodes or (agents.get(name, False) and nodes[name].ready == "True")
    )


def turns(
    holders: Sequence[Holder], *, reachable: frozenset[str], at_once: int
) -> tuple[Holder, ...]:
    """Return the nodes that may be told to release now, at most so many at a time.

    Those that wait for an engine take nobody's turn, nor do those without an agent; and where
    nothing is held there is nothing to wait for.
    """
    busy = [
        holder
        for holder in holders
        if holder.told and holder.held and not holder.leased and holder.name in reachable
    ]
    untold = [holder for holder in holders if not holder.told]
    free = [h for h in untold if not h.held or h.name not in reachable]
    waiting = [h for h in untold if h.held and h.name in reachable]
    return (*free, *waiting[: max(at_once - len(busy), 0)])


def share_of(total: int) -> int:
    """Return a tenth of so many nodes, rounded up, at least one: what may release at once."""
    return max(-(-total // 10), 1)


def entries_after(holder: Holder) -> tuple[Mapping[str, Any], ...]:
    """Return the entries that the node is to have, now that no pool exists.

    Those of retained pools go: an agent without an instruction keeps what it holds.
    """
    entries = []
    for entry in holder.entries:
        name = entry["name"]
        if entry.get("state") == "Absent":
            if not holder.released(name):
                entries.append(entry)
        elif name not in holder.retained:
            told = {key: entry[key] for key in ("name", "uid", "generation") if key in entry}
            entries.append({**told, "state": "Absent"})
    return tuple(entries)


def why_left(holder: Holder, reachable: frozenset[str]) -> str:
    """Return what a node that still holds memory waits for."""
    if holder.leased:
        return f"leased ({_leases(holder)})"
    if holder.name not in reachable:
        return "no agent that is Ready"
    return "being released" if holder.told else "waits for its turn"


def _held(pool: Mapping[str, Any]) -> PoolHeld:
    regions = pool.get("regions") or ()
    populated = sum(int(region.get("sizeBytes") or 0) for region in regions)
    return PoolHeld(
        size_bytes=max(populated, int(pool.get("readyBytes") or 0)),
        regions=len(regions),
        leased=int(pool.get("regionsLeased") or 0),
    )


def _is_of_this_boot(holder: Holder, node: NodeRecord | None) -> bool:
    return node is not None and (not node.boot_id or holder.boot_id == node.boot_id)


def _is_retained(entry: Mapping[str, Any], kept_pools: frozenset[str]) -> bool:
    """Whether the pool or, where the pool is gone, the entry's copy of it says Retain."""
    if entry.get("state") == "Absent":
        return False
    policy = entry.get("policy") or {}
    return entry["name"] in kept_pools or policy.get("deletionPolicy") == "Retain"


def _leases(holder: Holder) -> str:
    return ", ".join(
        f"{name}: {pool.leased} of {max(pool.regions, pool.leased)} regions"
        for name, pool in sorted(holder.leased.items())
    )


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _refusal(check: str, found: Sequence[str], message: str, remedy: str) -> Refusal | None:
    if not found:
        return None
    return Refusal(
        check=check,
        message=message,
        remedy=f"{remedy}, or accept it with --force {check}: {FORCE_WORDS[check]}",
        total=len(found),
        first=tuple(found[:SHOWN]),
    )
