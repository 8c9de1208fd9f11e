"""Carrying out what the pure core wants written: in order, guarded by versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hostprep.kube.client import HOST_MEMORY_NODES, NODES, Json, KubeClient
from hostprep.kube.errors import ConflictError
from hostprep_operator.keys import Kind
from hostprep_operator.reconcile.changes import (
    CreateHostMemoryNode,
    DeleteHostMemoryNode,
    PatchHostMemoryNodeSpec,
    PatchNode,
    PatchNodeStatus,
    Write,
)

__all__ = ["Writer"]

Seen = Callable[[Kind, Mapping[str, Any]], object]
Vanished = Callable[..., object]


def _always(_write: Write) -> bool:
    return True


class Writer:
    """Writes to one node's objects; the answers go into the cache at once."""

    def __init__(self, kube: KubeClient, *, seen: Seen, vanished: Vanished) -> None:
        self._kube = kube
        self._seen = seen
        self._vanished = vanished

    async def carry_out(
        self, name: str, writes: Iterable[Write], *, go_on: Callable[[Write], bool] = _always
    ) -> None:
        """Write all of it, or stop at the first that fails, or when `go_on` says no after one.

        Raises ConflictError when something is not as it was when this was computed, gone
        included; and ApiError.
        """
        node_version = ""
        for write in writes:
            match write:
                case PatchNode() | PatchNodeStatus():
                    node_version = await self._patch_node(name, write, node_version)
                case CreateHostMemoryNode():
                    self._take(
                        Kind.HOST_MEMORY_NODE,
                        await self._kube.create(HOST_MEMORY_NODES, write.body),
                    )
                case PatchHostMemoryNodeSpec():
                    self._take(
                        Kind.HOST_MEMORY_NODE,
                        await self._kube.patch(HOST_MEMORY_NODES, name, _guarded(write)),
                    )
                case DeleteHostMemoryNode():
                    await self._delete(name, write)
            if not go_on(write):
                return

    async def _patch_node(self, name: str, write: PatchNode | PatchNodeStatus, version: str) -> str:
        """Patch, guarded by the version that the write before left; returns the new one."""
        patch = dict(write.patch)
        if version:
            patch["metadata"] = {**patch.get("metadata", {}), "resourceVersion": version}
        is_status = isinstance(write, PatchNodeStatus)
        answer = await self._kube.patch(
            NODES, name, patch, subresource="status" if is_status else "", strategic=is_status
        )
        return str(self._take(Kind.NODE, answer)["metadata"]["resourceVersion"])

    async def _delete(self, name: str, write: DeleteHostMemoryNode) -> None:
        await self._kube.delete(
            HOST_MEMORY_NODES, name, uid=write.uid, resource_version=write.resource_version
        )
        self._vanished(
            Kind.HOST_MEMORY_NODE,
            name,
            uid=write.uid,
            resource_version=write.resource_version,
        )

    def _take(self, kind: Kind, answer: Json | None) -> Json:
        if answer is None:
            raise ConflictError(f"the {kind} is gone")
        self._seen(kind, answer)
        return answer


def _guarded(write: PatchHostMemoryNodeSpec) -> Json:
    patch = dict(write.patch)
    metadata = {"resourceVersion": write.resource_version}
    return patch | {"metadata": {**metadata, **patch.get("metadata", {})}}
