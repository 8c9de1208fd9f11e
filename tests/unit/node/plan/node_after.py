"""What a machine's facts are after a plan was carried out.

Asserts on the way that no memory, no huge page and no ledger goes below zero.
"""

from __future__ import annotations

from dataclasses import replace

from hostprep.api.pool_spec import Placement
from hostprep.backing import Backing
from hostprep.node.facts import Facts, LedgerEntry, Mount, NumaNode, PoolFacts, RegionFacts
from hostprep.node.plan.actions import (
    Action,
    CreateRegion,
    DropHandoff,
    MakePool,
    MountMemory,
    Plan,
    PublishHandoff,
    RemovePool,
    RemoveRegion,
    ReserveHugePages,
    ReturnHugePages,
    ScrubRegion,
    UnmountMemory,
)
from tests.support.node_facts import BOOT, PAGE, blocks, mount, region, reserved_bytes


def carried_out(facts: Facts, plan: Plan) -> Facts:
    """Return the facts of the machine once every action of the plan succeeded."""
    for action in plan.actions:
        facts = _after(facts, action)
    return facts


def _after(facts: Facts, action: Action) -> Facts:
    if isinstance(action, ReserveHugePages):
        facts = _move_pages(facts, action.node_id, action.page_bytes, action.pages)
        return _ledger(facts, action.pool, action.node_id, action.page_bytes, action.pages)
    if isinstance(action, ReturnHugePages):
        facts = _move_pages(facts, action.node_id, action.page_bytes, -action.pages)
        return _ledger(facts, action.pool, action.node_id, action.page_bytes, -action.pages)
    if isinstance(action, RemovePool):
        return replace(facts, pools=tuple(p for p in facts.pools if p.name != action.pool))
    there = facts.pool(action.pool) or PoolFacts(action.pool, BOOT, 0, False, (), (), ())
    if isinstance(action, CreateRegion):
        return _create(facts, there, action)
    if isinstance(action, RemoveRegion):
        gone = next(
            r for r in there.regions if (r.name, r.mount_dir) == (action.region, action.mount_dir)
        )
        facts = facts if gone.finished else _drop_reservation(facts, gone)
        facts = _occupy(facts, gone.backing, gone.placement, -gone.resident_bytes)
        there = replace(there, regions=tuple(r for r in there.regions if r is not gone))
    elif isinstance(action, DropHandoff):
        there = replace(there, published=False)
    elif isinstance(action, PublishHandoff):
        there = replace(there, published=True)
    elif isinstance(action, MakePool):
        void = there.boot_id != BOOT
        there = replace(there, boot_id=BOOT, taken=() if void else there.taken)
    elif isinstance(action, UnmountMemory):
        kept = tuple(m for m in there.mounts if m.path.rsplit("/", 1)[-1] != action.mount_dir)
        assert all(r.mount_dir != action.mount_dir for r in there.regions)
        there = replace(there, mounts=kept)
    elif isinstance(action, MountMemory) and action.own_mount:
        new = mount(action.pool, action.mount_dir, action.backing, limit=action.size_bytes)
        others = tuple(m for m in there.mounts if m.path != new.path)
        if len(others) == len(there.mounts) or not action.backing.is_hugetlb:
            there = replace(there, mounts=(*others, new))
    elif isinstance(action, ScrubRegion):
        there = replace(
            there,
            regions=tuple(
                replace(r, clean=True) if r.name == action.region else r for r in there.regions
            ),
        )
    return _with_pool(facts, there)


def _with_pool(facts: Facts, there: PoolFacts) -> Facts:
    there = replace(there, mounts=tuple(_with_room(there, found) for found in there.mounts))
    return replace(facts, pools=(*(p for p in facts.pools if p.name != there.name), there))


def _with_room(there: PoolFacts, found: Mount) -> Mount:
    """Return a mount with what is left of its limit, which files never go beyond."""
    if found.limit_bytes is None:
        return found
    here = [r for r in there.regions if found.path.endswith(f"/{r.mount_dir}")]
    free = found.limit_bytes - reserved_bytes(here)
    assert free >= 0, (found.path, found.limit_bytes, here)
    return replace(found, free_bytes=free)


