"""Observations, results and entries for tests of the agent's pure parts."""

from __future__ import annotations

from typing import Any

from hostprep.agent.desired import DesiredState, Source, entry_key, instruction_of
from hostprep.agent.messages import (
    Observation,
    PoolObservation,
    PoolResult,
    RegionObservation,
)
from hostprep.agent.status import NodeContext
from hostprep.api.node_resource import HugePageStatus, PoolEntry

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


def region(name: str = "node0-0", state: str = "Free", **changes: Any) -> RegionObservation:
    fields: dict[str, Any] = {
        "name": name,
        "size_bytes": 8 * GIB,
        "backing": "HugeTLB2Mi",
        "placement": "node:0",
        "state": state,
        "sound": state in ("Free", "Leased", "Dirty", "Retained"),
    }
    return RegionObservation(**(fields | changes))


def pool_observation(
    *regions: RegionObservation, name: str = "kv", **changes: Any
) -> PoolObservation:
    published = bool(regions) and all(one.sound for one in regions)
    fields: dict[str, Any] = {"name": name, "generation": 1, "published": published}
    return PoolObservation(regions=regions, **(fields | changes))


def observation_of(*pools: PoolObservation, boot_id: str = BOOT) -> Observation:
    huge = (HugePageStatus(page_bytes=2 << 20, total=4096, held=4096),)
    return Observation(boot_id=boot_id, pools=pools, huge_pages=huge, took_s=0.004)


def result_of(entry: PoolEntry, **changes: Any) -> PoolResult:
    fields: dict[str, Any] = {
        "wanted_bytes": 8 * GIB,
        "planned_bytes": 8 * GIB,
        "backing": "HugeTLB2Mi",
    }
    return PoolResult(name=entry.name, key=entry_key(entry), **(fields | changes))


def desired_state_of(*entries: PoolEntry, source: Source = Source.LIVE) -> DesiredState:
    return DesiredState(source=source, uid="u", generation=7, boot_id=BOOT, entries=entries)


def context_of(
    *entries: PoolEntry,
    observation: Observation,
    results: tuple[PoolResult, ...] = (),
    source: Source = Source.LIVE,
    **changes: Any,
) -> NodeContext:
    desired = desired_state_of(*entries, source=source)
    return NodeContext(
        desired=desired,
        instruction=instruction_of(desired),
        observation=observation,
        results={result.name: result for result in results},
        **changes,
    )
