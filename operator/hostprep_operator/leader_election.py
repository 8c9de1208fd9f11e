"""Which of several replicas works: the one that holds the Lease.

Other holders' clocks are not trusted: a Lease counts as abandoned when it has not changed for its
whole duration by our own clock. A replica that cannot renew in time ends its process, since from
then on another one may be writing.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import structlog

from hostprep.kube.client import Json, KubeClient, leases, micro_time
from hostprep.kube.errors import ApiError, ConflictError

_log = structlog.get_logger("lease")

# The times are those of Kubernetes' own components.
_DURATION_S = 15.0
"""Others may take over when the Lease was not renewed for so long."""
_RENEW_WITHIN_S = 10.0
"""A holder that could not renew for so long gives up, well before others take over."""
_RETRY_S = 2.0


class Leader:
    """One replica's part in the election."""

    def __init__(self, kube: KubeClient, *, namespace: str, name: str, identity: str) -> None:
        self._kube = kube
        self._resource = leases(namespace)
        self._name = name
        self._identity = identity
        self._version, self._version_since_s = "", 0.0
        """The Lease's latest version, and when it was first read, by our clock."""
        self._renewed_s = 0.0
        self._held: Json | None = None

    async def acquire(self) -> None:
        """Return once the Lease is ours; waits as long as another replica renews it."""
        while not await self._try_once(until_s=math.inf):
            await self._pause()

    async def keep(self) -> str:
        """Renew until that fails for too long; returns why the Lease counts as lost."""
        while True:
            await self._pause()
            if await self._try_once(until_s=self._renewed_s + _RENEW_WITHIN_S):
                continue
            if self._held is None:
                return "another replica holds the Lease"
            if self._now() - self._renewed_s >= _RENEW_WITHIN_S:
                return f"the Lease could not be renewed for {_RENEW_WITHIN_S:.0f} s"

    async def release(self) -> None:
        """Let another replica take over at once."""
        if self._held is None:
            return
        body = self._body(self._held, holder="")
        self._held = None
        try:
            await self._kube.patch(self._resource, self._name, body)
        except ApiError as error:
            _log.warning("lease not released; it runs out by itself", error=str(error))

    async def _try_once(self, *, until_s: float) -> bool:
        began_s = self._now()
        try:
            async with asyncio.timeout_at(min(began_s + _RENEW_WITHIN_S / 2, until_s)):
                won = await self._take()
        except ConflictError:
            return False  # another replica was faster: read it again
        except (ApiError, TimeoutError) as error:
            _log.warning("lease not reached", error=str(error) or "timeout")
            return False
        if won:
            self._renewed_s = began_s  # the time before the request: never too late
        return won

    async def _take(self) -> bool:
        lease = await self._kube.get(self._resource, self._name)
        if lease is None:
            body = self._body(None, holder=self._identity)
            self._held = await self._kube.create(self._resource, body)
            return self._held is not None
        if not self._may_have(lease):
            self._held = None
            return False
        body = self._body(lease, holder=self._identity)
        self._held = await self._kube.patch(self._resource, self._name, body)
        return self._held is not None

    def _may_have(self, lease: Json) -> bool:
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self._identity):
            return True
        version = lease["metadata"]["resourceVersion"]
        if version != self._version:
            self._version, self._version_since_s = version, self._now()
            return False
        duration_s = float(spec.get("leaseDurationSeconds") or _DURATION_S)
        return self._now() - self._version_since_s > duration_s

    def _body(self, lease: Json | None, *, holder: str) -> dict[str, Any]:
        now = micro_time()
        before = (lease or {}).get("spec") or {}
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": int(_DURATION_S),
            "renewTime": now,
        }
        if before.get("holderIdentity") != holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(before.get("leaseTransitions") or 0) + bool(lease)
        metadata: dict[str, Any] = {"name": self._name}
        if lease is not None:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }

    async def _pause(self) -> None:
        await asyncio.sleep(_RETRY_S * (1.0 + 0.2 * random.random()))  # noqa: S311

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
