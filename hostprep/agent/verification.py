"""A verification round: every pool's files against its handoff, one failing probe at a time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from hostprep.agent.kept import AGE_LIMIT, WAITERS
from hostprep.agent.messages import (
    GateObservation,
    KeptObservation,
    LeaseWait,
    Observation,
    PoolObservation,
    RegionObservation,
)
from hostprep.api.node_resource import HugePageStatus
from hostprep.client.handoff import (
    Handoff,
    Region,
    check_region,
    open_region,
    read_handoff,
    verify_handoff,
    walk_region,
)
from hostprep.client.kept import WarmReport, kept_contents
from hostprep.client.sidecar import NO_PROCESS, mark_bad, read_sidecar, short_command
from hostprep.cuda.board_layout import FAILED, OPEN
from hostprep.errors import HostprepError
from hostprep.linux.files import closing_fd
from hostprep.linux.threads import Stopped
from hostprep.node.facts import Facts, PoolFacts, RegionFacts
from hostprep.node.observe import HostRoot, observe
from hostprep.node.observe.host import read_mounts
from hostprep.node.observe.pools import (
    observe_gate,
    observe_pool,
    pool_names,
    try_read_handoff,
    unobserved,
)
from hostprep.paths import PoolPaths

GATE_UNKNOWN = "Unknown"
_MOST_S = 1e9
"""Engines write the boards: an impossible figure must not spoil a sum for good."""


@dataclass(frozen=True, slots=True)
class Verification:
    """An observation for the agent, and the facts behind it for the plan."""

    observation: Observation
    facts: Facts

    @property
    def failed_pools(self) -> frozenset[str]:
        """Pools that could not be observed: a plan would take them for absent."""
        return frozenset(pool.name for pool in self.observation.pools if pool.failure)


def verify_node(
    root: str,
    *,
    scrubbing: Collection[tuple[str, str]] = (),
    repair: bool = True,
    limits: Mapping[str, float | None] | None = None,
) -> Verification:
    """Observe the node and all its pools. Never raises for what one pool's folder holds.

    `scrubbing` names (pool, region) that this process itself holds locked: dirty, not leased.
    Without `repair` nothing is changed, not even a lost lock made again. `limits`: for how many
    seconds pools keep contents, to be noted beside what they keep.
    """
    begin_s = time.monotonic()
    pools: list[PoolFacts] = []
    observed: list[PoolObservation] = []
    mounts = read_mounts()
    for name in pool_names(root):
        paths = PoolPaths(root, name)
        try:
            pool = observe_pool(paths, mounts, repair=repair, limits=limits)
            observed.append(_verify_pool(paths, pool, scrubbing))
            pools.append(pool)
        except Exception as error:  # it is that pool's, and no other's
            pools.append(unobserved(name, error))
            failure = f"cannot be looked at: {pools[-1].failure}"
            observed.append(
                PoolObservation(
                    name=name, generation=0, published=False, regions=(), failure=failure
                )
            )
    facts = observe(host=HostRoot("/"), root=root, pools=tuple(pools))
    observation = Observation(
        boot_id=facts.kernel.boot_id,
        pools=tuple(observed),
        huge_pages=tuple(
            HugePageStatus(
                page_bytes=size.page_bytes,
                total=size.total,
                held=min(sum(_held_pages(pool, size.page_bytes) for pool in pools), size.total),
            )
            for size in facts.huge_pages
        ),
        took_s=round(time.monotonic() - begin_s, 4),
    )
    return Verification(observation, facts)


def _verify_pool(
    paths: PoolPaths, pool: PoolFacts, scrubbing: Collection[tuple[str, str]]
) -> PoolObservation:
    handoff = try_read_handoff(paths)
    published = {region.name: region for region in handoff.regions} if handoff else {}
    problems = _problems(paths, handoff) if handoff else {}
    regions: list[RegionObservation] = []
    gates: list[GateObservation] = []
    kept: list[KeptObservation] = []
    for region in pool.regions:
        if (pool.name, region.name) in scrubbing:
            region = replace(region, leased=False, clean=False)  # noqa: PLW2901
        mark = ("BadMark", region.damage) if region.damage else ("", "")
        problem, why = problems.get(region.name, mark)
        sound = region.finished and not why and region.name in published
        # An unfinished region may have a finished namesake.
        if region.finished and (gate := gate_of(paths, region.name, leased=region.leased)):
            gates.append(gate)
        # Each by itself: while one is rebuilt, the others are what they were.
        state = replace(pool, published=sound).state_of(replace(region, damage=why or None))
        if found := _kept(paths, region, state):
            kept.append(found)
        regions.append(
            RegionObservation(
                name=region.name,
                size_bytes=region.size_bytes,
                backing=str(region.backing),
                placement=str(region.placement),
                state=state,
                sound=sound,
                message=why,
                problem=problem,
                holder=_holder(paths, region) if region.leased else "",
            )
        )
    finished = {region.name for region in pool.regions if region.finished}
    regions += [
        RegionObservation(
            name=name,
            size_bytes=0,
            backing=str(region.backing),
            placement=region.placement,
            state="Damaged",
            sound=False,
            message="its file is gone",
            problem=problems.get(name, ("", ""))[0],
        )
        for name, region in published.items()
        if name not in finished
    ]
    return PoolObservation(
        name=pool.name,
        generation=handoff.generation if handoff else 0,
        published=pool.published,
        regions=tuple(sorted(regions, key=lambda region: region.name)),
        gates=tuple(gates),
        kept=tuple(kept),
        waiters=pool.waiters,
        waits=_lease_waits(paths, pool),
    )


def _lease_waits(paths: PoolPaths, pool: PoolFacts) -> tuple[LeaseWait, ...]:
    """Return how long engines waited, those included that came and went since the last round."""
    found: dict[str, LeaseWait] = {}
    for region in pool.regions:
        sidecar = read_sidecar(paths, region.name) if region.finished else None
        if sidecar is not None and sidecar.waited_s is not None:
            found[sidecar.lease_id] = LeaseWait(sidecar.lease_id, _sane_s(sidecar.waited_s))
    return tuple(found.values())


def _kept(paths: PoolPaths, region: RegionFacts, state: str) -> KeptObservation | None:
    """Return what a region keeps for an owner, leased or not; None where it keeps nothing."""
    found = kept_contents(paths, region.name) if region.finished and not region.clean else None
    if found is None:
        return None
    gives_way = ""
    if not region.leased:
        gives_way = AGE_LIMIT if region.kept_is_over else "" if region.retained else WAITERS
    report = found.report or WarmReport()
    return KeptObservation(
        region=region.name,
        size_bytes=region.size_bytes,
        name=found.name,
        since_s=found.since_s,
        state=state,
        is_leased=region.leased,
        unheld_s=round(region.kept_s or 0.0, 1),
        gives_way=gives_way,
        reported_s=report.at_s,
        recovered_blocks=report.recovered_blocks,
        recovered_bytes=report.recovered_bytes,
        kept_blocks=report.kept_blocks,
        loaded_blocks=report.loaded_blocks,
        refused=tuple(sorted(report.refused)),
    )


def _problems(paths: PoolPaths, handoff: Handoff) -> dict[str, tuple[str, str]]:
    """Return (reason, message) for each region that is not as the handoff says."""
    return {
        region.name: (error.reason, error.message.removeprefix(f"region {region.name} "))
        for region, error in verify_handoff(paths, handoff)
        if error is not None
    }


def _holder(paths: PoolPaths, region: RegionFacts) -> str:
    sidecar = read_sidecar(paths, region.name)
    if sidecar is None or sidecar.holder == NO_PROCESS:
        return ""
    return f"process {sidecar.holder.pid}, {short_command(sidecar)}"


def _held_pages(pool: PoolFacts, page_bytes: int) -> int:
    """Return the pages that a pool's regions are in, or that were added for it if more."""
    added = sum(entry.pages for entry in pool.taken if entry.page_bytes == page_bytes)
    return max(pool.huge_pages(page_bytes), added)


