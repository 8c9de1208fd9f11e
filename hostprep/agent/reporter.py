"""Writes the HostMemoryNode's status: only changes, progress rarely, all else at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hostprep.agent.last_status import LastStatus
from hostprep.agent.metrics import Metrics
from hostprep.agent.node_api import NodeApi
from hostprep.agent.state import AgentState
from hostprep.api.node_resource import NodeStatus, Phase, PoolStatus
from hostprep.kube.backoff import Backoff, wait_for_event
from hostprep.kube.errors import ApiError, ConflictError, NotFoundError
from hostprep.kube.logs import Logger

PROGRESS_STEP_PERCENT = 10
PROGRESS_EVERY_S = 10.0
"""At most so often, however quick the steps are: each report costs the operator a millisecond."""
PROGRESS_AT_LEAST_S = 60.0
"""And so often without a step, lest what is slow looks dead."""
_MOVING = (Phase.PREPARING, Phase.RESIZING, Phase.DEGRADED, Phase.RELEASING)
_NOT_YET = ("", "Unfinished", "Unpublished")
_QUOTE_POOLS = ("Ready", "Releasing")
"""Conditions whose messages repeat the pools' own; in others a new message is news."""


@dataclass
class Reporter:
    """Writes the status when it is due. `wake` it when anything may have changed."""

    state: AgentState
    api: NodeApi | None
    metrics: Metrics
    log: Logger
    last: LastStatus | None = None
    """Where `hostprep status` finds the phases; None keeps them nowhere."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _uid: str = ""
    _version: int = 0
    _server: Mapping[str, Any] = field(default_factory=dict)
    """The status as the API server has it."""
    reported: NodeStatus | None = None
    """The status as last derived, written or not."""
    _accepted: tuple[NodeStatus, NodeStatus] | None = None
    """What was last written, and what the API server made of it."""
    _last_write_s: float | None = None
    _retry_at_s: float = 0.0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.5, most_s=30.0))

    def observe(self, document: Mapping[str, Any] | None) -> None:
        """Take the object as the API server has it now; None where it has none."""
        if document is None:
            self._uid, self._version, self._server = "", 0, {}
            if self.last is not None:
                self.last.forget()
        else:
            metadata = document.get("metadata") or {}
            uid, version = str(metadata.get("uid")), _number(metadata.get("resourceVersion"))
            if uid == self._uid and version < self._version:
                return  # from before our own last write
            self._uid, self._version = uid, version
            self._server = document.get("status") or {}
        self.wake.set()

    async def run(self) -> None:
        """Write whatever is due, until cancelled."""
        while True:
            self.wake.clear()
            await wait_for_event(self.wake, await self.report())

    async def report(self, *, now: bool = False) -> float | None:
        """Write the status if it is due, or (`now`) merely differs.

        Returns in how many seconds to call again; None: when something has changed.
        """
        async with self._lock:
            server = NodeStatus.from_json(self._server)
            wanted = self.state.status(self.reported or server, wall_s=time.time())
            if wanted is None:
                return None
            self._log_changes(wanted)
            self.reported = wanted
            if self.last is not None:
                self.last.save(wanted)
            if self.api is None or not self._uid:
                return None
            now_s = time.monotonic()
            due_s = due_at(server, wanted, now_s=now_s, last_write_s=self._last_write_s)
            if due_s is None or self._accepted == (wanted, server):
                self.metrics.writes.labels("unchanged").inc()
                return None
            pause_s = max(due_s, self._retry_at_s) - now_s
            return await self._write(self.api, wanted) if now or pause_s <= 0 else pause_s

    async def _write(self, api: NodeApi, wanted: NodeStatus) -> float | None:
        """Write; return in how many seconds to try again where that failed."""
        patch, uid = merge_patch(self._server, wanted.to_json()), self._uid
        try:
            document = await api.patch_status(patch, uid=uid)
        except ApiError as error:
            self.metrics.writes.labels("failed").inc()
            pause_s = max(self._backoff.next_s(), error.retry_after_s)
            self._retry_at_s = time.monotonic() + pause_s
            # Where the object is gone or replaced, the watch says so.
            is_gone = isinstance(error, NotFoundError | ConflictError)
            log = self.log.info if is_gone else self.log.warning
            log("status_not_written", http_status=error.status, error=error.answer)
            return pause_s
        self._backoff.reset()
        self._last_write_s = time.monotonic()
        self._retry_at_s = 0.0
        if self._uid == uid:  # else it was replaced meanwhile, and the watch was faster
            self.observe(document)
            self._accepted = (wanted, NodeStatus.from_json(self._server))
        self.metrics.writes.labels("written").inc()
        return None

    def _log_changes(self, wanted: NodeStatus) -> None:
        """Log what changed for each pool."""
        before = {pool.name: pool for pool in self.reported.pools} if self.reported else {}
        for pool in wanted.pools:
            old = before.pop(pool.name, None)
            if old is None or (old.phase, old.reason) != (pool.phase, pool.reason):
                self.log.info(
                    "pool",
                    pool=pool.name,
                    phase=pool.phase.value,
                    reason=pool.reason,
                    message=pool.message,
                )
        for name in before:
            self.log.info("pool_gone", pool=name)


def _number(version: object) -> int:
    return int(version) if isinstance(version, str) and version.isdecimal() else 0


# --- when to write, and what


def due_at(
    server: NodeStatus, wanted: NodeStatus, *, now_s: float, last_write_s: float | None
) -> float | None:
    """Return when the status is to be written: now, later, or (None) not at all."""
    if server == wanted:
        return None
    is_progress_only = _essence(server, wanted) == _essence(wanted, server)
    if last_write_s is None or not is_progress_only:
        return now_s
    every_s = PROGRESS_EVERY_S if _is_step(server, wanted) else PROGRESS_AT_LEAST_S
    return max(now_s, last_write_s + every_s)


def _is_step(server: NodeStatus, wanted: NodeStatus) -> bool:
    """Whether a pool came to the next step, or one that shows no share of its work changed."""
    for pool in wanted.pools:
        before = server.pool(pool.name)
        was, now = (before.progress_percent if before else None), pool.progress_percent
        if was is None or now is None:
            if before != pool:
                return True
        elif now // PROGRESS_STEP_PERCENT != was // PROGRESS_STEP_PERCENT:
            return True
    return False


def _essence(status: NodeStatus, other: NodeStatus) -> NodeStatus:
    conditions = tuple(
        replace(condition, message="") if condition.type in _QUOTE_POOLS else condition
        for condition in status.conditions
    )
    pools = tuple(_essence_of(pool, other.pool(pool.name)) for pool in status.pools)
    return replace(status, summary="", huge_pages=(), pools=pools, conditions=conditions)


def _essence_of(pool: PoolStatus, other: PoolStatus | None) -> PoolStatus:
    """Return the pool without what moves while it is worked on."""
    pool = replace(pool, progress_percent=None, message="")
    if other is None or not (pool.phase is other.phase and pool.phase in _MOVING):
        return pool
    theirs = {region.name: region.state for region in other.regions}
    regions = tuple(
        region
        for region in pool.regions
        if region.state not in _NOT_YET and theirs.get(region.name, "") not in _NOT_YET
    )
    return replace(pool, ready_bytes=0, wanted_bytes=0, handoff_generation=0, regions=regions)


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch from one object's fields to another's (RFC 7396).

    Lists are replaced whole, objects field by field, and what went is named with null.
    """
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch
