"""LMCache's server over leased regions: its L1 is the first one, others are added as it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hostprep.backing import GIB
from hostprep.engines.catalogue import way_of
from hostprep.engines.helper_process import beside
from hostprep.engines.installed import installed_version, untried
from hostprep.engines.launching import Launch, Options, Wanted
from hostprep.engines.lmcache.command_line import ServerCommand, read_command
from hostprep.engines.lmcache.server import Server
from hostprep.engines.lmcache.sizes import bytes_of_gib, check_one_call
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.lease import Lease

__all__ = ["arranged", "wanted"]

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


def wanted(command: tuple[str, ...], environ: Mapping[str, str], options: Options) -> Wanted:
    """Return what the server needs of the pool. Raises BadInputError where its options forbid it.

    `--l1-size-gb` (GiB, whatever its name) is the least that the region must have; without it the
    server gets all of each region.
    """
    del environ
    server = read_command(command)
    _check(server)
    count = len(options.regions) or options.count or 1
    if count > 1:
        Server(server.url)  # refuses an address at which nobody could be told of the others
    given = server.last(_SIZE)
    if given is None:
        return Wanted(count=count)
    size_bytes = bytes_of_gib(given, _SIZE)
    _check_one_call(size_bytes)
    if count > 1:
        raise BadInputError(
            f"--l1-size-gb is {given}, and {count} regions are to be L1 together",
            reason="BadCommand",
            remedy="leave --l1-size-gb out: the server gets all of each region",
        )
    return Wanted(count=1, size_bytes=size_bytes, because=f"--l1-size-gb is {given}")


def arranged(
    command: tuple[str, ...], environ: Mapping[str, str], leases: Sequence[Lease]
) -> Launch:
    """Return the server's command over these leases. Raises BadInputError for too large a region.

    LMCache registers each with CUDA by one call.
    """
    server = read_command(command)
    first = leases[0]
    given = server.last(_SIZE)
    sizes = [lease.region.size_bytes for lease in leases]
    _check_one_call(bytes_of_gib(given, _SIZE) if given is not None else max(sizes))
    words = list(server.words)
    if given is None:
        # A float of GiB, which holds every multiple of a page exactly.
        words += [_SIZE, repr(first.region.size_bytes / GIB)]
    words += ["--l1-devdax-path", first.path, "--no-l1-use-lazy", "--shm-name", ""]
    version = installed_version(words[0], ("lmcache",), environ)
    notes = list(untried("LMCache", version, way_of("lmcache").versions))
    if server.last("--eviction-policy") is None:
        words += ["--eviction-policy", "LRU"]
        notes.append("no --eviction-policy was given: LRU")
    if len(leases) > 1:
        words = list(_with_others(words, server.url, leases[1:]))
    return Launch(tuple(words), {}, (), tuple(notes))


def _check(server: ServerCommand) -> None:
    for option, why in _ELSEWHERE.items():
        if server.last(option) is not None:
            raise BadInputError(
                f"{option} {why}", reason="BadCommand", remedy=f"leave {option} out"
            )
    if server.last("--shm-name"):
        raise BadInputError(
            "--shm-name has L1 in a shared memory segment of the server's own",
            reason="BadCommand",
            remedy="leave --shm-name out",
        )


def _check_one_call(size_bytes: int) -> None:
    check_one_call(
        size_bytes,
        owner="L1 in one region",
        remedy="have more and smaller regions in the pool, and claim several (--count)",
    )


def _with_others(words: Sequence[str], url: str, others: Sequence[Lease]) -> tuple[str, ...]:
    """Return a command that becomes the server, beside a process that adds the other regions.

    Several tagged L1s (--l1-manager) would each cache for themselves, and none could grow.
    """
    adding = [url]
    for lease in others:
        adding += [lease.path, str(lease.region.size_bytes)]
    return beside("hostprep.engines.lmcache.add_l1", adding, words)
