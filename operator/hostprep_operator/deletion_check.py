"""Whether a pool really exists no more: its deletion releases memory.

A cache is no proof, nor is one "not found": only a read of the API server while it serves the kind.
"""

from __future__ import annotations

import asyncio

import structlog

from hostprep.kube.client import POOLS, KubeClient
from hostprep.kube.errors import RefusedError
from hostprep_operator.store import EventHandler, Kind

_log = structlog.get_logger("pools")

_CHECK_AFTER_S = 2.0
"""While a CustomResourceDefinition is being deleted its objects go first, and the server says "not
found" of each as if people had deleted them: for a moment, or as long as one object's finalizer
keeps the definition. By then the server's discovery says that no object can be created any more,
and nothing is concluded: a deleted definition releases no memory."""
_FORGET_S = 60.0


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
            _log.info("pool does not exist", pool=name)
            self._handler.gone_pools.add(name)
            return 0.0
