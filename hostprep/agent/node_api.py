"""This node's own HostMemoryNode at the API server: watched, and its status patched."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from hostprep.errors import BadInputError
from hostprep.kube.backoff import Backoff
from hostprep.kube.client import HOST_MEMORY_NODES, KubeClient
from hostprep.kube.errors import ApiError, GoneError, NotFoundError
from hostprep.kube.logs import Logger

_REQUEST_TIMEOUT_S = 15.0
_SHORTEST_STREAM_S = 1.0
_NUMBER = re.compile(r"\d+")


Document = Mapping[str, Any]


class NodeApi:
    """One HostMemoryNode."""

    def __init__(self, name: str, client: KubeClient, log: Logger) -> None:
        self._name = name
        self._client = client
        self._log = log
        self._trouble = ""
        """Why the watch does not work, as last logged; empty while it does."""
        self._selector = f"metadata.name={name}"
        self.connected = False
        """Whether the last request or the running watch works."""

    @classmethod
    async def connect(cls, name: str, kubeconfig: str | None, log: Logger) -> NodeApi | None:
        """Return one for the configured API server; None where none is configured.

        Raises BadInputError for a configuration that cannot be used.
        """
        try:
            client = await KubeClient.connect(
                kubeconfig,
                name="hostprep-agent",
                timeout_s=_REQUEST_TIMEOUT_S,
                throttled_tries=1,  # watch and report have a backoff of their own
            )
        except BadInputError as error:
            if error.reason != "NoKubeconfig":
                raise
            return None
        return cls(name, client, log)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def watch(self) -> AsyncIterator[Document | None]:
        """Yield the object (None where there is none) now and after every change, for ever.

        Raises nothing: while the API server is unreachable it tries again, ever less often, and
        after each interruption yields the object again, since any change may have been missed.
        """
        backoff = Backoff(first_s=0.5, most_s=30.0)
        since: str | None = None
        while True:
            begin_s = math.inf  # no stream has been granted yet
            try:
                if since is None:
                    document, since = await self._list()
                    yield document
                while True:
                    events = self._client.watch(
                        HOST_MEMORY_NODES, since=since, field_selector=self._selector
                    )
                    async for event in events:
                        since = event.resource_version
                        self._log_back()
                        begin_s = min(begin_s, time.monotonic())
                        if event.object.get("metadata", {}).get("name") == self._name:
                            yield None if event.type == "DELETED" else event.object
                    if time.monotonic() - begin_s >= _SHORTEST_STREAM_S:
                        backoff.reset()
                    else:
                        await asyncio.sleep(backoff.next_s())
                    begin_s = math.inf
            except ApiError as error:
                since, self.connected = None, isinstance(error, GoneError)
                self._log_trouble(error)
                # A list that works says nothing of the watch: both again at once, from every
                # node, would be what keeps an overloaded server down.
                if time.monotonic() - begin_s >= _SHORTEST_STREAM_S:
                    backoff.reset()
                await asyncio.sleep(max(backoff.next_s(), error.retry_after_s))

    def _log_trouble(self, error: ApiError) -> None:
        """Log once, and again for another reason: numbers in it are ports, times and ids."""
        trouble = f"{error.status} {_NUMBER.sub('#', error.answer)}"
        if isinstance(error, GoneError) or trouble == self._trouble:
            return
        self._trouble = trouble
        url = self._client.configuration.host
        self._log.warning("api_away", error=error.summary, url=url)

    def _log_back(self) -> None:
        """Log that the watch is granted: a list alone proves nothing."""
        if self._trouble:
            self._log.info("api_back", url=self._client.configuration.host)
        self._trouble = ""

    async def patch_status(self, patch: Mapping[str, Any], *, uid: str) -> Mapping[str, Any]:
        """Merge the patch into the status of the object of that UID; return the object.

        Raises ApiError: NotFoundError where there is none, ConflictError where it is another one.
        """
        body = {"metadata": {"uid": uid}, "status": dict(patch)}
        document = await self._client.patch(
            HOST_MEMORY_NODES, self._name, body, subresource="status"
        )
        if document is None:
            raise NotFoundError("there is no such HostMemoryNode", status=404)
        return document

    async def _list(self) -> tuple[Document | None, str]:
        """Return the object as it is now, and the version to watch from. Raises ApiError."""
        found: Document | None = None
        version = ""
        async for page in self._client.pages(HOST_MEMORY_NODES, field_selector=self._selector):
            version = page.resource_version
            for item in page.items:
                if item["metadata"]["name"] == self._name:
                    found = item
        self.connected = True
        return found, version
