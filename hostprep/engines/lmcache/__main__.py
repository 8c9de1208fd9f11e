"""`python3 -m hostprep.engines.lmcache URL [--wait SECONDS]`: wait for a server, print its files.

For an init container or a script before vLLM's start. Exits 0 once it is healthy, else 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hostprep.engines.helper_process import report
from hostprep.engines.lmcache.server import Arena, Server
from hostprep.errors import FailedError, HostprepError
from hostprep.units import format_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as above. Returns the exit code: 0 healthy, 1 not, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="hostprep.engines.lmcache",
        description="Wait for an LMCache server to be healthy, and print the files of its L1.",
    )
    parser.add_argument("server", metavar="URL", help="such as http://127.0.0.1:8080")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    try:
        server = Server(options.server)
        server.wait(options.wait)
        lines = [f"{server.url} is healthy"]
        try:
            lines += map(_line, server.arenas())
        except FailedError:
            lines = [f"{server.url} is healthy, its L1 is not in files"]
    except HostprepError as error:
        report(str(error))
        return error.exit_code
    print(*lines, sep="\n")
    return 0


def _line(arena: Arena) -> str:
    used, size = format_bytes(arena.used_bytes), format_bytes(arena.size_bytes)
    kind = f"{arena.state}, first" if arena.is_primary else arena.state
    return f"{arena.path}: {kind}, {used} of {size} used"


if __name__ == "__main__":
    sys.exit(main())
