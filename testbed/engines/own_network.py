"""A network of its own for a command: servers that listen everywhere are heard by nobody else.

`python own_network.py COMMAND...`, as root; loopback is all that there is.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence

_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def in_own_network(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` so."""
    return ["unshare", "--net", "--", sys.executable, __file__, *command]


def _raise_loopback() -> None:
    request = struct.pack("16sh14x", b"lo", _IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


if __name__ == "__main__":
    _raise_loopback()
    os.execvp(sys.argv[1], sys.argv[1:])
