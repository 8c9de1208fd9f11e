"""The resources that the operator reads and writes, as paths of the API."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from hostprep.api.names import API_VERSION, NODE_KIND, NODE_PLURAL, POOL_KIND, POOL_PLURAL

__all__ = ["EVENTS", "HOST_MEMORY_NODES", "NODES", "POOLS", "Resource", "leases", "pods"]


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
