"""The API server's way to a guest's kubelet."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from testbed.servers import api_server_flags, egress_configuration, kubernetes_endpoints
from testbed.tunnel import GUEST_ADDRESS, Tunnel, parse_connect, translate

pytestmark = pytest.mark.unit


@contextmanager
def _echo() -> Iterator[int]:
    """A server that says everything twice; yields its port on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data * 2)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(timeout=10)


def _ask(path: Path, request: bytes) -> tuple[socket.socket, bytes]:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(str(path))
    client.sendall(request)
    head = b""
    while b"\r\n\r\n" not in head:
        chunk = client.recv(1)
        assert chunk, head
        head += chunk
    return client, head


@pytest.fixture
def path(memory_folder: Path) -> Iterator[Path]:
    """The socket of a tunnel that is open."""
    tunnel = Tunnel(memory_folder / "sock")
    yield memory_folder / "sock"
    tunnel.close()


def test_what_the_api_server_says_to_a_guests_kubelet_arrives_and_comes_back(path: Path) -> None:
    with _echo() as port:
        client, head = _ask(path, f"CONNECT {GUEST_ADDRESS}:{port} HTTP/1.1\r\n\r\n".encode())
        assert head.startswith(b"HTTP/1.1 200 ")
        with client:
            client.sendall(b"x" * 100_000)
            # Its end is passed on too, and what was on its way back still comes.
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while data := client.recv(1 << 16):
                answer += data
    assert answer == b"x" * 200_000


def test_where_nobody_listens_is_said_at_once(path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        client, head = _ask(path, f"CONNECT {GUEST_ADDRESS}:{port} HTTP/1.1\r\n\r\n".encode())
        client.close()
    assert head.startswith(b"HTTP/1.1 502 ")


@pytest.mark.parametrize("request_", [b"GET / HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"x" * 9000])
def test_what_asks_for_no_connection_is_refused(path: Path, request_: bytes) -> None:
    client, head = _ask(path, request_)
    client.close()
    assert head.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("head", "target"),
    [
        ("CONNECT 10.0.2.15:10250 HTTP/1.1\r\nHost: a\r\n\r\n", ("10.0.2.15", 10250)),
        ("CONNECT [::1]:80 HTTP/1.1\r\n\r\n", ("::1", 80)),
        ("CONNECT a:0 HTTP/1.1\r\n\r\n", None),
        ("CONNECT a:65536 HTTP/1.1\r\n\r\n", None),
        ("CONNECT a HTTP/1.1\r\n\r\n", None),
        ("CONNECT :80 HTTP/1.1\r\n\r\n", None),
    ],
)
def test_connect_requests_are_read(head: str, target: tuple[str, int] | None) -> None:
    assert parse_connect(head) == target


@for_all(st.text(max_size=40))
def test_no_request_breaks_it(text: str) -> None:
    found = parse_connect(f"CONNECT {text} HTTP/1.1\r\n\r\n")
    assert found is None or 0 < found[1] < 65536


def test_only_a_guests_address_means_loopback() -> None:
    assert translate(GUEST_ADDRESS, 10250) == ("127.0.0.1", 10250)
    assert translate("10.0.2.16", 10250) == ("10.0.2.16", 10250)


def test_the_api_server_is_told_to_use_it(tmp_path: Path) -> None:
    flags = api_server_flags(tmp_path, address="127.0.0.1", port=6443)
    assert f"--egress-selector-config-file={tmp_path}/egress.json" in flags
    selections = json.loads(egress_configuration(tmp_path / "s"))["egressSelections"]
    assert [s["name"] for s in selections] == ["cluster"]
    assert selections[0]["connection"]["transport"]["uds"]["udsName"] == f"{tmp_path}/s"


def test_pods_find_the_api_server_where_the_guest_does() -> None:
    found = kubernetes_endpoints("10.0.2.2", 6443)
    assert found["endpoints"][0]["addresses"] == ["10.0.2.2"]
    assert found["ports"] == [{"name": "https", "port": 6443, "protocol": "TCP"}]
    assert found["metadata"]["labels"] == {"kubernetes.io/service-name": "kubernetes"}
