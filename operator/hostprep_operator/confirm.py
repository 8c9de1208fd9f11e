"""Whether a pool is really gone. Releasing memory hangs on the answer, so only a read gives it."""

from __future__ import annotations

import asyncio

import structlog

from hostprep.kube.client import POOLS, KubeClient
from hostprep.kube.errors import RefusedError
from hostprep_operator.intake import Intake
from hostprep_operator.keys import Kind

__all__ = ["GonePools"]

_log = structlog.get_logger("pools")

_ASK_AFTER_S = 2.0
"""While a CustomResourceDefinition is being deleted its objects go first, and the server says "not
found" of each as if people had deleted them: for a moment, or as long as one object's finalizer
keeps the definition. By then the server's discovery says that no object can be created any more,
and nothing is concluded: a deleted definition releases no memory."""
_FORGET_S = 60.0


class GonePools:
    """Asks the API server about pools that nodes name and nobody knows."""

    def __init__(self, kube: KubeClient, intake: Intake) -> None:
        self._kube = kube
        self._intake = intake
        self._first_missed_s: dict[str, float] = {}
        self._lock = asyncio.Lock()

    async def ask(self, name: str) -> float:
        """Find out about a pool; returns in how many seconds to ask again, 0 when it is known now.

        Raises ApiError when the server gives no answer that means anything.
        """
        async with self._lock:  # thousands of nodes may ask for the same one
            if name in self._intake.gone_pools:
                return 0.0
            now_s = asyncio.get_running_loop().time()
            missed_s = self._first_missed_s.get(name)
            if missed_s is None or now_s - missed_s > _FORGET_S:
                self._first_missed_s[name] = now_s
                return _ASK_AFTER_S
            wait_s = missed_s + _ASK_AFTER_S - now_s
            if wait_s > 0.0:
                return wait_s
            await self._read(name)
            return 0.0

    async def _read(self, name: str) -> None:
        document = await self._kube.get(POOLS, name)
        self._first_missed_s.pop(name, None)
        if document is None:
            if "create" not in await self._kube.verbs(POOLS):
                raise RefusedError("the definition of HostMemoryPools is being deleted")
            _log.info("pool does not exist", pool=name)
            self._intake.gone_pools.add(name)
        else:
            self._intake.seen(Kind.POOL, document)