# --- gates of engines


def gate_of(paths: PoolPaths, region: str, *, leased: bool) -> GateObservation | None:
    """Return the gate of the engine at a region; None where there is nothing to report.

    A run that is over is reported if its gate was decided: it may have begun and ended since the
    last round. Never raises for what is in the board's place.
    """
    try:
        seen = observe_gate(paths, region, leased=leased)
    except (HostprepError, OSError) as error:
        is_missing = isinstance(error, HostprepError) and error.reason == "NoBoard"
        if not leased or is_missing:
            return None  # a board left behind is no gate: the next engine makes a new one
        return GateObservation(region=region, state=GATE_UNKNOWN)
    if not seen.is_running and not seen.is_announced:
        return None
    slots = [rank.slot for rank in seen.view.ranks if rank.alive]
    announced = seen.view.gate
    return GateObservation(
        region=region,
        state=seen.state,
        run=seen.view.generation.hex(),
        is_running=seen.is_running,
        open_after_s=_sane_s(announced.took_s) if announced and seen.state == OPEN else None,
        # A rank that failed has unregistered what it had registered.
        registered_bytes=sum(slot.done_bytes for slot in slots if slot.state != FAILED),
        longest_chunk_s=max((_sane_s(slot.longest_chunk_s) for slot in slots), default=0.0),
    )


def _sane_s(seconds: float) -> float:
    return min(max(seconds, 0.0), _MOST_S) if math.isfinite(seconds) else 0.0


# --- memory errors


def mark_bad_regions(root: str, *, stop: threading.Event) -> tuple[tuple[str, str], ...]:
    """Touch every page of every published region, leased ones too; mark those with bad pages.

    A page that the hardware reported stays where it is in the file (hugetlbfs as of Linux 6.1,
    tmpfs as of 5.16) and looks resident: neither size nor blocks show it, and reading everything
    every few seconds is out of the question. But the kernel counts such pages
    (`HardwareCorrupted` in /proc/meminfo): a new count calls for this walk, and touching resident
    pages costs their page table entries only.

    Holders are not disturbed: it maps for reading, and only what is resident. Returns (pool, why)
    of what could not be read or marked: a bad page may still be there, so walk again. A region
    that fails stops no other. Raises Stopped between two regions.
    """
    failures: list[tuple[str, str]] = []
    for name in pool_names(root):
        paths = PoolPaths(root, name)
        try:
            regions = read_handoff(paths).regions
        except HostprepError as error:
            if error.reason != "NotPrepared":  # nothing is published: no engine can claim it
                failures.append((name, error.message))
            continue
        for region in regions:
            if stop.is_set():
                raise Stopped
            try:
                if why := _why_bad(paths, region):
                    mark_bad(paths, region.name, why, size_bytes=region.size_bytes)
            except (HostprepError, OSError) as error:
                failures.append((name, str(error)))
    return tuple(failures)


def _why_bad(paths: PoolPaths, region: Region) -> str:
    try:
        with closing_fd(open_region(paths, region, writable=False)) as fd:
            check_region(region, fd)
            walk_region(region, fd)
    except HostprepError as error:  # every round reports problems of any other kind
        prefix = f"region {region.name} "
        return error.message.removeprefix(prefix) if error.reason == "PoisonedPage" else ""
    return ""
