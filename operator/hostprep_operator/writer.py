"""Carries out the pure core's writes: in order, guarded by versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hostprep.kube.client import HOST_MEMORY_NODES, NODES, Json, KubeClient
from hostprep.kube.errors import ConflictError
from hostprep_operator.reconcile.changes import (
    CreateHostMemoryNode,
    DeleteHostMemoryNode,
    PatchHostMemoryNodeSpec,
    PatchNode,
    PatchNodeStatus,
    Write,
)
from hostprep_operator.store import EventHandler, Kind


class Writer:
    """Writes to a node's objects; the answers go into the cache, if there is one, at once."""

    def __init__(self, kube: KubeClient, handler: EventHandler | None = None) -> None:
        self._kube = kube
        self._handler = handler

    async def carry_out(
        self, name: str, writes: Iterable[Write], *, go_on: Callable[[Write], bool] | None = None
    ) -> None:
        """Carry out the writes; stop at one that fails, or when `go_on` returns False after one.

        Raises ConflictError when an object has changed since the writes were computed, or is
        gone; and ApiError.
        """
        node_version = ""
        for write in writes:
            match write:
                case PatchNode() | PatchNodeStatus():
                    node_version = await self._patch_node(name, write, node_version)
                case CreateHostMemoryNode(body):
                    answer = await self._kube.create(HOST_MEMORY_NODES, body)
                    self._observe(Kind.HOST_MEMORY_NODE, answer)
                case PatchHostMemoryNodeSpec(patch):
                    answer = await self._kube.patch(HOST_MEMORY_NODES, name, patch)
                    self._observe(Kind.HOST_MEMORY_NODE, answer)
                case DeleteHostMemoryNode(uid, version):
                    guard = {"uid": uid, "resource_version": version}
                    await self._kube.delete(HOST_MEMORY_NODES, name, **guard)
                    if self._handler is not None:
                        self._handler.vanished(Kind.HOST_MEMORY_NODE, name, **guard)
            if go_on is not None and not go_on(write):
                return

    async def _patch_node(self, name: str, write: PatchNode | PatchNodeStatus, version: str) -> str:
        """Patch, guarded by the version that the write before left; returns the new one."""
        patch = dict(write.patch)
        if version:
            patch["metadata"] = {**patch["metadata"], "resourceVersion": version}
        is_status = isinstance(write, PatchNodeStatus)
        answer = await self._kube.patch(
            NODES, name, patch, subresource="status" if is_status else "", strategic=is_status
        )
        return str(self._observe(Kind.NODE, answer)["metadata"]["resourceVersion"])

    def _observe(self, kind: Kind, answer: Json | None) -> Json:
        if answer is None:
            raise ConflictError(f"the {kind} is gone")
        if self._handler is not None:
            self._handler.observed(kind, answer)
        return answer
