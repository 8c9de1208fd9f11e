"""The handoff: built from what the kernel shows after the work, never from what was planned."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import hostprep
from hostprep.api.slot_layout import SlotLayout
from hostprep.client.handoff import AttachAdvice, Handoff, Region
from hostprep.errors import FailedError, HostprepError
from hostprep.linux.files import atomic_write
from hostprep.node.apply.folder import clear_debris
from hostprep.node.apply.zipapp import NAME, build_zipapp
from hostprep.node.facts import Facts, PoolFacts, RegionFacts
from hostprep.node.ledger import LedgerWriter
from hostprep.node.observe.pools import as_region
from hostprep.node.plan.placement import layout_of
from hostprep.paths import PoolPaths

_MAX_READ_THREADS = 16


def publish(
    paths: PoolPaths,
    facts: Facts,
    pool: PoolFacts,
    writer: LedgerWriter,
    *,
    gid: int | None,
    sizing: SlotLayout | None = None,
    write: Callable[..., None] = atomic_write,
) -> Handoff:
    """Publish all regions that are finished and sound, under the next generation."""
    ledger = writer.ledger
    generation = ledger.generation + 1
    handoff = build_handoff(paths, facts, pool, generation, ledger.pool_uid, sizing=sizing)
    if not handoff.regions:
        raise FailedError(
            f"pool {paths.pool} has no sound region to publish",
            reason="NothingToPublish",
            remedy="run prepare again; see `hostprep status` for the damage",
        )
    writer.update(generation=generation)
    mode = 0o640 if gid is not None else 0o644
    write(paths.handoff, handoff.to_bytes(), mode=mode, gid=gid)
    return handoff


def build_handoff(
    paths: PoolPaths,
    facts: Facts,
    pool: PoolFacts,
    generation: int,
    pool_uid: str,
    *,
    sizing: SlotLayout | None = None,
) -> Handoff:
    """Return the handoff for what the pool's folder holds."""
    before = facts.pool(paths.pool)
    # The layouts, by inode, as they were before the handoff was withdrawn.
    layouts = {region.inode: region.layout for region in before.regions} if before else {}

    def published(region: RegionFacts) -> Region:
        known = replace(region, layout=region.layout or layouts.get(region.inode, ""))
        layout = layout_of(known, sizing)
        return replace(as_region(region), layout=layout, attach=attach_advice(facts, region))

    return Handoff(
        pool=paths.pool,
        pool_uid=pool_uid,
        generation=generation,
        boot_id=facts.kernel.boot_id,
        agent_version=hostprep.__version__,
        regions=tuple(
            published(region)
            for region in sorted(pool.regions, key=lambda region: region.name)
            if region.finished and region.damage is None
        ),
    )


def attach_advice(facts: Facts, region: RegionFacts) -> AttachAdvice:
    """Return the node's advice to engines that attach.

    Memory-only NUMA nodes on arm64 beside NVIDIA GPUs are GPU memory (GB200 and its like):
    there the GPUs use the host's page tables and registering gains nothing.
    """
    nodes = [
        node for node in facts.nodes if node.cpus and region.placement.node in (None, node.node_id)
    ]
    cpus = sum(len(node.cpus) for node in nodes) or 1
    coherent = facts.kernel.arch == "aarch64" and bool(facts.gpus)
    return AttachAdvice(
        populate_read_threads=min(cpus, _MAX_READ_THREADS),
        skip_register=coherent and any(not node.cpus for node in facts.nodes),
    )


def publish_zipapp(root: str) -> None:
    """Have the engine half's zipapp beside the pools, current; absent is no reason to fail."""
    path = f"{root}/{NAME}"
    data = build_zipapp()
    try:
        with open(path, "rb") as file:
            if file.read() == data:
                return
    except OSError:
        clear_debris(path)
    try:
        atomic_write(path, data, mode=0o755)
    except HostprepError:
        if os.path.exists(path):
            raise
