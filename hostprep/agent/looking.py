"""A verification round: every pool's files against its handoff, one failing probe at a time."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from hostprep.agent.gates import look_at_gate
from hostprep.agent.messages import GateLook, HugePageLook, Look, PoolLook, Problem, RegionLook
from hostprep.client.handoff import Handoff, Region
from hostprep.client.handoff_reader import read_handoff
from hostprep.client.sidecar import NOBODY, read_sidecar, short_command
from hostprep.client.verify import verify_handoff
from hostprep.errors import HostprepError
from hostprep.node.facts import Facts, HugePageTotals, PoolFacts, RegionFacts
from hostprep.node.observe import HostRoot, observe
from hostprep.node.observe.pools import observe_pool, pool_names, read_mounts
from hostprep.paths import PoolPaths

__all__ = ["Seen", "look"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A look for the agent, and the facts behind it for the plan."""

    look: Look
    facts: Facts

    @property
    def unseen(self) -> frozenset[str]:
        """Pools that could not be looked at: a plan would take them for absent."""
        return frozenset(pool.name for pool in self.look.pools if pool.failure)


def look(root: str, *, scrubbing: Collection[tuple[str, str]] = (), repair: bool = True) -> Seen:
    """Look at the node and all its pools. Never raises for what one pool's folder holds.

    `scrubbing` names (pool, region) that this process itself holds locked: dirty, not leased.
    Without `repair` nothing is changed, not even a lock made anew that was lost.
    """
    begin_s = time.monotonic()
    pools: list[PoolFacts] = []
    looks: list[PoolLook] = []
    mounts = read_mounts()
    for name in pool_names(root):
        paths = PoolPaths(root, name)
        try:
            facts = observe_pool(paths, mounts, repair=repair)
            looks.append(_pool_look(paths, facts, scrubbing))
            pools.append(facts)
        except (HostprepError, OSError, ValueError) as error:
            failure = f"cannot be looked at: {error}"
            looks.append(
                PoolLook(name=name, generation=0, published=False, regions=(), failure=failure)
            )
    facts_of_node = observe(host=HostRoot("/"), root=root, pools=tuple(pools))
    found = Look(
        boot_id=facts_of_node.kernel.boot_id,
        pools=tuple(looks),
        huge_pages=tuple(_huge_pages(total, pools) for total in facts_of_node.huge_pages),
        took_s=round(time.monotonic() - begin_s, 4),
        warnings=facts_of_node.warnings,
    )
    return Seen(found, facts_of_node)


def _pool_look(
    paths: PoolPaths, pool: PoolFacts, scrubbing: Collection[tuple[str, str]]
) -> PoolLook:
    handoff = _handoff(paths)
    problems = _problems(paths, handoff)
    promised = {region.name: region for region in handoff.regions} if handoff else {}
    regions = []
    gates: list[GateLook | None] = []
    for region in pool.regions:
        if (pool.name, region.name) in scrubbing:
            region = replace(region, leased=False, clean=False)  # noqa: PLW2901
        why = problems.get(region.name, ("", ""))[1] or region.damage
        sound = region.finished and not why and region.name in promised
        if region.finished:  # a half-made one may have a finished namesake
            gates.append(look_at_gate(paths, region.name, leased=region.leased))
        regions.append(_region_look(paths, pool, replace(region, damage=why or None), sound))
    there = {region.name for region in pool.regions if region.finished}
    gone = [region for name, region in promised.items() if name not in there]
    reasons = {name: reason for name, (reason, _) in problems.items()}
    for region in pool.regions:
        if region.damage:
            reasons.setdefault(region.name, "BadMark")
    return PoolLook(
        name=pool.name,
        generation=handoff.generation if handoff else 0,
        published=pool.published,
        regions=tuple(sorted([*regions, *map(_gone, gone)], key=lambda region: region.name)),
        problems=tuple(Problem(name, reason) for name, reason in reasons.items()),
        gates=tuple(gate for gate in gates if gate is not None),
    )


def _handoff(paths: PoolPaths) -> Handoff | None:
    try:
        return read_handoff(paths)
    except HostprepError:
        return None


def _problems(paths: PoolPaths, handoff: Handoff | None) -> dict[str, tuple[str, str]]:
    """Return (reason, message) for each region that is not as promised."""
    if handoff is None:
        return {}
    return {
        region.name: (error.reason, error.message.removeprefix(f"region {region.name} "))
        for region, error in verify_handoff(paths, handoff)
        if error is not None
    }


def _region_look(paths: PoolPaths, pool: PoolFacts, region: RegionFacts, sound: bool) -> RegionLook:
    return RegionLook(
        name=region.name,
        size_bytes=region.size_bytes,
        backing=str(region.backing),
        placement=str(region.placement),
        # Each by itself: while one is rebuilt, the others are what they were.
        state=replace(pool, published=sound).state_of(region),
        sound=sound,
        message=region.damage or "",
        holder=_holder(paths, region) if region.leased else "",
    )


def _gone(region: Region) -> RegionLook:
    return RegionLook(
        name=region.name,
        size_bytes=0,
        backing=str(region.backing),
        placement=region.placement,
        state="Damaged",
        sound=False,
        message="its file is gone",
    )


def _holder(paths: PoolPaths, region: RegionFacts) -> str:
    sidecar = read_sidecar(paths, region.name)
    if sidecar is None or sidecar.holder == NOBODY:
        return ""
    return f"process {sidecar.holder.pid}, {short_command(sidecar)}"


def _huge_pages(total: HugePageTotals, pools: list[PoolFacts]) -> HugePageLook:
    held = sum(_held(pool, total.page_bytes) for pool in pools)
    return HugePageLook(total.page_bytes, total.total, min(held, total.total))


def _held(pool: PoolFacts, page_bytes: int) -> int:
    """Return the pages that a pool's regions are in, or that were added for it if more."""
    in_regions = sum(
        region.resident_bytes // page_bytes
        for region in pool.regions
        if region.backing.is_hugetlb and region.backing.page_bytes == page_bytes
    )
    added = sum(entry.pages for entry in pool.taken if entry.page_bytes == page_bytes)
    return max(in_regions, added)
