"""This node's own HostMemoryNode at the API server: watched, and its status patched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from hostprep.errors import BadInputError
from hostprep.kube.client import HOST_MEMORY_NODES, KubeClient
from hostprep.kube.errors import NotFoundError
from hostprep.kube.logs import Logger
from hostprep.kube.watch import Event, Reflector

_REQUEST_TIMEOUT_S = 15.0


Document = Mapping[str, Any]


class NodeApi:
    """One HostMemoryNode."""

    def __init__(self, name: str, client: KubeClient, log: Logger) -> None:
        self._name = name
        self._client = client
        self._reflector = Reflector(
            client, HOST_MEMORY_NODES, log, field_selector=f"metadata.name={name}"
        )

    @property
    def connected(self) -> bool:
        """Whether the last list or the running watch works."""
        return self._reflector.connected

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

        Raises nothing: while the API server is unreachable it tries again, ever less often.
        """
        is_there = False
        async for change in self._reflector.changes():
            if change.event is Event.LISTED:
                if not is_there:
                    yield None
            elif change.name == self._name:
                is_there = change.event is Event.OBSERVED
                if change.event is not Event.VANISHED:  # the end of the list says so
                    yield change.document if is_there else None

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
