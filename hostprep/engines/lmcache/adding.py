"""Beside a server that starts: adds the further regions of its lease as soon as it answers.

`python3 -m hostprep.engines.lmcache.adding URL [PATH SIZE_BYTES]...`, started by
`hostprep exec --engine lmcache --count N`. The server holds the leases, not this process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hostprep.engines.beside import hand_over
from hostprep.engines.lmcache.server import Server

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run as above. Returns the exit code."""
    url, *regions = arguments
    server = Server(url)
    return hand_over(
        server.check,
        server.add,
        regions,
        into="the server's L1",
        without="the server goes on without further regions",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
