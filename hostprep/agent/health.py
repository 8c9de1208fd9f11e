"""HTTP for kubelet and Prometheus: /healthz, /readyz, /metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from hostprep.agent.metrics import CONTENT_TYPE, Metrics
from hostprep.errors import BadInputError

__all__ = ["HealthServer", "parse_listen"]

WhyNot = Callable[[], str | None]
"""Returns why it is not so, or None."""


def parse_listen(text: str) -> tuple[str | None, int]:
    """Return host (None: every address) and port of `:9808`, `127.0.0.1:9808`, `[::1]:9808`.

    Raises BadInputError.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise BadInputError(
            f"--listen {text[:60]!r} is no address", remedy="write it like :9808 or 127.0.0.1:9808"
        )
    return host.strip("[]") or None, int(port)


@dataclass(slots=True)
class HealthServer:
    """Answers on one port while it is started."""

    listen: str
    metrics: Metrics
    not_healthy: WhyNot
    not_ready: WhyNot
    _runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Begin to answer. Returns the port. Raises BadInputError where it cannot be had."""
        host, port = parse_listen(self.listen)
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, shutdown_timeout=1.0).start()
        except OSError as error:
            await self.stop()
            raise BadInputError(
                f"cannot listen on {self.listen}: {error.strerror}",
                reason="CannotListen",
                remedy="give another --listen, such as 127.0.0.1:0",
            ) from error
        return int(self._runner.addresses[0][1])

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
