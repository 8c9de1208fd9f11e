"""Beside a server that starts: adds the further regions of its lease as soon as it answers.

`python3 -m hostprep.engines.lmcache.add_l1 URL [PATH SIZE_BYTES]...`, started by
`hostprep exec --engine lmcache --count N`. The server holds the leases, not this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hostprep.engines.helper_process import hand_over
from hostprep.engines.lmcache.server import Server

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run as above. Returns the exit code."""
    return hand_over(
        _reach,
        arguments,
        into="the server's L1",
        without="the server goes on without further regions",
    )


def _reach(url: str) -> tuple[Callable[[], None], Callable[[str, int], object]]:
    server = Server(url)
    return server.check, server.add


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
