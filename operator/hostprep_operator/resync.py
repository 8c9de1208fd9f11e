"""Reads of the API server: lists, compared with the cache; and whether a pool exists.

The cache is filled by lists at the start. Kopf does not report objects that vanished while its
watch was broken. So whenever it reads a list again, and every ten minutes anyway (the pools: every
minute), names and versions are compared with the server's.

A pool's deletion releases memory, so only a read of the API server proves it.
"""

from __future__ import annotations

import asyncio
import random
import time

import structlog

from hostprep.kube.client import HOST_MEMORY_NODES, NODES, POOLS, KubeClient, Resource, pods
from hostprep.kube.errors import ApiError, GoneError, RefusedError
from hostprep_operator.metrics import Metrics
from hostprep_operator.store import Cache, EventHandler, Kind, number_of
from hostprep_operator.watch import AGENT_SELECTOR

_log = structlog.get_logger("sync")
_pools_log = structlog.get_logger("pools")

_PAGE = 250
"""Nodes of 15 KB: 4 MB as text, some 20 MB as Python sees them, for a moment."""
_SETTLE_S = 3.0
"""Kopf's list takes a while; its first object must not be taken for the end of it."""
_RETRY_S = 2.0
_POOLS_EVERY_S = 60.0
"""Of an empty list kopf reports nothing: the last pool's end would be missed."""
_CHECK_AFTER_S = 2.0
"""While a CustomResourceDefinition is being deleted its objects go first, and the server says "not
found" of each as if people had deleted them: for a moment, or as long as one object's finalizer
keeps the definition. By then the server's discovery says that no object can be created any more,
and nothing is concluded: a deleted definition releases no memory."""
_FORGET_S = 60.0


class Resync:
    """Keeps the cache in sync."""

    def __init__(
        self,
        kube: KubeClient,
        cache: Cache,
        handler: EventHandler,
        metrics: Metrics,
        *,
        namespace: str,
        watch_agents: bool,
        every_s: float = 600.0,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._handler = handler
        self._metrics = metrics
        self._every_s = every_s
        self._all_due_s = self._next_due_s()
        self._kinds: dict[Kind, tuple[Resource, str]] = {
            Kind.POOL: (POOLS, ""),
            Kind.HOST_MEMORY_NODE: (HOST_MEMORY_NODES, ""),
            Kind.NODE: (NODES, ""),
        }
        if watch_agents:
            self._kinds[Kind.AGENT] = (pods(namespace), AGENT_SELECTOR)

    async def first(self) -> None:
        """Read everything, however long it takes; nothing may be concluded before."""
        for kind in self._kinds:
            while True:
                try:
                    await self._read(kind)
                    break
                except ApiError as error:
                    _log.warning("cannot read yet", kind=kind.value, error=str(error))
                    await asyncio.sleep(_RETRY_S)
        self._metrics.last_sync.set(time.time())
        _log.info(
            "in sync",
            nodes=len(self._cache.nodes),
            pools=len(self._cache.pools),
            host_memory_nodes=len(self._cache.host_memory_nodes),
            agents=len(self._cache.agents),
        )

    async def run(self) -> None:
        """Compare from time to time, and soon after kopf has read a list again."""
        while True:
            kinds = await self._next()
            try:
                for kind in kinds:
                    await self._compare(kind)
            except ApiError as error:
                _log.warning("cannot compare", error=str(error))
                self._handler.relisted |= kinds
                await asyncio.sleep(_RETRY_S)
                self._handler.compare_requested.set()
                continue
            if len(kinds) == len(self._kinds):
                self._metrics.last_sync.set(time.time())

    async def _next(self) -> set[Kind]:
        """Wait until a comparison is due; the pools, which are few, are compared every time."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(self._all_due_s, loop.time() + _POOLS_EVERY_S)):
                await self._handler.compare_requested.wait()
        except TimeoutError:
            if loop.time() < self._all_due_s:
                return {Kind.POOL}
            self._all_due_s = self._next_due_s()
            return set(self._kinds)
        await asyncio.sleep(_SETTLE_S)
        self._handler.compare_requested.clear()
        kinds, self._handler.relisted = self._handler.relisted, set()
        return kinds | {Kind.POOL}

    def _next_due_s(self) -> float:
        pause_s = self._every_s * random.uniform(0.9, 1.1)  # noqa: S311
        return asyncio.get_running_loop().time() + pause_s

    async def _read(self, kind: Kind) -> None:
        resource, selector = self._kinds[kind]
        async for page in self._kube.pages(resource, limit=_PAGE, label_selector=selector):
            for document in page.items:
                self._handler.observed(kind, document)

    async def _compare(self, kind: Kind) -> None:
        """Drop what the server no longer has; read what it has newer."""
        store = self._cache.stores[kind]
        known = {name: record.uid for name, record in store.items()}
        version, listed = await self._versions(kind)
        missed = 0
        for name in known.keys() - listed.keys():
            if name in store and store[name].uid == known[name]:
                missed += 1
                self._handler.vanished(kind, name, uid=known[name], resource_version=version)
        for name, there in listed.items():
            if store.is_news(name, there):
                missed += await self._refresh(kind, name, there)
        store.forget_gone(number_of(version))
        _log.debug("compared", kind=kind.value, objects=len(listed), missed=missed)

    async def _versions(self, kind: Kind) -> tuple[str, dict[str, str]]:
        """Return the list's version, and each object's by name."""
        resource, selector = self._kinds[kind]
        while True:
            listed: dict[str, str] = {}
            version = ""
            try:
                async for page in self._kube.pages(
                    resource, limit=_PAGE * 2, label_selector=selector, metadata_only=True
                ):
                    version = page.resource_version
                    for metadata in (item["metadata"] for item in page.items):
                        listed[metadata["name"]] = str(metadata.get("resourceVersion") or "")
            except GoneError:
                continue
            return version, listed

    async def _refresh(self, kind: Kind, name: str, version: str) -> int:
        """Read one object, unless the watch has brought it meanwhile."""
        await asyncio.sleep(0)
        if not self._cache.stores[kind].is_news(name, version):
            return 0
        document = await self._kube.get(self._kinds[kind][0], name)
        if document is not None:
            self._handler.observed(kind, document)
        return 1


class DeletionCheck:
    """Asks the API server about pools that nodes name and the cache does not know."""

    def __init__(self, kube: KubeClient, handler: EventHandler) -> None:
        self._kube = kube
        self._handler = handler
        self._first_missed_s: dict[str, float] = {}
        self._lock = asyncio.Lock()

    async def check(self, name: str) -> float:
        """Check a pool; returns in how many seconds to check again, 0 once it is known.

        Raises ApiError when the server's answer is inconclusive.
        """
        async with self._lock:  # thousands of nodes may ask for the same one
            if name in self._handler.gone_pools:
                return 0.0
            now_s = asyncio.get_running_loop().time()
            missed_s = self._first_missed_s.get(name)
            if missed_s is None or now_s - missed_s > _FORGET_S:
                self._first_missed_s[name] = now_s
                return _CHECK_AFTER_S
            wait_s = missed_s + _CHECK_AFTER_S - now_s
            if wait_s > 0.0:
                return wait_s
            document = await self._kube.get(POOLS, name)
            self._first_missed_s.pop(name, None)
            if document is not None:
                self._handler.observed(Kind.POOL, document)
                return 0.0
            if "create" not in await self._kube.verbs(POOLS):
                raise RefusedError("the definition of HostMemoryPools is being deleted")
            _pools_log.info("pool does not exist", pool=name)
            self._handler.gone_pools.add(name)
            return 0.0
