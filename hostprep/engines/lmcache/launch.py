"""Launching LMCache's server: the first leased region is its L1, others are added as it runs.

Names and defaults: lmcache/v1/distributed/config.py and lmcache/v1/multiprocess/config.py, 0.5.6.
"""

from __future__ import annotations

from collections.abc import Sequence

from hostprep.backing import GIB
from hostprep.client.lease import Lease
from hostprep.engines.helper_process import start_beside
from hostprep.engines.installation import offers_plugin, python_path, release_notes
from hostprep.engines.launching import (
    CommandSyntax,
    EngineStart,
    Launch,
    Requirements,
    ServerCommand,
)
from hostprep.engines.lmcache.server import Server
from hostprep.engines.lmcache.settings import PINNING, bytes_of_gib
from hostprep.errors import BadInputError
from hostprep.known_issues import ONE_CALL_LIMIT_BYTES
from hostprep.units import format_bytes
from hostprep.zipapp import STABLE_NAME

_GROUP = "lmcache.device_plugins"
_TRANSFER = "--supported-transfer-mode"
_SERVER_COPIES = "lmcache_driven"
SYNTAX = CommandSyntax(
    starts=(("lmcache", "server"),),
    otherwise="the command is not `lmcache server`",
    remedy="give --engine lmcache the server's own command: -- lmcache server ...; vLLM with "
    "LMCache inside its processes is --engine lmcache-inprocess",
    values=(
        "--eviction-policy",
        "--eviction-ratio",
        "--eviction-trigger-watermark",
        "--gds-l1-backend",
        "--gds-l1-path",
        "--gds-l1-use-direct-io",
        "--http-host",
        "--http-port",
        "--l1-align-bytes",
        "--l1-devdax-path",
        "--l1-init-size-gb",
        "--l1-manager",
        "--l1-read-ttl-seconds",
        "--l1-size-gb",
        "--l1-write-ttl-seconds",
        "--p2p-advertise-url",
        "--p2p-listen-url",
        "--shm-name",
        _TRANSFER,
    ),
    flags=(
        "--l1-use-hugepages",
        "--l1-use-lazy",
        "--no-l1-use-hugepages",
        "--no-l1-use-lazy",
    ),
    shortest=len("--l1-"),
)
_SIZE = "--l1-size-gb"
_ELSEWHERE = {
    "--l1-manager": "puts L1 into pools of their own, to which no region can be added later",
    "--gds-l1-path": "puts L1 on a disk",
    "--l1-devdax-path": "names a file for L1, and the region is to be it",
    "--l1-use-hugepages": "has L1 allocated from the node's free huge pages",
    "--p2p-advertise-url": "wants L1 in memory of the server's own",
    "--p2p-listen-url": "wants L1 in memory of the server's own",
    "--l1-use-lazy": "has L1 allocated bit by bit, which a file cannot be",
}


def requirements(start: EngineStart) -> Requirements:
    """Return what the server needs of the pool. Raises BadInputError where its options forbid it.

    `--l1-size-gb` (GiB, whatever its name) is the least that the region must have; without it the
    server gets all of each region.
    """
    server = SYNTAX.read(start.command)
    server.refuse(_ELSEWHERE)
    if server.last("--shm-name"):
        raise BadInputError(
            "--shm-name has L1 in a shared memory segment of the server's own",
            reason="BadCommand",
            remedy="leave --shm-name out",
        )
    count = start.options.region_count
    if count > 1:
        Server(url_of(server))  # refuses an address at which no region could be added
    size_gb = server.last(_SIZE)
    if size_gb is None:
        return Requirements(count=count)
    size_bytes = bytes_of_gib(size_gb, _SIZE)
    if count > 1:
        raise BadInputError(
            f"--l1-size-gb is {size_gb}, and {count} regions are to be L1 together",
            reason="BadCommand",
            remedy="leave --l1-size-gb out: the server gets all of each region",
        )
    return Requirements(count=1, size_bytes=size_bytes, because=f"--l1-size-gb is {size_gb}")


def complete(start: EngineStart, leases: Sequence[Lease]) -> Launch:
    """Return the server's command over these leases, and the variables that enable our plugin.

    Where LMCache would not find that, it registers each region with CUDA by one call: raises
    BadInputError for a region that is too large for it.
    """
    server, environ = SYNTAX.read(start.command), start.environ
    first = leases[0].region
    size_gb = server.last(_SIZE)
    root = leases[0].paths.root
    variables = {PINNING: "1", **python_path(root, server.program, environ)}
    words = start.command
    if size_gb is None:
        # A float of GiB, which holds every multiple of a page exactly.
        words += (_SIZE, repr(first.size_bytes / GIB))
    words += ("--l1-devdax-path", leases[0].path, "--no-l1-use-lazy", "--shm-name", "")
    notes = release_notes(start.integration, server.program, environ)
    if not offers_plugin(_GROUP, server.program, environ, variables):
        largest_bytes = max(lease.region.size_bytes for lease in leases)
        _check_one_call(bytes_of_gib(size_gb, _SIZE) if size_gb is not None else largest_bytes)
        why = (
            f"LMCache would not find our plugin ({root}/{STABLE_NAME}): it registers each region "
            "by one call, without turns"
        )
        notes += (why,)
    if server.last("--eviction-policy") is None:
        words += ("--eviction-policy", "LRU")
        notes += ("no --eviction-policy was given: LRU",)
    transfer = server.last(_TRANSFER)
    if transfer not in (None, _SERVER_COPIES):
        why = (
            f"{_TRANSFER} {transfer}: workers without a GPU that copy by themselves send their "
            "blocks through the message queue, since a region has no name in /dev/shm; with "
            f"LMCACHE_MP_TRANSFER_MODE={_SERVER_COPIES} in their environment the server copies"
        )
        notes += (why,)
    if len(leases) > 1:
        # Several tagged L1s (--l1-manager) would each cache for themselves, and none could grow.
        regions = [text for each in leases[1:] for text in (each.path, str(each.region.size_bytes))]
        words = start_beside("lmcache", [url_of(server), *regions], words)
    used_bytes = None if size_gb is None else bytes_of_gib(size_gb, _SIZE)
    return Launch(words, variables, notes=notes, used_bytes=used_bytes)


def url_of(server: ServerCommand) -> str:
    """Return where the server's HTTP interface will answer, seen from this machine."""
    host = server.last("--http-host") or "127.0.0.1"
    if host in {"0.0.0.0", "::", "localhost"}:  # noqa: S104 - it is read, not bound
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{server.last('--http-port') or 8080}"


def _check_one_call(size_bytes: int) -> None:
    """Raise BadInputError for more than CUDA registers by one call."""
    if size_bytes >= ONE_CALL_LIMIT_BYTES:
        raise BadInputError(
            f"L1 in one region would have {format_bytes(size_bytes)}, registered with CUDA by one "
            f"call, which fails from {format_bytes(ONE_CALL_LIMIT_BYTES)} on",
            reason="RegionTooLarge",
            remedy="have more and smaller regions in the pool, and claim several (--count), or "
            f"publish {STABLE_NAME}: our plugin registers by chunks",
        )