def _create(facts: Facts, there: PoolFacts, action: CreateRegion) -> Facts:
    half = next((r for r in there.regions if r.name == action.region and not r.finished), None)
    assert all(r.name != action.region or r is half for r in there.regions)
    done = half.resident_bytes if half else 0
    facts = _drop_reservation(facts, half) if half else facts
    facts = _occupy(facts, action.backing, action.placement, action.size_bytes - done)
    made = region(action.region, action.size_bytes, action.backing, mount_dir=action.mount_dir)
    kept = tuple(r for r in there.regions if r is not half)
    return _with_pool(facts, replace(there, regions=(*kept, made)))


def _drop_reservation(facts: Facts, half: RegionFacts) -> Facts:
    """End the reservation of a half-made hugetlbfs file: faulted now, or gone with the file."""
    page = half.backing.page_bytes
    open_pages = (half.size_bytes - half.resident_bytes) // page if half.backing.is_hugetlb else 0
    totals = tuple(
        replace(pool, reserved=max(0, pool.reserved - open_pages))
        if pool.page_bytes == page
        else pool
        for pool in facts.huge_pages
    )
    return replace(facts, huge_pages=totals)


def _occupy(facts: Facts, backing: Backing, placement: Placement, size: int) -> Facts:
    """Take so much memory for a region, or give it back where negative."""
    eligible = [n.node_id for n in facts.nodes if n.cpus]
    ids = eligible if placement.node is None else [placement.node]
    pages = size // backing.page_bytes
    for index, node_id in enumerate(ids):
        share = pages // len(ids) + (index < pages % len(ids))
        node = facts.node(node_id)
        assert node is not None
        if backing.is_hugetlb:
            facts = _change_pages(facts, node_id, backing.page_bytes, 0, -share)
        else:
            facts = _change_free(facts, node, -share * backing.page_bytes)
    return facts


def _move_pages(facts: Facts, node_id: int, page: int, pages: int) -> Facts:
    node = facts.node(node_id)
    assert node is not None
    return _change_pages(_change_free(facts, node, -pages * page), node_id, page, pages, pages)


def _change_pages(facts: Facts, node_id: int, page: int, total: int, free: int) -> Facts:
    node = facts.node(node_id)
    assert node is not None
    old = node.huge(page)
    new = replace(old, total=old.total + total, free=old.free + free)
    assert 0 <= new.free <= new.total, (node_id, page, new)
    others = tuple(pool for pool in node.huge_pages if pool.page_bytes != page)
    machine_old = facts.huge(page)
    machine_new = replace(
        machine_old, total=machine_old.total + total, free=machine_old.free + free
    )
    assert machine_new.free >= machine_new.reserved or free > 0
    return replace(
        facts,
        nodes=tuple(
            replace(n, huge_pages=(*others, new)) if n.node_id == node_id else n
            for n in facts.nodes
        ),
        huge_pages=(*(p for p in facts.huge_pages if p.page_bytes != page), machine_new),
    )


def _change_free(facts: Facts, node: NumaNode, size: int) -> Facts:
    first = node.zones[0]
    free = first.free_bytes + size
    assert free >= 0, (node.node_id, free)
    contiguous = sum(n * (PAGE << order) for order, n in enumerate(first.free_blocks))
    new_zone = replace(
        first, free_bytes=free, free_blocks=blocks(max(0, min(free, contiguous + size)))
    )
    changed = replace(node, free_bytes=node.free_bytes + size, zones=(new_zone, *node.zones[1:]))
    memory = replace(
        facts.memory,
        free_bytes=facts.memory.free_bytes + size,
        available_bytes=facts.memory.available_bytes + size,
    )
    nodes = tuple(changed if n.node_id == node.node_id else n for n in facts.nodes)
    return replace(facts, nodes=nodes, memory=memory)


def _ledger(facts: Facts, name: str, node_id: int, page: int, pages: int) -> Facts:
    there = facts.pool(name)
    assert there is not None, "huge pages are reserved before the pool's record exists"
    entries = {(e.node_id, e.page_bytes): e.pages for e in there.taken}
    entries[node_id, page] = entries.get((node_id, page), 0) + pages
    assert entries[node_id, page] >= 0, "more is returned than was taken"
    taken = tuple(LedgerEntry(n, p, count) for (n, p), count in entries.items() if count)
    return _with_pool(facts, replace(there, taken=taken))
