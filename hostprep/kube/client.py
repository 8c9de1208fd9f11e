"""A client of the API server: raw JSON in and out, errors by type.

Of `kubernetes.aio` only connections and credentials are used. Its models are not: they drop fields
that they do not know, and refuse Nodes that lack ones they expect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

import hostprep
from hostprep.api.names import API_VERSION, NODE_KIND, NODE_PLURAL, POOL_KIND, POOL_PLURAL
from hostprep.errors import BadInputError
from hostprep.kube.configuration import load_configuration
from hostprep.kube.errors import (
    ApiError,
    NoSuchResourceError,
    NotFoundError,
    ThrottledError,
    UnauthorizedError,
    UnreachableError,
    error_of,
)

Json = dict[str, Any]
OnWrite = Callable[[str, str], None]

_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_WATCH_S = (240, 480)
"""The server ends a watch after so many seconds: a random number of this range."""
_WATCH_SILENCE_S = 210.0
"""The server's bookmarks come every one or two minutes: no line for so long is a broken watch."""
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError, RuntimeError, ValueError)
"""RuntimeError: of a session that was closed meanwhile, since the credentials were renewed."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One collection of objects."""

    kind: str
    path: str
    """Of the collection, without a slash at its end."""

    def of(self, name: str, subresource: str = "") -> str:
        """Return the path of one object, or of its subresource."""
        path = f"{self.path}/{quote(name, safe='')}"
        return f"{path}/{subresource}" if subresource else path


NODES = Resource("Node", "/api/v1/nodes")
POOLS = Resource(POOL_KIND, f"/apis/{API_VERSION}/{POOL_PLURAL}")
HOST_MEMORY_NODES = Resource(NODE_KIND, f"/apis/{API_VERSION}/{NODE_PLURAL}")
EVENTS = Resource("Event", "/apis/events.k8s.io/v1/namespaces/default/events")
"""Events about objects without a namespace must be in the namespace `default`."""


def pods(namespace: str) -> Resource:
    """Return the pods of a namespace."""
    return Resource("Pod", f"/api/v1/namespaces/{quote(namespace, safe='')}/pods")


def leases(namespace: str) -> Resource:
    """Return the Leases of a namespace."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace, safe='')}/leases"
    return Resource("Lease", path)


def micro_time() -> str:
    """Return the time as Leases and Events have it: RFC 3339 in UTC, with microseconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list."""

    items: list[Json]
    resource_version: str
    """The version as of which the whole list is; the same on each page."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK; first of all STARTED: the server granted the watch."""
    object: Json
    resource_version: str
    """To watch from after this event."""


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content: str = _JSON
    accept: str = _JSON

    def __str__(self) -> str:
        return f"{'watch' if 'watch' in self.query else self.method} {self.path}"


