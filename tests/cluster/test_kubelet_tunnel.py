"""The API server reaches a kubelet whose address only QEMU knows, and pods would find the API."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from testbed.api import Api
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object
from testbed.tunnel import GUEST_ADDRESS

pytestmark = pytest.mark.cluster
JsonObject = dict[str, Any]
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"


class _Kubelet(BaseHTTPRequestHandler):
    """Says who asks for what, as the contents of every log."""

    connection: ssl.SSLSocket

    def do_GET(self) -> None:
        certificate = self.connection.getpeercert() or {}
        body = f"{certificate.get('subject')} asks for {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: pytest's output is not for this."""


@pytest.fixture
def kubelet_port(control_plane: ControlPlane, tmp_path: Path) -> Iterator[int]:
    """A server with a kubelet's certificate, which asks for one too; yields its port."""
    keys = control_plane.credentials.server_keys("kubelet", addresses=[GUEST_ADDRESS])
    for name, content in (("crt", keys.public), ("key", keys.private)):
        (tmp_path / name).write_bytes(content)
    context = ssl.create_default_context(
        ssl.Purpose.CLIENT_AUTH, cadata=control_plane.credentials.ca.decode()
    )
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Kubelet)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def test_logs_of_a_pod_in_a_virtual_machine_are_read_through_the_tunnel(
    control_plane: ControlPlane,
    api: Api,
    namespace: str,
    kubectl: Callable[..., str],
    kubelet_port: int,
) -> None:
    node = node_object("guest-node")
    node["status"]["addresses"] = [{"type": "InternalIP", "address": GUEST_ADDRESS}]
    node["status"]["daemonEndpoints"] = {"kubeletEndpoint": {"Port": kubelet_port}}
    create_node(api, node)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    spec = {"nodeName": "guest-node", "containers": [{"name": "engine", "image": "none"}]}
    api.create(pods, {"metadata": {"name": "p"}, "spec": spec})
    try:
        said = kubectl("logs", "p", "--namespace", namespace)
    finally:
        api.delete(f"{pods}/p")
        api.delete("/api/v1/nodes/guest-node")
    assert f"asks for /containerLogs/{namespace}/p/engine" in said
    assert "system:masters" in said  # the API server's own certificate, which a kubelet checks


def test_the_service_kubernetes_leads_pods_of_a_guest_to_the_api_server(
    full_control_plane: ControlPlane,
) -> None:
    # Also where controllers run, which leave a slice alone that is not theirs.
    api = full_control_plane.api
    port = int(full_control_plane.guest_url.rpartition(":")[2])
    slices: list[JsonObject] = api.get(_SLICES)["items"]
    ports = [(s["endpoints"][0]["addresses"], s["ports"][0]["port"]) for s in slices]
    assert ports == [(["10.0.2.2"], port)]
    service = api.get("/api/v1/namespaces/default/services/kubernetes")["spec"]
    assert service["ports"][0]["name"] == slices[0]["ports"][0]["name"]
