"""HTTP for kubelet and Prometheus: /healthz, /readyz, /metrics.

The port is bound before anything is changed, and answered once a server is there for it: until then
clients wait in the kernel's queue, as listen(2) has it, and are not refused.

Whoever reaches the port may try to keep probes from being answered, and kubelet restarts a
container that does not answer. So a connection carries one short request, ends within seconds, and
above a number gives way to newer ones, those of the address that has most of them first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from hostprep.errors import BadInputError
from hostprep.kube.logs import Logger, make_logger

CANNOT_LISTEN = "CannotListen"
WhyNot = Callable[[], str | None]
"""Returns what is wrong; None or nothing where all is well."""

_MAX_CONNECTIONS = 256
_CONNECTION_S = 10.0
"""From accepting a connection to its last byte sent."""
_MAX_REQUEST_BYTES = 8192
_LOG_EVERY_S = 60.0
_ACCEPT_AT_ONCE = 64
_ACCEPT_AGAIN_S = 0.1
_BACKLOG = 1024
"""Connections that wait to be accepted. Above it the kernel drops them, and their clients try again
after a second: half of a probe's time."""
_PLAIN_TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(slots=True)
class HealthServer:
    """Answers between `start` and `stop`; the port stays open before and after."""

    listener: Listener
    metrics: Callable[[], bytes]
    """Returns the metrics in Prometheus' text format."""
    why_not_healthy: WhyNot
    why_not_ready: WhyNot
    connection_s: float = _CONNECTION_S
    """Seconds that a connection may take."""
    _connections: dict[str, dict[asyncio.Task[None], None]] = field(default_factory=dict)
    """By the address of the other end; of each, the oldest first."""
    _number: int = 0
    """Of connections."""
    _stopped: bool = False
    _misuse: MisuseLog = field(default_factory=lambda: MisuseLog(make_logger("health")))

    async def start(self) -> None:
        """Begin to answer."""
        for one in self.listener.sockets:
            one.setblocking(False)
            self._watch(one)

    async def stop(self) -> None:
        """Answer no more, and close the connections; nothing once it has stopped."""
        if self._stopped:
            return
        self._stopped = True
        for one in self.listener.sockets:
            asyncio.get_running_loop().remove_reader(one)
        tasks = [task for tasks in self._connections.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self, listening: socket.socket) -> None:
        if not self._stopped:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept what waits, at most some at a time: those accepted have their turn between."""
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connection, peer = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Reset before it was accepted; or no descriptor is left in this process.
                self._misuse.count(f"not accepted: {error.strerror}")
                self._close_one()
                loop.remove_reader(listening)
                loop.call_later(_ACCEPT_AGAIN_S, self._watch, listening)
                return
            task = loop.create_task(self._serve(connection))
            self._connections.setdefault(peer[0], {})[task] = None
            self._number += 1
            task.add_done_callback(partial(self._forget, peer[0]))
            if self._number > max_connections():
                self._misuse.count("closed early: too many connections")
                self._close_one()

    def _close_one(self) -> None:
        """Close the oldest connection of the address that has the most."""
        if self._connections:
            peer = max(self._connections, key=lambda peer: len(self._connections[peer]))
            oldest = next(iter(self._connections[peer]))
            oldest.cancel()
            self._forget(peer, oldest)

    def _forget(self, peer: str, task: asyncio.Task[None]) -> None:
        tasks = self._connections.get(peer, {})
        if task in tasks:
            del tasks[task]
            self._number -= 1
        if not tasks:
            self._connections.pop(peer, None)

    async def _serve(self, connection: socket.socket) -> None:
        """Answer the one request of a connection."""
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            try:
                async with asyncio.timeout(self.connection_s):
                    request = await _read_head(loop, connection)
                    if request:
                        await loop.sock_sendall(connection, self._respond(request))
            except TimeoutError:
                self._misuse.count("timed out")

    def _respond(self, request: bytes) -> bytes:
        try:
            status, body, content_type = self._answer(request)
        except Exception as error:  # whatever it is: the next request may succeed
            status, content_type = 500, _PLAIN_TEXT
            body = f"{type(error).__name__}\n".encode()
        if status not in (200, 503):
            self._misuse.count(f"status {status}")
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if request.startswith(b"HEAD ") else body)

    def _answer(self, request: bytes) -> tuple[int, bytes, str]:
        """Return status, body and content type for the head of a request."""
        if len(request) >= _MAX_REQUEST_BYTES:
            return 431, b"the request is too long\n", _PLAIN_TEXT
        words = request.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400, b"this is no HTTP/1.1 request\n", _PLAIN_TEXT
        if words[0] not in (b"GET", b"HEAD"):
            return 405, b"GET only\n", _PLAIN_TEXT
        path = words[1].partition(b"?")[0]
        if path == b"/metrics":
            return 200, self.metrics(), CONTENT_TYPE_LATEST
        checks = {b"/healthz": self.why_not_healthy, b"/readyz": self.why_not_ready}
        if path not in checks:
            return 404, b"there are /healthz, /readyz and /metrics\n", _PLAIN_TEXT
        why_not = checks[path]()
        return (
            (503 if why_not else 200),
            f"{why_not or 'ok'}\n".encode(errors="replace"),
            _PLAIN_TEXT,
        )


def max_connections() -> int:
    """Return how many connections are served at once: few enough to leave files to open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        _MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, files // 4)
    )


async def _read_head(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    """Read to the end of a request's head, or to what is too long for one; b"" at an end before."""
    request = b""
    while b"\r\n\r\n" not in request and len(request) < _MAX_REQUEST_BYTES:
        received = await loop.sock_recv(connection, _MAX_REQUEST_BYTES)
        if not received:
            return b""
        request += received
    return request


@dataclass(slots=True)
class MisuseLog:
    """At most one line a minute, whatever others do at the port."""

    log: Logger
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    _counts: Counter[str] = field(default_factory=Counter)
    _logged_s: float | None = None

    def count(self, what: str) -> None:
        """Count it, and log what was counted since the last line unless that was just now."""
        self._counts[what] += 1
        now_s = self.clock()
        if self._logged_s is None or now_s - self._logged_s >= _LOG_EVERY_S:
            self.log.warning("connections_refused", counts=dict(self._counts))
            self._counts.clear()
            self._logged_s = now_s


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
                opened.append(
                    stack.enter_context(
                        socket.create_server(address, family=family, backlog=_BACKLOG)
                    )
                )
            except OSError as error:
                # A kernel without IPv6 has the addresses, and no sockets for them.
                if error.errno != errno.EAFNOSUPPORT or len(found) == 1:
                    raise
        stack.pop_all()
    return tuple(opened)
