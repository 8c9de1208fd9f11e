"""The API server as the operator sees it: raw JSON in and out, errors by type.

Beside kopf's watches, nothing else speaks to the server. The client's models are not used: they
drop fields that they do not know, and refuse Nodes that lack ones they expect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration

import hostprep
from hostprep_operator.api_errors import (
    ApiError,
    ConflictError,
    ExpiredError,
    RefusedError,
    TooManyError,
    UnreachableError,
)
from hostprep_operator.resources import Resource

__all__ = ["FIELD_MANAGER", "NO_SUCH_RESOURCE", "Json", "Kube", "Page"]

Json = dict[str, Any]

FIELD_MANAGER = "hostprep-operator"
NO_SUCH_RESOURCE = "NoSuchResource"
"""Reason of a RefusedError: the server does not know the kind (its definition is not there)."""
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_REQUEST_S = 30.0
"""A request that takes longer is given up: the server itself gives up after 60."""
_PATIENCE = 4
"""Tries while the server says 429; each waits as long as it was told to."""
_LONGEST_WAIT_S = 30.0


def _ignore(_kind: str, _result: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list."""

    items: list[Json]
    resource_version: str
    """The version as of which the whole list is; the same on each page."""


class Kube:
    """A client of one API server."""

    def __init__(
        self, configuration: Configuration, *, on_write: Callable[[str, str], None] = _ignore
    ) -> None:
        self._api = ApiClient(configuration)
        self._api.user_agent = f"hostprep-operator/{hostprep.__version__}"
        self._on_write = on_write
        """Called with the kind and `written`, `gone`, or the error's reason in lower case."""

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    async def pages(
        self,
        resource: Resource,
        *,
        limit: int = 500,
        label_selector: str = "",
        metadata_only: bool = False,
    ) -> AsyncIterator[Page]:
        """Yield the objects a page at a time, so that no more than one page is in memory.

        Raises ExpiredError when the reading took so long that it has to start again, and ApiError.
        """
        query = {"limit": str(limit)}
        if label_selector:
            query["labelSelector"] = label_selector
        accept = _METADATA_ONLY if metadata_only else "application/json"
        while True:
            page = await self._send("GET", resource.path, query=query, accept=accept)
            if page is None:
                raise RefusedError(f"no list of {resource.kind}", reason=NO_SUCH_RESOURCE)
            metadata = page.get("metadata") or {}
            yield Page(page.get("items") or [], metadata.get("resourceVersion") or "")
            token = metadata.get("continue")
            del page  # before the next one comes
            if not token:
                return
            query["continue"] = token

    async def get(self, resource: Resource, name: str) -> Json | None:
        """Return one object; None when the server says that there is none."""
        return await self._send("GET", resource.of(name))

    async def verbs(self, resource: Resource) -> frozenset[str]:
        """Return what the server lets clients do with such objects; nothing for an unknown kind.

        `create` is missing while the kind's CustomResourceDefinition is being deleted
        (apiextensions-apiserver, customresource_discovery_controller.go).
        """
        folder, _, plural = resource.path.rpartition("/")
        known = (await self._send("GET", folder) or {}).get("resources") or []
        return frozenset(v for kind in known if kind["name"] == plural for v in kind["verbs"])

    async def create(self, resource: Resource, body: Mapping[str, Any]) -> Json | None:
        """Create an object and return it; None when its namespace or kind is not there."""
        return await self._write(resource, "POST", resource.path, body, "application/json")

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

        A `metadata.resourceVersion` in the body makes the server refuse a stale patch.
        """
        content = _STRATEGIC if strategic else _MERGE
        path = resource.of(name, subresource)
        return await self._write(resource, "PATCH", path, body, content)

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
        path = resource.of(name)
        answer = await self._write(resource, "DELETE", path, body, "application/json")
        return answer is not None

    async def _write(
        self,
        resource: Resource,
        method: str,
        path: str,
        body: Mapping[str, Any],
        content: str,
    ) -> Json | None:
        query = {} if method == "DELETE" else {"fieldManager": FIELD_MANAGER}
        try:
            answer = await self._send(method, path, query=query, body=body, content=content)
        except ApiError as error:
            self._on_write(resource.kind, error.reason.lower())
            raise
        self._on_write(resource.kind, "gone" if answer is None else "written")
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
        accept: str = "application/json",
    ) -> Json | None:
        url = self._api.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": accept, "Content-Type": content}
        for attempt in range(1, _PATIENCE + 1):
            status, wait_s, data = await self._once(method, url, headers, body)
            error = _error_of(status, wait_s, data, f"{method} {path}")
            if not isinstance(error, TooManyError) or attempt == _PATIENCE:
                break
            await asyncio.sleep(error.retry_after_s)
        if error is not None:
            raise error
        return None if status == 404 else _document(data, f"{method} {path}")

    async def _once(
        self, method: str, url: str, headers: Json, body: Mapping[str, Any] | None
    ) -> tuple[int, str, bytes]:
        headers = {**headers, "User-Agent": self._api.user_agent}
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        try:
            await self._api.update_params_for_auth(
                headers, None, ["BearerToken"], url, method, body
            )
            answer = await self._api.call_api(
                method, url, headers, dict(body) if body else None, _request_timeout=timeout
            )
            data = await answer.read()  # type: ignore[no-untyped-call]
        except asyncio.CancelledError:
            if _meant_for_us():
                raise
            raise UnreachableError(f"{method} {url} was cut short") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"{method} {url}: {error or type(error).__name__}") from error
        return answer.status, answer.headers.get("Retry-After", ""), data


def _meant_for_us() -> bool:
    """Whether this task was cancelled, or only something of kopf's that it waited for.

    Kopf, when it ends, cancels every task that was started after it, a connection's included.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _error_of(status: int, wait: str, data: bytes, what: str) -> ApiError | None:
    if status < 400 or (status == 404 and not _is_about_a_route(data)):
        return None
    message = f"{what}: {_message(data) or status}"
    if status == 404:
        return RefusedError(message, reason=NO_SUCH_RESOURCE)
    if status == 409:
        return ConflictError(message)
    if status == 410:
        return ExpiredError(message)
    if status == 429 or (status == 503 and wait):
        error = TooManyError(message)
        error.retry_after_s = _seconds(wait)
        return error
    return UnreachableError(message) if status >= 500 else RefusedError(message)


def _is_about_a_route(data: bytes) -> bool:
    """Whether a 404 is no answer of the API but of its router: the CRD is not served (yet).

    Taking that for "the object is gone" would release memory.
    """
    return not data.lstrip().startswith(b"{")


def _message(data: bytes) -> str:
    try:
        document = json.loads(data)
    except ValueError:
        return data[:200].decode(errors="replace").strip()
    return str(document.get("message", "")) if isinstance(document, dict) else ""


def _document(data: bytes, what: str) -> Json:
    """Return what was answered. Raises UnreachableError for what no API server says."""
    try:
        document: Json = json.loads(data)
    except ValueError as error:  # a proxy's page, say
        raise UnreachableError(f"{what}: the answer is no JSON") from error
    return document


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.1), _LONGEST_WAIT_S)
    except ValueError:
        return 1.0
