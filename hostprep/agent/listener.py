"""The agent's port: bound before anything is changed, answered once there is time for it.

Whoever asks in between waits in the kernel's queue, as listen(2) has it, and is not refused.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass

from hostprep.errors import BadInputError

__all__ = ["Listener", "parse_listen"]


def parse_listen(text: str) -> tuple[str | None, int]:
    """Return host (None: every address) and port of `:9808`, `127.0.0.1:9808`, `[::1]:9808`.

    Raises BadInputError.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise BadInputError(
            f"--listen {text[:60]!r} is no address", remedy="write it like :9808 or 127.0.0.1:9808"
        )
    return host.strip("[]") or None, int(port)


@dataclass(frozen=True, slots=True)
class Listener:
    """Sockets that listen."""

    sockets: tuple[socket.socket, ...]

    @classmethod
    def open(cls, text: str) -> Listener:
        """Listen on that address. Raises BadInputError where it cannot be had."""
        host, port = parse_listen(text)
        try:
            return cls(_listen(host, port))
        except (OSError, UnicodeError) as error:  # the latter: a host that is no name
            raise BadInputError(
                f"cannot listen on {text}: {getattr(error, 'strerror', None) or error}",
                reason="CannotListen",
                remedy="give another --listen, such as 127.0.0.1:0",
            ) from error

    @property
    def port(self) -> int:
        """The port of the first address."""
        return int(self.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Let go of the port."""
        for one in self.sockets:
            one.close()


def _listen(host: str | None, port: int) -> tuple[socket.socket, ...]:
    """Listen on every address that the host stands for; None: on all."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        opened: list[socket.socket] = []
        for family, address in dict.fromkeys((info[0], info[4]) for info in found):
            try:
                opened.append(stack.enter_context(socket.create_server(address, family=family)))
            except OSError as error:
                # A kernel without IPv6 has the addresses, and no sockets for them.
                if error.errno != errno.EAFNOSUPPORT or len(found) == 1:
                    raise
        stack.pop_all()
    return tuple(opened)
