"""Looks, outcomes and entries for tests of the agent's pure parts."""

from __future__ import annotations

from typing import Any

from hostprep.agent.desired import Desire, Source, key_of, wanted_of
from hostprep.agent.messages import HugePageLook, Look, Outcome, PoolLook, RegionLook
from hostprep.agent.status import View
from hostprep.api.node_resource import PoolEntry

__all__ = [
    "BOOT",
    "desire_of",
    "entry_of",
    "look_of",
    "outcome_of",
    "pool_look",
    "region",
    "view_of",
]

BOOT = "11111111-2222-3333-4444-555555555555"
POLICY = {"size": "8Gi", "backings": ["HugeTLB2Mi"]}
GIB = 1 << 30


def entry_of(name: str = "kv", *, generation: int = 1, absent: bool = False) -> PoolEntry:
    return PoolEntry(
        name=name,
        uid=f"uid-of-{name}",
        generation=generation,
        absent=absent,
        policy={} if absent else POLICY,
    )


def region(name: str = "node0-0", state: str = "Free", **changes: Any) -> RegionLook:
    fields: dict[str, Any] = {
        "name": name,
        "size_bytes": 8 * GIB,
        "backing": "HugeTLB2Mi",
        "placement": "node:0",
        "state": state,
        "sound": state in ("Free", "Leased", "Dirty", "Retained"),
    }
    return RegionLook(**(fields | changes))


def pool_look(*regions: RegionLook, name: str = "kv", **changes: Any) -> PoolLook:
    published = bool(regions) and all(one.sound for one in regions)
    fields: dict[str, Any] = {"name": name, "generation": 1, "published": published}
    return PoolLook(regions=regions, **(fields | changes))


def look_of(*pools: PoolLook, boot_id: str = BOOT) -> Look:
    huge = (HugePageLook(2 << 20, 4096, 4096),)
    return Look(boot_id=boot_id, pools=pools, huge_pages=huge, took_s=0.004)


def outcome_of(entry: PoolEntry, **changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "wanted_bytes": 8 * GIB,
        "planned_bytes": 8 * GIB,
        "backing": "HugeTLB2Mi",
    }
    return Outcome(name=entry.name, key=key_of(entry), **(fields | changes))


def desire_of(*entries: PoolEntry, source: Source = Source.LIVE) -> Desire:
    return Desire(source=source, uid="u", generation=7, boot_id=BOOT, entries=entries)


def view_of(
    *entries: PoolEntry,
    look: Look,
    outcomes: tuple[Outcome, ...] = (),
    source: Source = Source.LIVE,
    **changes: Any,
) -> View:
    desire = desire_of(*entries, source=source)
    return View(
        desire=desire,
        instruction=wanted_of(desire),
        look=look,
        outcomes={outcome.name: outcome for outcome in outcomes},
        agent_version="0.1.0",
        **changes,
    )
