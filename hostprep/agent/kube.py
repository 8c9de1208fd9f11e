"""The API server, as far as this node's own HostMemoryNode goes: the only module that asks it.

Raw JSON in and out. The watch is bounded on both sides: the server ends it after some minutes,
and silence for longer than its bookmarks are apart (one or two minutes) counts as a broken one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from hostprep.agent.backoff import Backoff
from hostprep.agent.kubeconfig import load_configuration
from hostprep.agent.logs import Logger
from hostprep.api.names import GROUP, NODE_PLURAL, VERSION
from hostprep.errors import BadInputError, FailedError

__all__ = ["ApiError", "NodeApi", "Observed"]

_REQUEST_TIMEOUT_S = 15.0
_WATCH_TIMEOUT_S = (240, 480)
_SILENCE_S = 210.0
_SHORTEST_STREAM_S = 1.0
_GONE = 410
_UNAUTHORIZED = 401
_NUMBER = re.compile(r"\d+")
_BROKEN = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ssl.SSLError, ValueError)


class ApiError(FailedError):
    """The API server refused, or could not be reached (then `status` is 0)."""

    def __init__(self, status: int, message: str) -> None:
        reason = f"Http{status}" if status else "ApiUnreachable"
        super().__init__(message[:300], reason=reason)
        self.status = status

    def __str__(self) -> str:
        """Return the message, with the HTTP status where there is one."""
        return f"HTTP {self.status}: {self.message}" if self.status else self.message


@dataclass(frozen=True, slots=True)
class Observed:
    """The object as the API server has it; None where it has none."""

    document: Mapping[str, Any] | None


class NodeApi:
    """One HostMemoryNode: watched, and its status patched."""

    def __init__(
        self,
        name: str,
        configuration: Configuration,
        path: str | None,
        log: Logger | None = None,
    ) -> None:
        """`path` is read again when the credentials are refused: tokens are rotated."""
        self._log = log
        self._away = ""
        """Why the watch does not work, as last logged; empty while it does."""
        self._name = name
        self._path = path
        self._client = ApiClient(configuration)
        self._folder = f"/apis/{GROUP}/{VERSION}/{NODE_PLURAL}"
        self.connected = False
        """Whether the last request or the running watch works."""

    async def close(self) -> None:
        """Close the connections."""
        await _close(self._client)

    async def watch(self, since: str | None = None) -> AsyncIterator[Observed]:
        """Yield the object now and after every change, for ever.

        With `since`, a version that `ask` returned, begin with the changes after it.

        Raises nothing: while the API server is away it tries again, ever less often, and after
        each interruption yields the object anew, since anything may have been missed.
        """
        backoff = Backoff(first_s=0.5, most_s=30.0)
        while True:
            begin_s = math.inf  # no stream has been granted yet
            try:
                if since is None:
                    observed, since = await self.ask()
                    yield observed
                while True:
                    async for change, now in self._stream(since):
                        since = now
                        self._say_back()
                        begin_s = min(begin_s, time.monotonic())
                        if change is not None:
                            yield change
                    if time.monotonic() - begin_s >= _SHORTEST_STREAM_S:
                        backoff.reset()
                    else:
                        await asyncio.sleep(backoff.next_s())
                    begin_s = math.inf
            except ApiError as error:
                since, self.connected = None, error.status == _GONE
                self._say_away(error)
                # A list that works says nothing of the watch: both again at once, from every
                # node, would be what keeps an overloaded server down.
                if time.monotonic() - begin_s >= _SHORTEST_STREAM_S:
                    backoff.reset()
                await asyncio.sleep(backoff.next_s())
                if error.status == _UNAUTHORIZED:
                    await self._renew()

    def _say_away(self, error: ApiError) -> None:
        """Log once, and again for another reason: numbers in it are ports, times and ids."""
        words = f"{error.status} {_NUMBER.sub('#', error.message)}"
        if error.status == _GONE or words == self._away:
            return
        self._away = words
        if self._log is not None:
            url = self._client.configuration.host
            self._log.warning("api_away", error=str(error), url=url)

    def _say_back(self) -> None:
        """Log that the watch is granted: a list alone proves nothing."""
        if self._away and self._log is not None:
            self._log.info("api_back", url=self._client.configuration.host)
        self._away = ""

    async def patch_status(self, patch: Mapping[str, Any], *, uid: str) -> Mapping[str, Any]:
        """Merge the patch into the status of the object of that UID; return the object.

        Raises ApiError: 404 where there is none, 409 where it is another one by now.
        """
        body = {"metadata": {"uid": uid}, "status": dict(patch)}
        path = f"{self._folder}/{quote(self._name, safe='')}/status"
        try:
            async with self._request("PATCH", path, body=body) as answer:
                document: Mapping[str, Any] = await _read_json(answer)
        except ApiError as error:
            if error.status == _UNAUTHORIZED:
                await self._renew()
            raise
        return document

    async def ask(self) -> tuple[Observed, str]:
        """Return the object as it is now, and the version to watch from. Raises ApiError."""
        async with self._request("GET", self._folder, self._query()) as answer:
            document = await _read_json(answer)
        try:
            items = [item for item in document["items"] if item["metadata"]["name"] == self._name]
            found = Observed(items[0] if items else None), document["metadata"]["resourceVersion"]
        except (KeyError, TypeError) as error:
            raise ApiError(0, f"not a list: {error}") from error
        self.connected = True
        return found

    async def _stream(self, version: str) -> AsyncIterator[tuple[Observed | None, str]]:
        """Yield changes with the version they led to, until it ends.

        None stands for a bookmark, and first of all for the server's consent.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(random.randint(*_WATCH_TIMEOUT_S)),  # noqa: S311
        }
        async with self._request(
            "GET", self._folder, self._query() | query, silence_s=_SILENCE_S
        ) as answer:
            yield None, version
            async for line in _lines(answer):
                event = _parsed(line)
                kind, item = event.get("type"), event.get("object") or {}
                if kind == "ERROR":
                    raise ApiError(int(item.get("code") or 0), str(item.get("message")))
                version = item.get("metadata", {}).get("resourceVersion", version)
                if kind == "BOOKMARK":
                    yield None, version
                elif item.get("metadata", {}).get("name") == self._name:
                    yield Observed(None if kind == "DELETED" else item), version

    def _query(self) -> dict[str, str]:
        return {"fieldSelector": f"metadata.name={self._name}"}

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        silence_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer to a request. Raises ApiError, also for what breaks in the block."""
        url = f"{path}?{urlencode(query)}" if query else path
        total_s = None if silence_s else _REQUEST_TIMEOUT_S
        timeout = aiohttp.ClientTimeout(
            total=total_s, sock_connect=_REQUEST_TIMEOUT_S, sock_read=silence_s
        )
        try:
            serialized = await self._client.param_serialize(
                method=method,
                resource_path=url,
                header_params={
                    "Accept": "application/json",
                    "Content-Type": "application/merge-patch+json",
                },
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(*serialized, _request_timeout=timeout)
            async with answer.response as response:
                if response.status >= 400:
                    raise ApiError(response.status, _reason(await response.text()))
                yield response
        except _BROKEN as error:
            said = f"{type(error).__name__}: {error}"
            raise ApiError(0, said.removesuffix(": ")) from error

    async def _renew(self) -> None:
        """Read the credentials again."""
        with contextlib.suppress(BadInputError):
            configuration = await load_configuration(self._path)
            if configuration is not None:
                old, self._client = self._client, ApiClient(configuration)
                await _close(old)


async def _close(client: ApiClient) -> None:
    close: Callable[[], Awaitable[None]] = client.close
    await close()


async def _read_json(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    return _parsed(await answer.read())


def _reason(text: str) -> str:
    """Return what a refusal says: the message of a Status, or all of another text."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(text)
        if isinstance(document, dict) and document.get("message"):
            return str(document["message"])
    return " ".join(text.split()) or "refused without a word"


def _parsed(text: bytes) -> dict[str, Any]:
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ApiError(0, "the API server's answer is no object")
    return document


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, however long they are."""
    rest = b""
    async for chunk in answer.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
