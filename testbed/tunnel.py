"""The API server's way to the kubelets of virtual machines, whose addresses end at QEMU.

A guest in QEMU's user network has 10.0.2.15, which this machine cannot dial; QEMU listens on
loopback ports for it instead. The API server asks an HTTP CONNECT proxy for all that lies on the
cluster's side (KEP-1281, network proxy): `kubectl logs` and `exec` get there, and the Node object
says what a real one's would. Every other address is dialled as it is.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from contextlib import suppress
from pathlib import Path

GUEST_ADDRESS = "10.0.2.15"
"""The first address that QEMU's user network hands out: every guest's own."""
_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 10.0
_HEAD_BYTES = 8192
_CHUNK_BYTES = 1 << 16


def parse_connect(head: str) -> tuple[str, int] | None:
    """Host and port that a CONNECT request asks for (RFC 9110, 9.3.6); None for anything else."""
    words = head.partition("\r\n")[0].split(" ")
    if len(words) != 3 or words[0] != "CONNECT":
        return None
    host, _, port = words[1].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def translate(host: str, port: int) -> tuple[str, int]:
    """Where to dial: a guest's kubelet has the port that QEMU forwards to it on loopback."""
    return (_LOOPBACK if host == GUEST_ADDRESS else host), port


class Tunnel:
    """Listens on a unix socket; a thread for each direction of each connection."""

    def __init__(self, path: Path) -> None:
        self._server = _Server(str(path), _Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="tunnel",
            daemon=True,
        )
        self._thread.start()

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Take no more connections; those that are there end with their ends."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    # A connection lives as long as somebody follows a log.
    block_on_close = False
    request_queue_size = 128


class _Handler(socketserver.BaseRequestHandler):
    request: socket.socket

    def handle(self) -> None:
        target = parse_connect(self._head())
        if target is None:
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            return
        try:
            far = socket.create_connection(translate(*target), timeout=_CONNECT_SECONDS)
        except OSError:
            self.request.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            return
        with far:
            far.settimeout(None)
            self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=_pump, args=(far, self.request), daemon=True)
            back.start()
            _pump(self.request, far)
            back.join()

    def _head(self) -> str:
        # The client says nothing more before it has an answer: no byte of TLS is read here.
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
            chunk = self.request.recv(_HEAD_BYTES)
            if not chunk:
                break
            head += chunk
        return head.decode("latin-1")


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Pass on what comes, and its end."""
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            sink.sendall(chunk)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
