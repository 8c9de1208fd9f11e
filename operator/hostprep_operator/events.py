"""Events that people read with `kubectl describe`: posted in the background.

The same event about the same object within ten minutes is counted, not posted again. When there are
more than the server should get, the oldest are dropped: the conditions are complete anyway.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Any

import structlog

from hostprep.api.names import API_VERSION
from hostprep.kube.client import EVENTS, KubeClient, micro_time
from hostprep.kube.errors import ApiError
from hostprep_operator.reconcile.changes import EventNote

_log = structlog.get_logger("events")

_SAME_WITHIN_S = 600.0
_REMEMBERED = 4096
_WAITING = 2000
_PER_SECOND = 10.0
_BURST = 25.0
_NOTE_BYTES = 1024
"""events.k8s.io/v1 refuses longer notes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regarding:
    """The object that an event is about; ours have no namespace."""

    kind: str
    name: str
    uid: str

    def to_json(self) -> dict[str, str]:
        """Return the object reference."""
        version = "v1" if self.kind == "Node" else API_VERSION
        return {"apiVersion": version, "kind": self.kind, "name": self.name, "uid": self.uid}


@dataclass(slots=True)
class _Posted:
    """An event that the server has: its name, and since when and how often it was recorded."""

    name: str
    first_s: float
    count: int = 1


_Key = tuple[str, str, str]
_Waiting = tuple[Regarding, EventNote]


class Recorder:
    """Queues events and posts them at a bounded rate."""

    def __init__(self, kube: KubeClient, *, identity: str) -> None:
        self._kube = kube
        self._identity = identity
        self._waiting = {kind: deque[_Waiting](maxlen=_WAITING) for kind in ("Warning", "Normal")}
        """Warnings are posted first: a thousand openings must not keep a slip from being told."""
        self._more = asyncio.Event()
        self._posted: OrderedDict[_Key, _Posted] = OrderedDict()
        self._tokens = _BURST
        self._paced_s = 0.0

    def record(self, about: Regarding, note: EventNote) -> None:
        """Queue the event; never waits."""
        self._waiting[note.type].append((about, replace(note, message=_cut(note.message))))
        self._more.set()

    async def run(self) -> None:
        """Post until cancelled."""
        while True:
            await self._more.wait()
            while (waiting := self._next()) is not None:
                await self._post(*waiting)
                await self._pace()
            self._more.clear()

    async def flush(self, within_s: float) -> None:
        """Post what still waits, for at most so many seconds."""
        try:
            async with asyncio.timeout(within_s):
                while (waiting := self._next()) is not None:
                    await self._post(*waiting)
        except TimeoutError:
            count = sum(map(len, self._waiting.values()))
            _log.info("events dropped at the end", count=count)

    def _next(self) -> _Waiting | None:
        queue = next((queue for queue in self._waiting.values() if queue), None)
        return queue.popleft() if queue else None

    async def _post(self, about: Regarding, note: EventNote) -> None:
        key = (about.uid, note.reason, note.message)
        posted = self._posted.get(key)
        try:
            if posted is not None and _now_s() - posted.first_s <= _SAME_WITHIN_S:
                await self._count_up(key, posted)
                return
            name = f"{about.name[:200].rstrip('.-')}.{uuid.uuid4().hex[:16]}"
            self._posted.pop(key, None)
            await self._kube.create(EVENTS, self._event(name, about, note))
            self._posted[key] = _Posted(name, _now_s())
            if len(self._posted) > _REMEMBERED:
                self._posted.popitem(last=False)
        except ApiError as error:
            _log.info("event not posted", about=about.name, reason=note.reason, error=str(error))

    async def _count_up(self, key: _Key, posted: _Posted) -> None:
        """Only the 2nd, 4th, 8th... repetition is written: a loop must not become a flood."""
        posted.count += 1
        if posted.count & (posted.count - 1):
            return
        series = {"count": posted.count, "lastObservedTime": micro_time()}
        if await self._kube.patch(EVENTS, posted.name, {"series": series}) is None:
            self._posted.pop(key, None)

    async def _pace(self) -> None:
        """Wait as a bucket of tokens says: the first 25 at once, then ten a second."""
        now_s = _now_s()
        grown = self._tokens + (now_s - self._paced_s) * _PER_SECOND
        self._tokens, self._paced_s = min(grown, _BURST) - 1.0, now_s
        if self._tokens < 0.0:
            await asyncio.sleep(-self._tokens / _PER_SECOND)

    def _event(self, name: str, about: Regarding, note: EventNote) -> dict[str, Any]:
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": "default"},
            "eventTime": micro_time(),
            "reportingController": "hostprep.dev/operator",
            "reportingInstance": self._identity[:128],
            "action": note.reason,
            "reason": note.reason,
            "regarding": about.to_json(),
            "note": note.message,
            "type": note.type,
        }


def _cut(note: str) -> str:
    """Cut to what the server takes, in bytes."""
    data = note.encode()
    if len(data) <= _NOTE_BYTES:
        return note
    return data[: _NOTE_BYTES - 3].decode(errors="ignore") + "..."


def _now_s() -> float:
    return asyncio.get_running_loop().time()
