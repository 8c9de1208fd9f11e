"""Service-account tokens as kubelet asks for them: bound to a Node or to a Pod."""

from __future__ import annotations

from testbed.api import Api

__all__ = ["service_account_token"]

_LIFE_SECONDS = 24 * 3600


def service_account_token(
    api: Api,
    namespace: str,
    service_account: str,
    *,
    node: str | None = None,
    pod: str | None = None,
) -> str:
    """Ask the API server for a token of a ServiceAccount, for a day.

    With `node` it carries that node's name and UID as claims (Kubernetes >= 1.32; this is what
    `kubectl create token --bound-object-kind Node` does). With `pod`, a Pod of the namespace,
    it carries the pod's claims and those of the node it is bound to, as in a container.
    Raises ApiError when one of them does not exist.
    """
    spec: dict[str, object] = {"expirationSeconds": _LIFE_SECONDS}
    if node is not None:
        spec["boundObjectRef"] = _reference(api, "Node", node, f"/api/v1/nodes/{node}")
    if pod is not None:
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        spec["boundObjectRef"] = _reference(api, "Pod", pod, path)
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    token: str = api.create(path, request)["status"]["token"]
    return token


def _reference(api: Api, kind: str, name: str, path: str) -> dict[str, str]:
    uid = api.get(path)["metadata"]["uid"]
    return {"apiVersion": "v1", "kind": kind, "name": name, "uid": uid}
