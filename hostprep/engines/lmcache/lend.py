"""Lending a running server more memory, for as long as this process lives.

`python3 -m hostprep.engines.lmcache.lend --pool kv --server http://127.0.0.1:8080`: claims a
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
from hostprep.client.lease import Lease
from hostprep.client.request import Request
from hostprep.engines.helper_process import say
from hostprep.engines.lmcache.server import Server
from hostprep.errors import FailedError, HostprepError, NotReadyError
from hostprep.paths import PoolPaths, canonical_root, check_pool_name, default_root
from hostprep.units import format_bytes, parse_quantity

__all__ = ["Loan", "lend", "main"]

_LOOK_EVERY_S = 1.0
_GONE_AFTER = 5
"""Looks without an answer after which the server counts as gone."""


class Loan:
    """A leased region that a server has mapped. The lease is this process's."""

    def __init__(self, server: Server, lease: Lease) -> None:
        """Add the region to the server. Raises NotReadyError or FailedError as `Server` does."""
        self._server = server
        self._lease = lease
        server.add(lease.path, lease.region.size_bytes)

    @property
    def path(self) -> str:
        """The region's file, by which the server knows it."""
        return self._lease.path

    def is_lent(self) -> bool:
        """Tell whether the server has it mapped. Raises NotReadyError where nobody answers."""
        return self._server.arena(self.path) is not None

    def ask_back(self) -> bool:
        """Have the server drain it. True when it has let go of it already."""
        return self._server.drain(self.path)


def lend(
    server: Server, lease: Lease, *, is_asked_back: Callable[[], bool], tell: Callable[[str], None]
) -> None:
    """Lend a region until it is asked back and the server has let go of it.

    Raises FailedError when the server unmaps it by itself or ends: the lease is no use then.
    """
    loan = Loan(server, lease)
    tell(f"{loan.path}, {format_bytes(lease.region.size_bytes)}, is part of the server's L1")
    while not is_asked_back():
        if not _look(loan):
            raise FailedError(
                f"the server at {server.url} has {loan.path} no longer",
                reason="ServerGone",
                remedy="start this again beside the new one",
            )
        time.sleep(_LOOK_EVERY_S)
    if not _look(loan) or loan.ask_back():
        tell(f"{loan.path} is given back")
        return
    tell(f"{loan.path} drains: the server lets go of it with the last object that it caches there")
    while _look(loan):
        time.sleep(_LOOK_EVERY_S)
    tell(f"{loan.path} is given back")


def _look(loan: Loan) -> bool:
    """Tell whether the server has it; a server that does not answer for a while has not."""
    for _ in range(_GONE_AFTER):
        try:
            return loan.is_lent()
        except NotReadyError:
            time.sleep(_LOOK_EVERY_S)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as above. Returns the exit code: 0 given back, 1 failed, 2 bad input."""
    options = _parser().parse_args(arguments)
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: asked.append(got))
    try:
        server = Server(options.server)
        server.check()
        root = canonical_root(options.root or default_root())
        size_bytes = parse_quantity(options.size) if options.size else 1
        request = Request(size_bytes=size_bytes, names=tuple(options.region))
        paths = PoolPaths(root, check_pool_name(options.pool))
        (lease,) = claim(paths, request, wait_timeout_s=options.wait)
        lend(server, lease, is_asked_back=lambda: bool(asked), tell=say)
    except HostprepError as error:
        say(str(error))
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostprep.engines.lmcache.lend",
        description="Claim a region, add it to a running LMCache server, and hold it. "
        "SIGTERM has the server drain it.",
    )
    parser.add_argument("--server", required=True, metavar="URL", help="its HTTP interface")
    parser.add_argument("--pool", required=True)
    parser.add_argument("--root", default=None, help="parent folder of all pools (HOSTPREP_ROOT)")
    parser.add_argument("--size", help="the least that the region must have, such as 64Gi")
    parser.add_argument("--region", action="append", default=[], help="take this very region")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
