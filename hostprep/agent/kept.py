"""What regions keep for their owners: metrics, and what became of it from round to round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hostprep.agent.messages import KeptObservation, Observation, PoolObservation
from hostprep.api.node_resource import GivenUp, field_label

if TYPE_CHECKING:
    from hostprep.agent.metrics import Registry

AGE_LIMIT = "AgeLimit"
WAITERS = "Waiters"
CLAIMED = "Claimed"
REMOVED = "Removed"
OTHER = "Other"
REASONS = (AGE_LIMIT, WAITERS, CLAIMED, REMOVED, OTHER)
"""Why a region keeps its contents no longer: `retention.maxAgeSeconds`; others wait for memory;
another claim took it, or its owner's own came too late; it was removed, or is made again; else,
such as `hostprep purge`."""

_STATES = ("Leased", "Retained")
_LEAST_BLOCK_BYTES = 64
"""Smaller than any block: its record in the directory alone is larger."""

Key = tuple[str, str]
"""A pool and a region."""


class KeptHistory:
    """Compares each observation with the one before, pool by pool."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, KeptObservation]] = {}

    def take(self, observation: Observation, *, now_s: float) -> dict[Key, GivenUp]:
        """Return what is kept no longer since the last call, by pool and region.

        A pool that cannot be observed changes nothing, and one that is gone is forgotten.
        """
        given_up: dict[Key, GivenUp] = {}
        present = {pool.name for pool in observation.pools}
        self._before = {name: kept for name, kept in self._before.items() if name in present}
        for pool in observation.pools:
            if pool.failure:
                continue
            kept = {one.region: one for one in pool.kept}
            for region, before in self._before.get(pool.name, {}).items():
                now = kept.get(region)
                if now is not None and (now.name, now.since_s) == (before.name, before.since_s):
                    kept[region] = _with_reason(now, before)
                else:
                    why = _why_given_up(pool, before)
                    given_up[pool.name, region] = GivenUp(
                        name=before.name, at_s=float(int(now_s)), reason=why
                    )
            self._before[pool.name] = kept
        return given_up


def _with_reason(now: KeptObservation, before: KeptObservation) -> KeptObservation:
    """Return what is still kept, with the reason of the round before while it is being scrubbed.

    The scrub's own lock hides the reason, and how long the region was without a holder.
    """
    if now.gives_way or now.is_leased or now.unheld_s:
        return now
    return replace(now, gives_way=before.gives_way)


def _why_given_up(pool: PoolObservation, before: KeptObservation) -> str:
    now = next((one for one in pool.regions if one.name == before.region), None)
    if now is None or not now.sound or before.state == "Damaged":
        return REMOVED
    if before.gives_way:
        return before.gives_way
    # A scrub, such as of `hostprep purge`, locks the region as well, and has no holder.
    return CLAIMED if now.state == "Leased" and now.holder else OTHER


class KeptMetrics:
    """Gauges mirror the last observation; what an engine reports counts once for each report."""

    def __init__(self, registry: Registry) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._bytes = gauge(
            "kept_bytes", "Kept for owners, by the region's state.", "pool", "state"
        )
        self._blocks = gauge("kept_blocks", "Blocks in it, as engines report.", "pool")
        self._oldest = gauge("kept_oldest_seconds", "Longest time without a holder.", "pool")
        self._recovered = counter("recovered_blocks", "Found again by engines.", "pool")
        self._recovered_bytes = counter("recovered_bytes", "Bytes of those.", "pool")
        self._reused = counter("recovered_blocks_loaded", "Loads of recovered blocks.", "pool")
        self._refused = counter("recovery_refusals", "By field of the identity.", "pool", "field")
        self._given_up = counter("kept_given_up", "Regions, by reason.", "pool", "reason")
        self._counted: dict[str, dict[str, KeptObservation]] = {}
        """The last report that was counted, by pool and region."""

    def show(self, observation: Observation, given_up: Mapping[Key, GivenUp]) -> None:
        """Show an observation; count what engines reported since the one before."""
        for metric in (self._bytes, self._blocks, self._oldest):
            metric.clear()
        present = {pool.name for pool in observation.pools}
        self._counted = {name: runs for name, runs in self._counted.items() if name in present}
        for pool in observation.pools:
            if not pool.failure:
                self._show_pool(pool.name, pool.kept)
                self._count(pool.name, pool.kept)
        for (name, _region), gone in given_up.items():
            self._given_up.labels(name, gone.reason).inc()

    def _show_pool(self, pool: str, kept: Iterable[KeptObservation]) -> None:
        kept = list(kept)
        for state in _STATES:
            size_bytes = sum(one.size_bytes for one in kept if one.is_leased == (state == "Leased"))
            self._bytes.labels(pool, state).set(size_bytes)
        self._blocks.labels(pool).set(sum(one.kept_blocks for one in kept))
        self._oldest.labels(pool).set(max((one.unheld_s for one in kept), default=0.0))

    def _count(self, pool: str, kept: Iterable[KeptObservation]) -> None:
        # As with gates: what the first observation finds, the agent's predecessor counted.
        is_first = pool not in self._counted
        counted = self._counted.setdefault(pool, {})
        # Created at once: Prometheus sees no increase from no series to 1.
        recovered, recovered_bytes = (
            self._recovered.labels(pool),
            self._recovered_bytes.labels(pool),
        )
        reused = self._reused.labels(pool)
        for reason in REASONS:
            self._given_up.labels(pool, reason)
        for one in kept:
            before = counted.get(one.region)
            counted[one.region] = one
            if is_first or not one.reported_s:
                continue
            loaded = one.loaded_blocks
            if before is not None and before.reported_s == one.reported_s:
                loaded -= before.loaded_blocks
            else:
                # Any engine of the pool may have written it: no more than the region can hold.
                recovered.inc(min(one.recovered_blocks, one.size_bytes // _LEAST_BLOCK_BYTES))
                recovered_bytes.inc(min(one.recovered_bytes, one.size_bytes))
                for label in {field_label(name) for name in one.refused}:
                    self._refused.labels(pool, label).inc()
            reused.inc(max(0, loaded))
