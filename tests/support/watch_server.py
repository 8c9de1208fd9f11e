"""An API server of one collection: lists in pages, watches, bookmarks, 410 and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from hostprep.kube.client import KubeClient

JsonObject = dict[str, Any]


class WatchServer:
    """A collection of objects with its history: lists in pages, watches, bookmarks and 410."""

    def __init__(self) -> None:
        self.version = 10
        self.objects: dict[str, JsonObject] = {}
        self.history: list[tuple[int, JsonObject]] = []
        self.oldest = 0
        """Watches from before that version get 410."""
        self.refuse: list[int] = []
        """Statuses to answer the next requests with."""
        self.refuse_watches = 0
        """Status that every watch is answered with; 0: granted."""
        self.asked: list[dict[str, str]] = []
        self.streams: set[asyncio.Event] = set()
        self._more = asyncio.Condition()

    async def put(self, name: str, **spec: Any) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        uid = self.objects[name]["metadata"]["uid"] if kind == "MODIFIED" else f"u{self.version}"
        metadata = {"name": name, "uid": uid, "resourceVersion": str(self.version)}
        self.objects[name] = {"metadata": metadata, "spec": spec}
        await self._tell(kind, self.objects[name])

    async def delete(self, name: str) -> None:
        self.version += 1
        last = self.objects.pop(name)
        metadata = last["metadata"] | {"resourceVersion": str(self.version)}
        await self._tell("DELETED", last | {"metadata": metadata})

    async def bookmark(self) -> None:
        self.version += 1  # something else has changed
        await self._tell("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    async def _tell(self, kind: str, document: JsonObject) -> None:
        self.history.append((self.version, {"type": kind, "object": document}))
        async with self._more:
            self._more.notify_all()

    def compact(self) -> None:
        self.oldest = self.version

    async def end_watches(self) -> None:
        for stream in self.streams:
            stream.set()
        async with self._more:
            self._more.notify_all()

    @property
    def lists(self) -> int:
        return sum("watch" not in query and "continue" not in query for query in self.asked)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        refused = self.refuse.pop(0) if self.refuse else 0
        if "watch" in query:
            refused = refused or self.refuse_watches
        if refused:
            return web.json_response({"message": f"no, {refused}"}, status=refused)
        return await self._watch(request) if "watch" in query else self._list(query)

    def _list(self, query: dict[str, str]) -> web.Response:
        names, limit = sorted(self.objects), int(query["limit"])
        begin = int(query.get("continue", "0"))
        metadata: JsonObject = {"resourceVersion": str(self.version)}
        if begin + limit < len(names):
            metadata["continue"] = str(begin + limit)
        items = [self.objects[name] for name in names[begin : begin + limit]]
        return web.json_response({"metadata": metadata, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self.oldest:
            return web.json_response({"message": "too old"}, status=410)
        response, over = web.StreamResponse(), asyncio.Event()
        self.streams.add(over)
        try:
            await response.prepare(request)
            while not over.is_set():
                for version, event in list(self.history):
                    if version > since:
                        since = version
                        await response.write(json.dumps(event).encode() + b"\n")
                async with self._more:
                    if not over.is_set() and self.version <= since:
                        await self._more.wait()
        finally:
            self.streams.discard(over)
        return response


@contextlib.asynccontextmanager
async def client_of(server: WatchServer) -> AsyncIterator[KubeClient]:
    """Serve, and return a client of it."""
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = KubeClient(Configuration(url), throttled_tries=1)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()
