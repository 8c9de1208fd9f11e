"""When memory goes that no pool asks for any more, and what its node says until then.

Between the wish and the `Absent` entry lie a grace period, counted by the API server's copy of it
(`releaseAfter`, which outlives the operator), and a turn within the pool's `maxUnavailable`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hostprep.api.conditions import Condition, format_time
from hostprep.api.names import HOST_MEMORY_RELEASING
from hostprep.api.node_resource import PoolEntry
from hostprep_operator.records import HostMemoryNodeRecord, PoolRecord, ReleaseRules


def is_retained(entry: PoolEntry, pool: PoolRecord | None) -> bool:
    """Whether the memory stays for good: as the pool says or said last, else as the entry does."""
    if pool is not None and pool.uid == entry.uid:
        return pool.deletion_policy == "Retain"
    return entry.policy.get("deletionPolicy") == "Retain"


def is_due(entry: PoolEntry, now_s: float) -> bool:
    """Whether the grace period of an entry that nothing asks for is over."""
    return entry.release_after_s is not None and now_s >= entry.release_after_s


def leaving(entry: PoolEntry, pool: PoolRecord | None, now_s: float) -> PoolEntry:
    """Return an entry that nothing asks for any more, with the end of its grace period.

    Once written, it is moved for one reason alone: the pool's period was shortened since. A clock
    that jumps, here or in the operator before, must not bring the end nearer.
    """
    is_pools = pool is not None and pool.uid == entry.uid
    rules = pool.release if pool and is_pools else ReleaseRules.from_policy(entry.policy)
    latest_s = float(math.ceil(now_s + rules.grace_s) if rules.grace_s else math.floor(now_s))
    before_s = entry.release_after_s
    if before_s is None:
        return replace(entry, release_after_s=latest_s)
    if rules.grace_s < ReleaseRules.from_policy(entry.policy).grace_s:
        return replace(entry, release_after_s=min(before_s, latest_s))
    return entry


def absent(entry: PoolEntry) -> PoolEntry:
    """Return the instruction to release the entry's memory."""
    return replace(entry, absent=True, release_after_s=None, policy={})


def releasing_condition(
    entries: tuple[PoolEntry, ...],
    *,
    pools: tuple[PoolRecord, ...],
    hmn: HostMemoryNodeRecord | None,
    away: Condition | None,
    now_s: float,
) -> Condition | None:
    """Return HostMemoryReleasing of a node with these entries; None where it keeps them all.

    One sentence a pool, and nothing in it that changes with every second. `away`: why no agent
    can act there; None where one can.
    """
    reasons: list[str] = []
    sentences: list[str] = []
    by_name = {pool.name: pool for pool in pools}
    for entry in entries:
        found = _state_of(entry, by_name.get(entry.name), hmn, away, now_s)
        if found is not None:
            reasons.append(found[0])
            sentences.append(f"{entry.name}: {found[1]}")
    if not reasons:
        return None
    reason = next(one for one in ("Releasing", "Leased", *reasons) if one in reasons)
    return Condition(HOST_MEMORY_RELEASING, "True", reason, " ".join(sentences))


def _state_of(
    entry: PoolEntry,
    pool: PoolRecord | None,
    hmn: HostMemoryNodeRecord | None,
    away: Condition | None,
    now_s: float,
) -> tuple[str, str] | None:
    """Return where an entry stands on its way out, as a reason and a sentence."""
    if away is not None and (entry.absent or is_due(entry, now_s)):
        return away.reason, f"given back once an agent lives here again. {away.message}"
    if entry.absent:
        report = hmn.status.pool(entry.name) if hmn else None
        if report is not None and report.regions_leased:
            return "Leased", "released as soon as the engines that hold its regions end."
        return "Releasing", "being given back to the node."
    if entry.release_after_s is None:
        return None
    why = "deleted" if pool is None or pool.uid != entry.uid else "no longer for this node"
    if is_due(entry, now_s):
        paused = " (the pool is paused)" if pool is not None and pool.rollout.paused else ""
        return "WaitingForTurn", f"{why}; released when its turn comes{paused}."
    after = format_time(entry.release_after_s)
    back = "create the pool again" if why == "deleted" else "label the node again"
    return "GracePeriod", f"{why}; kept until {after}, then released. To keep it, {back}."
