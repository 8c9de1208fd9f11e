"""Beside a server that starts: adds the further regions of its lease as soon as it answers.

`python3 -m hostprep.engines.lmcache.adding URL [PATH SIZE_BYTES]...`, started by
`hostprep exec --engine lmcache --count N`. The server holds the leases, not this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hostprep.engines.beside import let_go_of_leases, say, until_it_answers
from hostprep.engines.lmcache.server import Server
from hostprep.errors import HostprepError
from hostprep.units import format_bytes

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run as above. Returns the exit code."""
    parent = os.getppid()
    let_go_of_leases()
    url, *rest = arguments
    try:
        server = Server(url)
        until_it_answers(server.check, parent)
        for path, size in zip(rest[::2], rest[1::2]):
            server.add(path, int(size))
            say(f"added {path}, {format_bytes(int(size))}, to the server's L1")
    except HostprepError as error:
        say(f"{error}; the server goes on without further regions")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
