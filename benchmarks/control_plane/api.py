"""A bare client for drivers and rivals: raw JSON over kubernetes.aio, nothing of the operator's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar
from urllib.parse import urlencode

from kubernetes.aio import client, config

NODES = "/api/v1/nodes"
HMN = "/apis/hostprep.dev/v1alpha1/hostmemorynodes"
HMP = "/apis/hostprep.dev/v1alpha1/hostmemorypools"
NODE_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"

T = TypeVar("T")


class Api:
    """Requests as path and body. Use as an async context manager."""

    def __init__(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig

    async def __aenter__(self) -> Api:
        settings = client.Configuration()
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            self._kubeconfig, client_configuration=settings
        )
        self._client = client.ApiClient(settings)
        self._host = settings.host
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def request(
        self, method: str, path: str, body: object = None, *, content_type: str = "application/json"
    ) -> Any:
        """Return the answer's JSON. Raises kubernetes' ApiException for a refusal."""
        response: Any = await self._client.call_api(
            method,
            self._host + path,
            header_params={"Content-Type": content_type, "Accept": "application/json"},
            body=body,
            _preload_content=False,
        )
        text = await response.read()
        return json.loads(text) if text else None

    async def list(self, path: str, *, limit: int = 500) -> AsyncIterator[dict[str, Any]]:
        """Yield all objects, page by page."""
        query: dict[str, Any] = {"limit": limit}
        while True:
            page = await self.request("GET", f"{path}?{urlencode(query)}")
            for item in page["items"]:
                yield item
            if not (token := page["metadata"].get("continue")):
                return
            query["continue"] = token

    async def version(self, path: str) -> str:
        """Return the list's resourceVersion: where a watch begins."""
        page = await self.request("GET", f"{path}?limit=1")
        return str(page["metadata"]["resourceVersion"])

    async def watch(self, path: str, version: str) -> AsyncIterator[bytes]:
        """Yield the lines of a watch as they come; the caller parses them.

        A server ends watches that read too slowly: then the next begins where the last one ended.
        """
        while True:
            last = b""
            async for line in self._watch_once(path, version):
                last = line
                yield line
            if last:
                version = json.loads(last)["object"]["metadata"]["resourceVersion"]

    async def _watch_once(self, path: str, version: str) -> AsyncIterator[bytes]:
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": 3600}
        response: Any = await self._client.call_api(
            "GET",
            f"{self._host}{path}?{urlencode(query)}",
            header_params={"Accept": "application/json"},
            _preload_content=False,
            _request_timeout=3700,
        )
        buffer = b""
        async for chunk in response.response.content.iter_any():
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                yield line


async def at_once(
    items: Iterable[T], do: Callable[[T], Awaitable[object]], *, width: int = 16
) -> None:
    """Do it for every item, `width` at a time."""
    queue = iter(items)

    async def lane() -> None:
        for item in queue:
            await do(item)

    await asyncio.gather(*(lane() for _ in range(width)))
