"""The operator's watches: one for each kind of object, passed to the EventHandler.

The first lists fill the cache. Afterwards every change comes as an event, in the server's order;
what vanished while a watch was broken comes out with the list that is read then, and is handled as
deleted in the version that was known last. Every `relist_s` seconds the lists are read again, which
finds nothing unless a watch lost something.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from hostprep.api.names import AGENT_COMPONENT, COMPONENT_LABEL
from hostprep.kube.client import HOST_MEMORY_NODES, NODES, POOLS, KubeClient, Resource, pods
from hostprep.kube.logs import make_logger
from hostprep.kube.watch import Change, Event, Reflector
from hostprep_operator.metrics import Metrics
from hostprep_operator.store import Cache, EventHandler, Kind, number_of

_log = structlog.get_logger("watch")

_AGENT_SELECTOR = f"app.kubernetes.io/name=hostprep,{COMPONENT_LABEL}={AGENT_COMPONENT}"
_PAGE = 250
"""Nodes of 15 KB: 4 MB as text, some 20 MB as Python sees them, for a moment."""
_LONGEST_PAUSE_S = 4.0
"""Between two tries: there is one operator, and nodes wait for it."""


class Watches:
    """Follows every kind for ever."""

    def __init__(
        self,
        kube: KubeClient,
        cache: Cache,
        handler: EventHandler,
        metrics: Metrics,
        *,
        namespace: str,
        watch_agents: bool,
        relist_s: float,
    ) -> None:
        self._cache = cache
        self._handler = handler
        self._metrics = metrics
        resources: dict[Kind, tuple[Resource, str]] = {
            Kind.POOL: (POOLS, ""),
            Kind.HOST_MEMORY_NODE: (HOST_MEMORY_NODES, ""),
            Kind.NODE: (NODES, ""),
        }
        if watch_agents:
            resources[Kind.AGENT] = (pods(namespace), _AGENT_SELECTOR)
        self._reflectors = {
            kind: Reflector(
                kube,
                resource,
                make_logger("watch", kind=kind.value),
                label_selector=selector,
                page=_PAGE,
                relist_s=relist_s,
                longest_pause_s=_LONGEST_PAUSE_S,
                known=lambda kind=kind: self._known(kind),  # type: ignore[misc]
            )
            for kind, (resource, selector) in resources.items()
        }
        self._listed = {kind: asyncio.Event() for kind in resources}
        self._version: dict[Kind, str] = {}
        """Up to which version each kind is known."""
        self._current_s: dict[Kind, float] = {}
        """When the server last confirmed that, by the wall clock."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What is watched."""
        return tuple(self._reflectors)

    async def synced(self) -> None:
        """Wait until everything has been read once; nothing may be concluded before."""
        for listed in self._listed.values():
            await listed.wait()
        _log.info(
            "in sync",
            nodes=len(self._cache.nodes),
            pools=len(self._cache.pools),
            host_memory_nodes=len(self._cache.host_memory_nodes),
            agents=len(self._cache.agents),
        )

    def silent_s(self) -> float:
        """Return for how many seconds the most silent watch has heard nothing."""
        return time.monotonic() - min(it.heard_s for it in self._reflectors.values())

    async def follow(self, kind: Kind) -> None:
        """Pass on the changes of that kind until cancelled."""
        async for change in self._reflectors[kind].changes():
            try:
                self._take(kind, change)
            except Exception:
                # One object that nobody can read must not hide the others.
                _log.exception("object not understood", kind=kind.value, name=change.name)

    def _take(self, kind: Kind, change: Change) -> None:
        match change.event:
            case Event.OBSERVED if change.document is not None:
                self._handler.observed(kind, change.document)
            case Event.DELETED if change.document is not None:
                self._handler.deleted(kind, change.document)
            case Event.VANISHED:
                self._handler.vanished(
                    kind, change.name, uid=change.uid, resource_version=change.resource_version
                )
            case _:
                self._current(kind, change)

    def _current(self, kind: Kind, change: Change) -> None:
        """Note that the kind is known up to that version."""
        if change.event is Event.LISTED:
            self._listed[kind].set()
        # No answer to a write that is older than the last bookmark but one is still under way.
        self._cache.stores[kind].forget_gone(number_of(self._version.get(kind, "")))
        self._version[kind] = change.resource_version
        self._current_s[kind] = time.time()
        if len(self._current_s) == len(self._reflectors):
            self._metrics.last_sync.set(min(self._current_s.values()))

    def _known(self, kind: Kind) -> dict[str, str]:
        """Return what is taken to be there, answers to our own writes included."""
        return {name: record.uid for name, record in self._cache.stores[kind].items()}
