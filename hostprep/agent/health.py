"""HTTP for kubelet and Prometheus: /healthz, /readyz, /metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from hostprep.agent.listener import Listener
from hostprep.agent.metrics import CONTENT_TYPE, Metrics

__all__ = ["HealthServer"]

WhyNot = Callable[[], str | None]
"""Returns why it is not so, or None."""


@dataclass(slots=True)
class HealthServer:
    """Answers while it is started; the port stays open before and after."""

    listener: Listener
    metrics: Metrics
    not_healthy: WhyNot
    not_ready: WhyNot
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
        """Answer no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _answer(self.not_healthy())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer(self.not_ready())

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _answer(why_not: str | None) -> web.Response:
    return web.Response(text=f"{why_not or 'ok'}\n", status=503 if why_not else 200)
