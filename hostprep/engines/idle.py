"""Memory of a sized pool that an engine leaves unused, though the pool has it for that engine.

Works on what the handoff says: no privileges, no API server.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hostprep.client.claim import claim_lock_briefly
from hostprep.client.handoff import Handoff, Region
from hostprep.client.scrub import why_locked
from hostprep.errors import HostprepError
from hostprep.paths import PoolPaths
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_TOLERATED = 10
"""One part in so many: what padding, and engines that round down, leave."""
_SHOWN = 4
_TAKE_COUNT = ("lmcache", "mooncake", "sglang")
"""Integrations that use as many regions as `hostprep exec --count` claims for one engine."""
_MOST_REGIONS = 4096


@dataclass(frozen=True)
class SizedRegion:
    """A region of a pool, as far as this goes."""

    name: str
    size_bytes: int
    layout: Mapping[str, Any] | None
    """As the handoff has it; None in a pool that was not sized."""

    @property
    def per_engine(self) -> int | None:
        """How many regions one engine is to claim; None where the pool does not say."""
        number = (self.layout or {}).get("regions_per_engine")
        is_number = type(number) is int and 1 <= number <= _MOST_REGIONS
        return number if is_number else None


@dataclass(frozen=True)
class IdleMemory:
    """What one engine leaves of the memory that its pool has for it. Sizes in bytes."""

    pool: str
    claimed: tuple[str, ...]
    per_engine: int
    """Regions that the pool has for one engine; as many as are claimed where it does not say."""
    regions: tuple[str, ...]
    """Those of them that are claimed by nobody."""
    regions_bytes: int
    within_bytes: int
    """Of the claimed regions: what the engine was told not to use."""
    meant_bytes: int
    """The claimed regions and the idle ones."""

    @property
    def size_bytes(self) -> int:
        """All that lies idle."""
        return self.regions_bytes + self.within_bytes

    def describe(self) -> str:
        """Return what lies idle, in a sentence."""
        parts = []
        if self.regions:
            shown = ", ".join(self.regions[:_SHOWN])
            more = len(self.regions) - _SHOWN
            shown += f" and {more} more" if more > 0 else ""
            parts.append(
                f"the pool was sized for engines that claim {self.per_engine} regions, this one "
                f"has {len(self.claimed)}: {format_bytes(self.regions_bytes)} in {shown}"
            )
        if self.within_bytes:
            parts.append(f"{format_bytes(self.within_bytes)} within {', '.join(self.claimed)}")
        return (
            f"{format_bytes(self.size_bytes)} of the {format_bytes(self.meant_bytes)} that pool "
            f"{self.pool} has for this engine lie idle: {'; '.join(parts)}"
        )

    def remedy(self, engine: str | None = None) -> str:
        """Return what to do; `engine`: the integration that claimed, None where that is unknown."""
        if not self.regions:
            return "have it use all of what it claims: leave out the option that limits it"
        again = "size the pool again for how the engine attaches: `hostprep size MODEL -o yaml`"
        name = engine or "and the engine's name in `hostprep engines`"
        are_there = len(self.claimed) + len(self.regions) >= self.per_engine
        if are_there and (engine is None or engine in _TAKE_COUNT):
            give = f"give `hostprep exec` --count {self.per_engine}"
            of_known = "" if engine else ", for an engine that takes several"
            return f"{give}{of_known}, or {again} with --integration {name}"
        return f"{again} with --integration {name}"

    def to_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "claimed": list(self.claimed),
            "regions_per_engine": self.per_engine,
            "idle_regions": list(self.regions),
            "idle_regions_bytes": self.regions_bytes,
            "idle_within_bytes": self.within_bytes,
            "idle_bytes": self.size_bytes,
            "meant_bytes": self.meant_bytes,
            "what": self.describe(),
            "remedy": self.remedy(),
        }


def idle_memory(
    pool: str,
    regions: Sequence[SizedRegion],
    claimed: Collection[str],
    *,
    free: Collection[str],
    used_bytes: int | None = None,
) -> IdleMemory | None:
    """Return what an engine with the `claimed` regions leaves idle; None for a tenth or less.

    `free`: the regions that no other engine holds; `used_bytes`: what the engine uses of those that
    it claimed, where that is known. None also where the pool was not sized for a model.
    """
    held = [region for region in regions if region.name in claimed and region.layout is not None]
    if not held:
        return None
    held_bytes = sum(region.size_bytes for region in held)
    per_engine = max((region.per_engine or len(held) for region in held), default=len(held))
    others = [
        region
        for region in regions
        if region.name in free and region.name not in claimed and region.per_engine == per_engine
    ]
    missing = others[: max(0, per_engine - len(held))]
    missing_bytes = sum(region.size_bytes for region in missing)
    within_bytes = 0 if used_bytes is None else max(0, held_bytes - used_bytes)
    if (missing_bytes + within_bytes) * _TOLERATED <= held_bytes + missing_bytes:
        return None
    return IdleMemory(
        pool=pool,
        claimed=tuple(region.name for region in held),
        per_engine=per_engine,
        regions=tuple(region.name for region in missing),
        regions_bytes=missing_bytes,
        within_bytes=within_bytes,
        meant_bytes=held_bytes + missing_bytes,
    )


def idle_beside(
    paths: PoolPaths, handoff: Handoff, claimed: Collection[str], *, used_bytes: int | None
) -> IdleMemory | None:
    """Return the same for a claim that this process has just made; asks the locks of the others.

    What cannot be asked is taken to be in use: there is no warning then.
    """
    regions = [SizedRegion(each.name, each.size_bytes, each.layout) for each in handoff.regions]
    everything = {region.name for region in regions}
    found = idle_memory(
        handoff.pool, regions, claimed, free=everything - set(claimed), used_bytes=used_bytes
    )
    if found is None or not found.regions:
        return found
    free = _unlocked(paths, [each for each in handoff.regions if each.name not in claimed])
    return idle_memory(handoff.pool, regions, claimed, free=free, used_bytes=used_bytes)


def _unlocked(paths: PoolPaths, regions: Sequence[Region]) -> set[str]:
    free = set()
    try:
        with claim_lock_briefly(paths):  # so that no claim takes our own look for a holder
            for region in regions:
                try:
                    if why_locked(paths, region) is None:
                        free.add(region.name)
                except HostprepError:
                    continue
    except HostprepError:
        return set()
    return free