class KubeClient:
    """A client of one API server."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        name: str = "hostprep",
        renew: Callable[[], Awaitable[Configuration | None]] | None = None,
        on_write: OnWrite | None = None,
        timeout_s: float = 30.0,
        throttled_tries: int = 4,
    ) -> None:
        """Make a client; it connects with the first request.

        `name` is the user agent and the field manager. `renew` reads the configuration again when
        the credentials are refused: tokens are rotated. `on_write` is called with the kind and
        `written`, `gone`, or the error's reason in lower case. `throttled_tries`: how often a
        request is sent while the server answers 429, each time after the pause it asks for.
        """
        self._api = ApiClient(configuration)
        self._name = name
        self._renew = renew
        self._renewing = asyncio.Lock()
        self._on_write = on_write or (lambda _kind, _result: None)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._watch_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=timeout_s, sock_read=_WATCH_SILENCE_S
        )
        self._tries = throttled_tries

    @classmethod
    async def connect(
        cls,
        kubeconfig: str | None,
        *,
        name: str,
        on_write: OnWrite | None = None,
        timeout_s: float = 30.0,
        throttled_tries: int = 4,
    ) -> KubeClient:
        """Return a client of the configured API server.

        Raises BadInputError where none is configured, or in a way that cannot be used.
        """
        configuration = await load_configuration(kubeconfig)
        if configuration is None:
            raise BadInputError(
                "no API server is configured",
                reason="NoKubeconfig",
                remedy="run in a pod with a service account, or give --kubeconfig FILE",
            )
        return cls(
            configuration,
            name=name,
            renew=lambda: load_configuration(kubeconfig),
            on_write=on_write,
            timeout_s=timeout_s,
            throttled_tries=throttled_tries,
        )

    @property
    def configuration(self) -> Configuration:
        """The address and credentials in use."""
        configuration: Configuration = self._api.configuration
        return configuration

    async def close(self) -> None:
        """Close the connections."""
        await _close(self._api)

    async def get(self, resource: Resource, name: str) -> Json | None:
        """Return one object; None when the server says that there is none."""
        try:
            return await self._send(_Request("GET", resource.of(name)))
        except NotFoundError:
            return None

    async def pages(
        self,
        resource: Resource,
        *,
        limit: int = 500,
        label_selector: str = "",
        field_selector: str = "",
        metadata_only: bool = False,
    ) -> AsyncIterator[Page]:
        """Yield the objects a page at a time, so that no more than one page is in memory.

        Raises GoneError when the reading took so long that it has to start again, and ApiError.
        """
        query = {"limit": str(limit)}
        if label_selector:
            query["labelSelector"] = label_selector
        if field_selector:
            query["fieldSelector"] = field_selector
        accept = _METADATA_ONLY if metadata_only else _JSON
        while True:
            request = _Request("GET", resource.path, query, accept=accept)
            try:
                page = await self._send(request)
            except NotFoundError as error:
                raise NoSuchResourceError(f"no list of {resource.kind}", status=404) from error
            metadata = page.get("metadata") or {}
            version = metadata.get("resourceVersion")
            if not isinstance(version, str) or "items" not in page:
                raise UnreachableError("the answer is no list", request=str(request))
            yield Page(page["items"] or [], version)
            token = metadata.get("continue")
            del page  # before the next one comes
            if not token:
                return
            query["continue"] = token

    async def watch(
        self,
        resource: Resource,
        *,
        since: str,
        label_selector: str = "",
        field_selector: str = "",
        longest_s: float = math.inf,
    ) -> AsyncIterator[WatchEvent]:
        """Yield what changes after that version, until the server ends the watch after minutes.

        `longest_s`: at most after so many seconds, rounded up to whole ones.

        Raises GoneError where the version is too old, and ApiError; also after silence for longer
        than the server's bookmarks are apart.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(max(1, math.ceil(min(random.randint(*_WATCH_S), longest_s)))),  # noqa: S311
        }
        if label_selector:
            query["labelSelector"] = label_selector
        if field_selector:
            query["fieldSelector"] = field_selector
        request = _Request("GET", resource.path, query)
        async with self._answer(request, self._watch_timeout) as response:
            yield WatchEvent("STARTED", {}, since)
            async for line in _lines(response):
                event = _parse(line, request)
                changed = event.get("object") or {}
                if event.get("type") == "ERROR":
                    code = int(changed.get("code") or 0)
                    raise error_of(code, json.dumps(changed).encode(), request=str(request))
                since = (changed.get("metadata") or {}).get("resourceVersion", since)
                yield WatchEvent(str(event.get("type")), changed, since)

    async def verbs(self, resource: Resource) -> frozenset[str]:
        """Return what the server lets clients do with such objects; nothing for an unknown kind.

        `create` is missing while the kind's CustomResourceDefinition is being deleted
        (apiextensions-apiserver, customresource_discovery_controller.go).
        """
        folder, _, plural = resource.path.rpartition("/")
        with contextlib.suppress(NotFoundError):
            known = (await self._send(_Request("GET", folder))).get("resources") or []
            return frozenset(v for kind in known if kind["name"] == plural for v in kind["verbs"])
        return frozenset()

    async def create(self, resource: Resource, body: Mapping[str, Any]) -> Json | None:
        """Create an object and return it; None when its namespace or kind does not exist."""
        query = {"fieldManager": self._name}
        return await self._write(resource, _Request("POST", resource.path, query, body))

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: Mapping[str, Any],
        *,
        subresource: str = "",
        strategic: bool = False,
    ) -> Json | None:
        """Patch an object and return it whole; None when it is gone.

        A `metadata.resourceVersion` or `metadata.uid` in the body makes the server refuse a patch
        of another version or object with ConflictError.
        """
        content = _STRATEGIC_PATCH if strategic else _MERGE_PATCH
        path, query = resource.of(name, subresource), {"fieldManager": self._name}
        return await self._write(resource, _Request("PATCH", path, query, body, content))

    async def delete(
        self, resource: Resource, name: str, *, uid: str, resource_version: str = ""
    ) -> bool:
        """Delete exactly that object, in exactly that version if one is given.

        Returns False when it is gone already. Raises ConflictError when it is another one.
        """
        preconditions = {"uid": uid}
        if resource_version:
            preconditions["resourceVersion"] = resource_version
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
        request = _Request("DELETE", resource.of(name), body=body)
        return await self._write(resource, request) is not None

    async def _write(self, resource: Resource, request: _Request) -> Json | None:
        try:
            answer = await self._send(request)
        except NotFoundError:
            self._on_write(resource.kind, "gone")
            return None
        except ApiError as error:
            self._on_write(resource.kind, error.reason.lower())
            raise
        self._on_write(resource.kind, "written")
        return answer

    async def _send(self, request: _Request) -> Json:
        """Return the answer to a request. Raises ApiError."""
        tries = 0
        while True:
            tries += 1
            try:
                async with self._answer(request, self._timeout) as response:
                    data = await response.read()
            except ThrottledError as error:
                if tries >= self._tries:
                    raise
                await asyncio.sleep(error.retry_after_s)
            else:
                return _parse(data, request)

    @contextlib.asynccontextmanager
    async def _answer(
        self, request: _Request, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer to a request. Raises ApiError, also for what breaks in the block."""
        api, method, body = self._api, request.method, request.body
        url = api.configuration.host + request.path
        if request.query:
            url += f"?{urlencode(request.query)}"
        headers = {
            "Accept": request.accept,
            "Content-Type": request.content,
            "User-Agent": f"{self._name}/{hostprep.__version__}",
        }
        try:
            await api.update_params_for_auth(headers, None, ["BearerToken"], url, method, body)
            answer = await api.call_api(
                method, url, headers, dict(body) if body else None, _request_timeout=timeout
            )
            async with answer.response as response:
                if response.status >= 400:
                    raise error_of(
                        response.status,
                        await response.read(),
                        request=str(request),
                        retry_after=response.headers.get("Retry-After", ""),
                    )
                yield response
        except UnauthorizedError:
            await self._renew_credentials(api)
            raise
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise UnreachableError("the request was cut short", request=str(request)) from None
        except _BROKEN as error:
            said = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise UnreachableError(said, request=str(request)) from error

    async def _renew_credentials(self, refused: ApiClient) -> None:
        """Read the configuration again for the next request, once for all that were refused."""
        async with self._renewing:
            if self._renew is None or self._api is not refused:
                return
            with contextlib.suppress(BadInputError):
                configuration = await self._renew()
                if configuration is not None:
                    self._api = ApiClient(configuration)
                    await _close(refused)


async def _close(client: ApiClient) -> None:
    # The client's own annotations stop short of it.
    await cast("Callable[[], Awaitable[None]]", client.close)()


def _is_cancelled() -> bool:
    """Whether this task was cancelled, or only something of kopf's that it waited for.

    Kopf, when it ends, cancels every task that was started after it, a connection's included.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _parse(data: bytes, request: _Request) -> Json:
    """Return a JSON object. Raises UnreachableError for what no API server says: a proxy's page."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreachableError("the answer is no JSON", request=str(request)) from error
    if not isinstance(document, dict):
        raise UnreachableError("the answer is no JSON object", request=str(request))
    return document


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, however long they are."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
