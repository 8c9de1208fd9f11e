"""Liveness, readiness and metrics over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from aiohttp import web

from hostprep.errors import BadInputError, FailedError
from hostprep_operator.metrics import Metrics

__all__ = ["Health", "HealthServer", "parse_listen"]

_log = structlog.get_logger("health")
_STUCK_S = 300.0
"""A key that waits for a worker for so long: all of them are stuck, a restart helps."""


@dataclass(slots=True)
class Health:
    """What the probes ask. Every field is set by whoever knows."""

    synced: bool = False
    standby: bool = False
    """Another replica holds the Lease, and we wait for it: ready, not working."""
    stopping: bool = False
    watching: bool = True
    """False while kopf's watches are down and wait to be started again."""
    oldest_key_s: Callable[[], float] = field(default=lambda: 0.0)

    def alive(self) -> str:
        """Return what is wrong, or nothing. That we answer at all proves that the loop turns."""
        oldest_s = self.oldest_key_s()
        if oldest_s > _STUCK_S:
            return f"a key has waited {oldest_s:.0f} s for a worker"
        return ""

    def ready(self) -> str:
        """Return why not ready, or nothing."""
        if self.stopping:
            return "stopping"
        if self.standby:
            return ""
        if not self.synced:
            return "not yet in sync with the API server"
        return "" if self.watching else "the watches are down"


class HealthServer:
    """Serves /healthz, /readyz and /metrics."""

    def __init__(self, health: Health, metrics: Metrics) -> None:
        self._health = health
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chose if it was 0.

        Raises FailedError when the address is taken.
        """
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_page)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host or None, port)
        try:
            await site.start()
        except OSError as error:
            raise FailedError(
                f"cannot listen on {host or '*'}:{port}: {error.strerror or error}",
                remedy="choose another address with --listen",
            ) from error
        bound = int(self._runner.addresses[0][1])
        _log.info("listening", port=bound)
        return bound

    async def stop(self) -> None:
        """Close the listener and its connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _verdict(self._health.alive())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _verdict(self._health.ready())

    async def _metrics_page(self, _request: web.Request) -> web.Response:
        body = self._metrics.exposition()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})


def _verdict(wrong: str) -> web.Response:
    return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of `:9809`, `127.0.0.1:9809` or `[::1]:0`.

    Raises BadInputError for anything else.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or " " in host:
        raise BadInputError(
            f"--listen {text!r} is no address", remedy="write it like :9809 or 127.0.0.1:9809"
        )
    return host, int(port)
