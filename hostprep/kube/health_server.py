"""HTTP for kubelet and Prometheus: /healthz, /readyz, /metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from hostprep.kube.listener import Listener

WhyNot = Callable[[], str | None]
"""Returns what is wrong; None or nothing where all is well."""


@dataclass(slots=True)
class HealthServer:
    """Answers between `start` and `stop`; the port stays open before and after."""

    listener: Listener
    metrics: Callable[[], bytes]
    """Returns the metrics in Prometheus' text format."""
    why_not_healthy: WhyNot
    why_not_ready: WhyNot
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Begin to answer."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        for one in self.listener.sockets:
            # A copy: the server closes what it is given.
            await web.SockSite(self._runner, one.dup()).start()

    async def stop(self) -> None:
        """Answer no more, and close the connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _answer(self.why_not_healthy())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer(self.why_not_ready())

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(why_not: str | None) -> web.Response:
    return web.Response(text=f"{why_not or 'ok'}\n", status=503 if why_not else 200)
