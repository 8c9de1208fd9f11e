"""A proxy in front of the API server that spoils what the test says, and passes on the rest.

    with FaultProxy(cluster) as proxy:
        kubeconfig = proxy.token_kubeconfig("default", "agent", node="a")
        with proxy.fault(answer(429, retry_after_s=1, share=0.2)):
            ...
        proxy.cut_watches()

It speaks TLS with a certificate of the cluster and takes bearer tokens: a client certificate ends
at the proxy. Answers are passed on as they come, a watch event at once.
"""

from __future__ import annotations

import asyncio
import http
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from testbed.control_plane import ControlPlane
from testbed.faults import Action, Asked, Fault, FaultList

Result = TypeVar("Result")
# Headers of one connection, not of the message (RFC 9110, 7.6.1), and what aiohttp sets itself.
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"}
_REASONS = {410: "Expired", 429: "TooManyRequests", 500: "InternalError", 504: "Timeout"}


class FaultProxy:
    """Runs in a thread of its own; all methods may be called from any thread."""

    def __init__(self, cluster: ControlPlane, *, seed: int = 0) -> None:
        """`seed`: of the choice of requests, where a rule hits a share of them."""
        self._cluster = cluster
        self._faults = FaultList(seed)
        self._seen: list[tuple[Asked, int]] = []
        self._streams: set[_Stream] = set()
        self._transports: set[asyncio.BaseTransport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # What a test does with it.

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """Keep a rule in force for a block."""
        remove = self._faults.add(fault)
        try:
            yield
        finally:
            remove()

    def add(self, fault: Fault) -> Callable[[], None]:
        """Put a rule in force; returns what takes it away again."""
        return self._faults.add(fault)

    def clear(self) -> None:
        """Take all rules away."""
        self._faults.clear()

    def cut_watches(self, path: str = "") -> int:
        """Break the running watches whose path contains `path`; returns how many."""
        return self._call(self._end_watches(path, b""))

    def expire_watches(self, path: str = "") -> int:
        """End running watches with an ERROR event of code 410; returns how many."""
        return self._call(self._end_watches(path, _expired_event()))

    def cut_connections(self) -> int:
        """Break every connection, idle or not; returns how many."""
        return self._call(self._cut_all())

    def seen(self) -> list[tuple[Asked, int]]:
        """Requests that came to an end so far, with the status (0: cut without an answer)."""
        return list(self._seen)

    def watches(self) -> list[str]:
        """Paths of the watches that run now."""
        return [stream.asked.path for stream in list(self._streams)]

    def token_kubeconfig(
        self,
        namespace: str,
        service_account: str,
        *,
        node: str | None = None,
        pod: str | None = None,
    ) -> Path:
        """As `ControlPlane.token_kubeconfig`, through the proxy."""
        return self._cluster.token_kubeconfig(
            namespace, service_account, node=node, pod=pod, server=self.url
        )

    def admin_kubeconfig(self) -> Path:
        """The administrator, by token, through the proxy."""
        credentials = self._cluster.credentials
        return credentials.for_token("admin", credentials.admin_token, server=self.url)

    # In the proxy's thread.

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _open(self) -> None:
        # No limit on connections: each watch holds one. Nothing is decompressed on the way.
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._cluster.credentials.client_context(), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        application = web.Application(client_max_size=32 << 20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        context = self._cluster.credentials.server_context("127.0.0.1")
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.url = f"https://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _close(self) -> None:
        await self._cut_all()
        await self._runner.cleanup()
        await self._client.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(request.method, request.path, dict(request.query))
        assert request.transport is not None
        self._transports = {t for t in self._transports if not t.is_closing()}
        self._transports.add(request.transport)
        status = 0
        try:
            response = await self._spoiled(request, asked)
            status = response.status
            return response
        finally:
            self._seen.append((asked, status))

    async def _spoiled(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        for fault in self._faults.hitting(asked):
            if fault.action is Action.DELAY:
                await asyncio.sleep(fault.seconds)
            elif fault.action is Action.ANSWER:
                return _status_answer(fault)
            elif fault.action is Action.EXPIRED:
                return web.Response(body=_expired_event(), content_type="application/json")
            else:
                _abort(request)
                raise ConnectionResetError("cut by the test")
        return await self._pass_on(request, asked)

    async def _pass_on(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        try:
            upstream = await self._client.request(
                request.method,
                self._cluster.url + request.raw_path,
                headers=headers,
                data=await request.read() or None,
                skip_auto_headers=("Content-Type", "Accept-Encoding", "User-Agent"),
                allow_redirects=False,
            )
        except aiohttp.ClientError:
            # As without a proxy: the server is not there, so neither is an answer.
            _abort(request)
            raise ConnectionResetError("no API server") from None
        async with upstream:
            return await self._copy(request, asked, upstream)

    async def _copy(
        self, request: web.Request, asked: Asked, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        kept = {k: v for k, v in upstream.headers.items() if k.lower() not in _HOP}
        response = web.StreamResponse(status=upstream.status, headers=kept)
        await response.prepare(request)
        stream = _Stream(asked, request, response, upstream)
        if asked.is_watch:
            self._streams.add(stream)
        try:
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
                stream.line_open = not chunk.endswith(b"\n")
        except aiohttp.ClientError:
            if not stream.ended:
                _abort(request)
        finally:
            self._streams.discard(stream)
        await response.write_eof()
        return response

    async def _end_watches(self, path: str, last_words: bytes) -> int:
        streams = [stream for stream in self._streams if path in stream.asked.path]
        for stream in streams:
            if last_words:
                await stream.end(last_words)
            else:
                _abort(stream.request)
        return len(streams)

    async def _cut_all(self) -> int:
        live = [transport for transport in self._transports if not transport.is_closing()]
        for transport in live:
            _abort_transport(transport)
        return len(live)


class _Stream:
    """An answer that is being passed on."""

    def __init__(
        self,
        asked: Asked,
        request: web.Request,
        response: web.StreamResponse,
        upstream: aiohttp.ClientResponse,
    ) -> None:
        self.asked = asked
        self.request = request
        self.line_open = False
        self.ended = False
        self._response = response
        self._upstream = upstream

    async def end(self, last_words: bytes) -> None:
        """Say something after the last whole event, and end the answer in order."""
        self.ended = True
        # Half an event may have been passed on: to a reader of lines, ours must be whole.
        await self._response.write(b"\n" + last_words if self.line_open else last_words)
        self._upstream.close()


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        _abort_transport(request.transport)


def _abort_transport(transport: asyncio.BaseTransport) -> None:
    if isinstance(transport, asyncio.Transport):
        transport.abort()


def _status_answer(fault: Fault) -> web.Response:
    headers = {"Retry-After": f"{fault.seconds:.0f}"} if fault.seconds else {}
    return web.json_response(_status(fault.status), status=fault.status, headers=headers)


def _status(code: int) -> dict[str, object]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"the test's proxy says {code}",
        "reason": _REASONS.get(code, http.HTTPStatus(code).phrase.replace(" ", "")),
        "code": code,
    }


def _expired_event() -> bytes:
    return json.dumps({"type": "ERROR", "object": _status(410)}).encode() + b"\n"
