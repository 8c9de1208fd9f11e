"""HTTP for kubelet and Prometheus: /healthz, /readyz, /metrics.

The port is bound before anything is changed, and answered once a server is there for it: until then
clients wait in the kernel's queue, as listen(2) has it, and are not refused.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from hostprep.errors import BadInputError

CANNOT_LISTEN = "CannotListen"
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


# --- the port


def parse_listen(text: str) -> tuple[str | None, int]:
    """Return host (None: every address) and port of `:9808`, `127.0.0.1:9808`, `[::1]:9808`.

    Raises BadInputError.
    """
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65535
    if not colon or not is_port or " " in host:
        raise BadInputError(
            f"cannot listen on {text[:60]!r}: this is no address",
            remedy="write --listen like :9808 or 127.0.0.1:9808",
        )
    return host.strip("[]") or None, int(port)


@dataclass(frozen=True, slots=True)
class Listener:
    """Sockets that listen."""

    sockets: tuple[socket.socket, ...]

    @classmethod
    def open(cls, text: str) -> Listener:
        """Listen on that address. Raises BadInputError; CannotListen where it cannot be had."""
        host, port = parse_listen(text)
        try:
            return cls(_listen(host, port))
        except (OSError, UnicodeError) as error:  # the latter: a host that is no name
            raise BadInputError(
                f"cannot listen on {text}: {getattr(error, 'strerror', None) or error}",
                reason=CANNOT_LISTEN,
                remedy="choose another address with --listen, such as 127.0.0.1:0",
            ) from error

    @property
    def port(self) -> int:
        """The port of the first address."""
        return int(self.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Release the port."""
        for one in self.sockets:
            one.close()


def _listen(host: str | None, port: int) -> tuple[socket.socket, ...]:
    """Listen on every address of the host; None: on all."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        opened: list[socket.socket] = []
        for family, address in dict.fromkeys((info[0], info[4]) for info in found):
            try:
                opened.append(stack.enter_context(socket.create_server(address, family=family)))
            except OSError as error:
                # A kernel without IPv6 has the addresses, and no sockets for them.
                if error.errno != errno.EAFNOSUPPORT or len(found) == 1:
                    raise
        stack.pop_all()
    return tuple(opened)
