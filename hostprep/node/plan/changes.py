"""Which regions stay, go and are missing, for one pool and candidate backings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hostprep.api.pool_spec import Placement, PoolSpec
from hostprep.backing import Backing
from hostprep.node.facts import RegionFacts
from hostprep.node.plan.placement import Layout, cut, granule_bytes, pages_per_node


@dataclass(frozen=True, slots=True)
class Removal:
    """A region that goes, and why."""

    region: RegionFacts
    why: str


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """A region to be made, or one half made to be completed."""

    name: str
    placement: Placement
    size_bytes: int
    backing: Backing
    resumed: RegionFacts | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """The way from what is there to what is asked for."""

    kept: tuple[RegionFacts, ...] = ()
    removed: tuple[Removal, ...] = ()
    blocked: tuple[str, ...] = ()
    new: tuple[PlannedRegion, ...] = ()
    too_small: tuple[Placement, ...] = ()
    """Where a page of the candidate backing is more than what is missing."""

    def new_bytes(self, backing: Backing) -> int:
        """Return the size of the new regions of a backing."""
        return sum(planned.size_bytes for planned in self.new if planned.backing is backing)

    def pages_per_node(
        self, backing: Backing, page_bytes: int, node_ids: tuple[int, ...]
    ) -> dict[int, int]:
        """Return the pages that the new regions of a backing take on each node."""
        need: Counter[int] = Counter()
        for planned in self.new:
            if planned.backing is backing:
                size, placement = planned.size_bytes, planned.placement
                need.update(pages_per_node(size, page_bytes, placement, node_ids))
        return need


def damage_of(region: RegionFacts) -> str | None:
    """Return why a finished region may not be handed out."""
    if region.damage is None and region.resident_bytes < region.size_bytes:
        return "not all of its pages are resident"
    return region.damage


@dataclass(slots=True)
class _Sorted:
    kept: list[RegionFacts] = field(default_factory=list)
    held_out: list[RegionFacts] = field(default_factory=list)
    removed: list[Removal] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)


def compute_changes(
    spec: PoolSpec,
    layout: Layout,
    regions: Sequence[RegionFacts],
    *,
    wanted_bytes: int,
    backings: Mapping[Placement, Backing],
    base_page_bytes: int,
) -> Changes:
    """Return the changes that lead to `wanted_bytes`; new regions have their placement's backing.

    Leased regions are never among the removed: those that should go are blocked, and kept. A
    damaged one that is leased is blocked too, is neither kept nor replaced, and holds its place.
    """
    found = _sort(spec, layout, [region for region in regions if region.finished])
    occupied = (*found.kept, *found.held_out)
    astray = sum(r.size_bytes for r in occupied if not layout.count(r.placement))
    share = max(0, wanted_bytes - astray) // layout.region_count

    def granule(of: Backing) -> int:
        return granule_bytes(of, share, base_page_bytes)

    finest = min(granule(allowed) for allowed in spec.backings)
    kept, removed, blocked = found.kept, found.removed, found.blocked
    cuts: list[tuple[Placement, int]] = []
    too_small: list[Placement] = []
    for placement, count in layout.counts:
        there = [region for region in occupied if region.placement == placement]
        going, stuck = _surplus(there, count * share)
        blocked += [region.name for region in stuck if region.name not in blocked]
        removed += [Removal(region, _smaller(region)) for region in going]
        kept = [region for region in kept if region not in going]
        rest = [region for region in there if region not in going]
        own = max((granule(r.backing) for r in rest), default=finest)
        sizes, short = _missing(rest, count, share, own, max(own, granule(backings[placement])))
        cuts += [(placement, size) for size in sizes]
        too_small += [placement] if short else []
    unfinished = [region for region in regions if not region.finished]
    staying = {region.name for region in (*kept, *found.held_out)}
    new = _named(cuts, staying, unfinished, backings)
    resumed = [planned.resumed for planned in new if planned.resumed is not None]
    removed += _leftovers(unfinished, resumed, regions)
    return Changes(tuple(kept), tuple(removed), tuple(blocked), new, tuple(too_small))


def _sort(spec: PoolSpec, layout: Layout, finished: Sequence[RegionFacts]) -> _Sorted:
    found = _Sorted()
    for region in finished:
        damage = damage_of(region)
        why = _why_not(spec, layout, region, damage)
        if why is not None and not region.leased:
            found.removed.append(Removal(region, why))
            continue
        if why is not None:
            found.blocked.append(region.name)
        if damage is None:
            found.kept.append(region)
        else:
            # Of an engine that enlarged its file only what it has in memory counts.
            size_bytes = max(region.place_bytes or region.size_bytes, region.resident_bytes)
            found.held_out.append(replace(region, size_bytes=size_bytes))
    return found


def _why_not(spec: PoolSpec, layout: Layout, region: RegionFacts, damage: str | None) -> str | None:
    if damage is not None:
        return f"damaged: {damage}"
    if region.backing not in spec.backings:
        return f"{region.backing} is no longer asked for"
    if not layout.count(region.placement):
        return f"no region is asked for at {region.placement}"
    if spec.region_bytes not in (None, region.size_bytes):
        return "the pool is sized for regions of another size"
    return None


def _index(region: RegionFacts) -> int:
    named = Placement.of_region(region.name)
    return named[1] if named else 0


def _surplus(
    there: Sequence[RegionFacts], target_bytes: int
) -> tuple[list[RegionFacts], list[RegionFacts]]:
    """Return the unleased regions that go, and leased ones that should, each newest first.

    Regions that are kept for an owner go last, the one that was kept longest first of them.
    """
    excess = sum(region.size_bytes for region in there) - target_bytes
    newest = sorted(there, key=_index, reverse=True)
    free = sorted(
        (r for r in newest if not r.leased and damage_of(r) is None),
        key=lambda region: (region.kept_s is not None, region.kept_order),
    )
    going = _enough(free, excess)
    excess -= sum(region.size_bytes for region in going)
    return going, _enough([region for region in newest if region.leased], excess)


def _smaller(region: RegionFacts) -> str:
    what = ", with what it keeps for its owner" if region.kept_s is not None else ""
    return f"the pool has become smaller{what}"


def _enough(candidates: Sequence[RegionFacts], excess_bytes: int) -> list[RegionFacts]:
    """Return the first that make up the excess, less those that turn out not to be needed."""
    chosen: list[RegionFacts] = []
    left = excess_bytes
    for region in candidates:
        if left <= 0:
            break
        chosen.append(region)
        left -= region.size_bytes
    for region in chosen[:]:
        if left + region.size_bytes <= 0:
            chosen.remove(region)
            left += region.size_bytes
    return chosen


def _missing(
    there: Sequence[RegionFacts], count: int, share: int, own: int, coarse: int
) -> tuple[tuple[int, ...], bool]:
    """Return the sizes to be made at one placement, and whether pages are too large for that.

    `own` is the granule of the regions that are there: what rounding to it has left over is not
    missing. `coarse` is the larger of it and the candidate backing's.
    """
    present = sum(region.size_bytes for region in there)

    def deficit(granule: int) -> int:
        return count * (share // granule * granule) - present

    sizes = cut(deficit(coarse), share, count - len(there), coarse)
    return sizes, not sizes and (deficit(own) >= own or not there)


def _named(
    cuts: Sequence[tuple[Placement, int]],
    staying: set[str],
    unfinished: Sequence[RegionFacts],
    backings: Mapping[Placement, Backing],
) -> tuple[PlannedRegion, ...]:
    """Give each new region the name of a half-made one that matches, else the lowest free."""
    used = set(staying)
    planned_regions: list[PlannedRegion] = []
    for placement, size in cuts:
        resumed = next(
            (
                u
                for u in unfinished
                if (u.placement, u.size_bytes) == (placement, size)
                and u.backing is backings[placement]
                and u.name not in used
                and not u.leased
            ),
            None,
        )
        name = resumed.name if resumed else _free_name(placement, used)
        used.add(name)
        planned_regions.append(PlannedRegion(name, placement, size, backings[placement], resumed))
    return tuple(planned_regions)


def _free_name(placement: Placement, used: set[str]) -> str:
    index = 0
    while placement.region_name(index) in used:
        index += 1
    return placement.region_name(index)


def _leftovers(
    unfinished: Sequence[RegionFacts],
    resumed: Sequence[RegionFacts],
    regions: Sequence[RegionFacts],
) -> list[Removal]:
    """Return the half-made ones that go. One with a finished namesake is left alone here.

    RemoveRegion goes by name: it would take the finished one; apply clears temporary names.
    """
    finished = {(region.mount_dir, region.name) for region in regions if region.finished}
    return [
        Removal(region, "an earlier run left it half made")
        for region in unfinished
        if region not in resumed and (region.mount_dir, region.name) not in finished
    ]
