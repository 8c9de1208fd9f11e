"""Keeps the HostMemoryNode's status as the agent sees things: the shell around `reporting`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hostprep.agent.brain import Brain
from hostprep.agent.metrics import Metrics
from hostprep.agent.node_api import NodeApi
from hostprep.agent.reporting import due_at, merge_patch
from hostprep.api.node_resource import NodeStatus
from hostprep.kube.backoff import Backoff
from hostprep.kube.errors import ApiError, ConflictError, NotFoundError
from hostprep.kube.logs import Logger

__all__ = ["Reporter"]


@dataclass
class Reporter:
    """Writes the status when it is due. `wake` it when anything may have changed."""

    brain: Brain
    api: NodeApi | None
    metrics: Metrics
    log: Logger
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _uid: str = ""
    _version: int = 0
    _server: Mapping[str, Any] = field(default_factory=dict)
    """The status as the API server has it."""
    _said: NodeStatus | None = None
    """What was last found worth saying."""
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
            pause_s = await self.report()
            # Not wait_for: Python 3.11's loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.wake.wait()

    async def report(self, *, now: bool = False) -> float | None:
        """Write the status if it is due, or (`now`) merely differs.

        Returns in how many seconds to ask again; None: when something has changed.
        """
        async with self._lock:
            return await self._report(now=now)

    async def _report(self, *, now: bool) -> float | None:
        server = NodeStatus.from_json(self._server)
        wanted = self.brain.status(self._said or server, wall_s=time.time())
        if wanted is None:
            return None
        self._log_changes(wanted)
        self._said = wanted
        if self.api is None or not self._uid:
            return None
        now_s = time.monotonic()
        due_s = due_at(server, wanted, now_s=now_s, last_write_s=self._last_write_s)
        if due_s is None or self._accepted == (wanted, server):
            self.metrics.writes.labels("unchanged").inc()
            return None
        due_s = now_s if now else max(due_s, self._retry_at_s)
        if due_s <= now_s:
            due_s = now_s + (await self._write(self.api, wanted) or 0.0)
            return due_s - now_s or None
        return due_s - now_s

    @property
    def said(self) -> NodeStatus | None:
        """What was last found worth saying."""
        return self._said

    async def _write(self, api: NodeApi, wanted: NodeStatus) -> float | None:
        """Write; return in how many seconds to try again where that failed."""
        patch, uid = merge_patch(self._server, wanted.to_json()), self._uid
        try:
            document = await api.patch_status(patch, uid=uid)
        except ApiError as error:
            self.metrics.writes.labels("failed").inc()
            pause_s = max(self._backoff.next_s(), error.retry_after_s)
            self._retry_at_s = time.monotonic() + pause_s
            # Gone or made anew: the watch tells.
            is_gone = isinstance(error, NotFoundError | ConflictError)
            say = self.log.info if is_gone else self.log.warning
            say("status_not_written", http_status=error.status, error=error.answer)
            return pause_s
        self._backoff.reset()
        self._last_write_s = time.monotonic()
        self._retry_at_s = 0.0
        if self._uid == uid:  # else it was made anew meanwhile, and the watch was faster
            self.observe(document)
            self._accepted = (wanted, NodeStatus.from_json(self._server))
        self.metrics.writes.labels("written").inc()
        return None

    def _log_changes(self, wanted: NodeStatus) -> None:
        """Log what changed for each pool."""
        before = {pool.name: pool for pool in self._said.pools} if self._said else {}
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
    return int(version) if isinstance(version, str) and version.isdigit() else 0
