"""The actions of one pool, in the order that keeps every promise of a published handoff."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import Backing
from hostprep.node.facts import Facts, LedgerEntry, PoolFacts, RegionFacts
from hostprep.node.plan import estimate
from hostprep.node.plan.actions import (
    Action,
    AdoptRegion,
    CreateRegion,
    DropHandoff,
    MakePool,
    MountMemory,
    PublishHandoff,
    RemovePool,
    RemoveRegion,
    ReserveHugePages,
    ReturnHugePages,
    ScrubRegion,
    UnmountMemory,
)
from hostprep.node.plan.changes import Slot, damage_of
from hostprep.node.plan.layouts import right_layouts
from hostprep.node.plan.mounts import emptied, folders, folders_for
from hostprep.node.plan.question import Offer, Question
from hostprep.node.plan.tmpfs import pins_with_noswap, takes_large_folios

__all__ = ["present_steps", "release_steps"]


def present_steps(question: Question, offer: Offer) -> tuple[Action, ...]:
    """Return what makes the pool as it should be; only adoptions where it is so already."""
    spec, pool, changes = question.spec, question.pool, offer.changes
    asked = {slot.backing for slot in changes.new}
    mount_dirs = folders_for((b for b in spec.backings if b in asked), pool)
    empty = emptied(pool, _staying(question, offer), set(mount_dirs.values()))
    actions: list[Action] = list(_withdraw(question, offer))
    actions += [
        RemoveRegion(
            pool=spec.name,
            region=removal.region.name,
            mount_dir=removal.region.mount_dir,
            why=removal.why,
            expected_bytes=removal.region.resident_bytes,
        )
        for removal in changes.removed
    ]
    actions += [UnmountMemory(pool=spec.name, mount_dir=name) for name in empty]
    actions += _returns(spec.name, offer.returns)
    if changes.new and changes.kept and any(isinstance(a, DropHandoff) for a in actions):
        # What stays is sound: it can be claimed while the rest is populated.
        actions.append(PublishHandoff(pool=spec.name))
    if changes.new or _must_make(question):
        actions.append(MakePool(pool=spec.name, gid=spec.gid, mode=spec.mode))
    actions += _reserves(spec, offer)
    actions += [_mount(question, offer, *mount) for mount in mount_dirs.items()]
    actions += [_create(question, slot, mount_dirs[slot.backing]) for slot in changes.new]
    actions += [step for region in changes.kept for step in _scrub(question, region)]
    actions += [
        AdoptRegion(pool=spec.name, region=region.name, expected_bytes=region.size_bytes)
        for region in changes.kept
    ]
    published = (pool is not None and pool.published) or not (changes.kept or changes.new)
    published = published and right_layouts(changes.kept, spec.sizing)
    if not published or any(not isinstance(a, AdoptRegion | ScrubRegion) for a in actions):
        actions.append(PublishHandoff(pool=spec.name))
    return tuple(actions)


def _staying(question: Question, offer: Offer) -> list[RegionFacts]:
    gone = [removal.region for removal in offer.changes.removed]
    return [region for region in question.regions if region not in gone]


def _of_other_boot(pool: PoolFacts | None, facts: Facts) -> bool:
    return pool is not None and pool.boot_id not in (None, facts.kernel.boot_id)


def _must_make(question: Question) -> bool:
    pool, spec = question.pool, question.spec
    if pool is None or pool.boot_id != question.facts.kernel.boot_id:
        return True
    return any(
        region.mode != spec.mode or spec.gid not in (None, region.gid)
        for region in pool.regions
        if region.finished
    )


def _withdraw(question: Question, offer: Offer) -> tuple[Action, ...]:
    pool = question.pool
    if pool is None:
        return ()
    changing = [r.region.name for r in offer.changes.removed if r.region.finished]
    if not pool.published:
        changing += [r.name for r in pool.regions if r.finished and r.leased and damage_of(r)]
    if _of_other_boot(pool, question.facts):
        why = "it is of another boot"
    elif changing:
        why = f"{', '.join(sorted(set(changing)))} will not be as promised"
    elif not pool.published:
        # Whatever stands there promises other files than these: were it still there when new
        # ones get their names, those would look as if somebody had put them in the place.
        why = "it does not match the regions"
    else:
        return ()
    return (DropHandoff(pool=pool.name, why=why),)


def _returns(pool: str, entries: Iterable[LedgerEntry]) -> list[Action]:
    return [
        ReturnHugePages(
            pool=pool,
            node_id=entry.node_id,
            page_bytes=entry.page_bytes,
            pages=entry.pages,
            expected_bytes=entry.pages * entry.page_bytes,
        )
        for entry in entries
        if entry.pages > 0
    ]


def _reserves(spec: PoolSpec, offer: Offer) -> list[Action]:
    return [
        ReserveHugePages(
            pool=spec.name,
            node_id=entry.node_id,
            page_bytes=entry.page_bytes,
            pages=entry.pages,
            expected_bytes=entry.pages * entry.page_bytes,
            expected_s=estimate.reserve_s(entry.pages * entry.page_bytes),
        )
        for entry in offer.reserves
    ]


def _mount(question: Question, offer: Offer, backing: Backing, mount_dir: str) -> MountMemory:
    kept = [region for region in _staying(question, offer) if region.finished]
    held = sum(region.size_bytes for region in kept if region.mount_dir == mount_dir)
    return MountMemory(
        pool=question.spec.name,
        mount_dir=mount_dir,
        backing=backing,
        size_bytes=held + offer.changes.new_bytes(backing),
        noswap=not backing.is_hugetlb and pins_with_noswap(question),
        gid=question.spec.gid,
        mode=question.spec.mode,
        large_folios=takes_large_folios(question, backing),
        own_mount=offer.own_mount,
    )


def _create(question: Question, slot: Slot, mount_dir: str) -> CreateRegion:
    node = slot.placement.node
    node_ids = question.layout.node_ids if node is None else (node,)
    cpus = estimate.cpus_for(slot.placement, question.layout.nodes, question.facts.process)
    threads = estimate.threads_for(slot.placement, cpus)
    missing = slot.size_bytes - (slot.resumed.resident_bytes if slot.resumed else 0)
    missing = max(0, missing)
    return CreateRegion(
        pool=question.spec.name,
        region=slot.name,
        mount_dir=slot.resumed.mount_dir if slot.resumed else mount_dir,
        backing=slot.backing,
        placement=slot.placement,
        size_bytes=slot.size_bytes,
        node_ids=node_ids,
        cpus=cpus,
        threads=threads,
        large_folios=takes_large_folios(question, slot.backing),
        gid=question.spec.gid,
        mode=question.spec.mode,
        expected_bytes=missing,
        expected_s=estimate.populate_s(missing, slot.backing, threads, len(node_ids)),
    )


def _scrub(question: Question, region: RegionFacts) -> tuple[Action, ...]:
    process = question.facts.process
    if region.clean or region.leased or region.retained or not region.scrubbable:
        return ()
    cpus = estimate.cpus_for(region.placement, question.layout.nodes, process)
    seconds = estimate.scrub_s(region.size_bytes, estimate.threads_for(region.placement, cpus))
    step = ScrubRegion(pool=question.spec.name, region=region.name)
    return (replace(step, expected_bytes=region.size_bytes, expected_s=seconds),)


def release_steps(spec: PoolSpec, pool: PoolFacts, facts: Facts) -> tuple[Action, ...]:
    """Return what gives everything of a pool back, the folder last of all."""
    stale = _of_other_boot(pool, facts)
    why = "it is of another boot" if stale else "the pool is released"
    actions: list[Action] = [DropHandoff(pool=spec.name, why=why)]
    actions += [
        RemoveRegion(
            pool=spec.name,
            region=region.name,
            mount_dir=region.mount_dir,
            why="the pool is released",
            force=spec.force,
            expected_bytes=region.resident_bytes,
        )
        for region in pool.regions
    ]
    actions += [UnmountMemory(pool=spec.name, mount_dir=name) for name in folders(pool)]
    if pool.boot_id == facts.kernel.boot_id:
        actions += _returns(spec.name, pool.taken)
    return (*actions, RemovePool(pool=spec.name))
