"""Lend a running server more memory, for as long as this process lives.

`python3 -m hostprep.engines.lmcache.lend kv --server http://127.0.0.1:8080`: claims a
region, adds it to the server's L1, and holds the lease. SIGTERM or Ctrl-C asks for it back: the
server drains it, and this process ends when that is done.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence

from hostprep.client.claim import claim
from hostprep.client.lease import Lease, Request
from hostprep.engines.helper_process import report
from hostprep.engines.lmcache.server import Server
from hostprep.engines.main import pool_named
from hostprep.errors import FailedError, HostprepError, NotReadyError
from hostprep.paths import PoolPaths
from hostprep.units import format_bytes, parse_quantity

_CHECK_INTERVAL_S = 1.0
_GONE_AFTER = 5
"""Checks without an answer after which the server counts as gone."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as above. Returns the exit code: 0 given back, 1 failed, 2 bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.pool is None and options.pool_option is None:
        parser.error("no pool is named")
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: asked.append(got))
    try:
        server = Server(options.server)
        server.check()
        size_bytes = parse_quantity(options.size) if options.size else 1
        request = Request(size_bytes=size_bytes, names=tuple(options.region))
        paths = PoolPaths.of(pool_named(options.pool, options.pool_option) or "", options.root)
        (lease,) = claim(paths, request, wait_timeout_s=options.wait)
        lend(server, lease, is_asked_back=lambda: bool(asked))
    except HostprepError as error:
        report(str(error))
        return error.exit_code
    return 0


def lend(server: Server, lease: Lease, *, is_asked_back: Callable[[], bool]) -> None:
    """Add a region to the server's L1; return once it was asked back and the server unmapped it.

    Raises FailedError when the server unmaps it by itself or ends: the lease is of no use then;
    NotReadyError or FailedError as `Server` does.
    """
    path = lease.path
    server.add(path, lease.region.size_bytes)
    report(f"{path}, {format_bytes(lease.region.size_bytes)}, is part of the server's L1")
    while not is_asked_back():
        if not _is_lent(server, path):
            raise FailedError(
                f"the server at {server.url} has {path} no longer",
                reason="ServerGone",
                remedy="start this again beside the new one",
            )
        time.sleep(_CHECK_INTERVAL_S)
    if _is_lent(server, path) and not server.drain(path):
        report(f"{path} drains: the server lets go of it with the last object that it caches there")
        while _is_lent(server, path):
            time.sleep(_CHECK_INTERVAL_S)
    report(f"{path} is given back")


def _is_lent(server: Server, path: str) -> bool:
    """Tell whether the server has it mapped; one that does not answer for a while has not."""
    for _ in range(_GONE_AFTER):
        try:
            return server.arena(path) is not None
        except NotReadyError:
            time.sleep(_CHECK_INTERVAL_S)
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostprep.engines.lmcache.lend",
        description="Claim a region, add it to a running LMCache server, and hold it. "
        "SIGTERM has the server drain it.",
    )
    parser.add_argument("--server", required=True, metavar="URL", help="its HTTP interface")
    parser.add_argument("pool", nargs="?", metavar="POOL")
    parser.add_argument("--pool", "--name", dest="pool_option", metavar="POOL")
    parser.add_argument("--root", default=None, help="parent folder of all pools (HOSTPREP_ROOT)")
    parser.add_argument("--size", help="the least that the region must have, such as 64Gi")
    parser.add_argument("--region", action="append", default=[], help="take this very region")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
