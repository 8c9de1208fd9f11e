"""The command line of `lmcache server`: which of its options bear on its memory.

Names and defaults: lmcache/v1/distributed/config.py and lmcache/v1/multiprocess/config.py, 0.5.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostprep.engines.options import read_options
from hostprep.errors import BadInputError

__all__ = ["ServerCommand", "read_command"]

_OPTIONS = (
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
    "--l1-use-hugepages",
    "--l1-use-lazy",
    "--l1-write-ttl-seconds",
    "--no-l1-use-hugepages",
    "--no-l1-use-lazy",
    "--p2p-advertise-url",
    "--p2p-listen-url",
    "--shm-name",
)
"""Those that matter, and those whose beginning is another's: argparse takes unique beginnings."""
_FLAGS = (
    "--l1-use-hugepages",
    "--l1-use-lazy",
    "--no-l1-use-hugepages",
    "--no-l1-use-lazy",
)
_SHORTEST = len("--l1-")


@dataclass(frozen=True)
class ServerCommand:
    """A command that starts LMCache's server, read."""

    words: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    """Long names and what was given, in order; the empty string for a flag."""

    def last(self, name: str) -> str | None:
        """Return what an option was given last, which is what counts; None where it was not."""
        found = [given for option, given in self.options if option == name]
        return found[-1] if found else None

    @property
    def url(self) -> str:
        """Where the HTTP interface will answer, seen from this machine."""
        host = self.last("--http-host") or "127.0.0.1"
        if host in {"0.0.0.0", "::", "localhost"}:  # noqa: S104 - it is read, not bound
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.last('--http-port') or 8080}"


def read_command(words: Sequence[str]) -> ServerCommand:
    """Read a command such as `lmcache server --port 5555`, or one that ends so, after `numactl`.

    Raises BadInputError for what starts no server.
    """
    for index, word in enumerate(words[:-1]):
        if word.rpartition("/")[2] == "lmcache" and words[index + 1] == "server":
            options = read_options(words[index + 2 :], _long, flags=_FLAGS)
            return ServerCommand(tuple(words), tuple(options))
    raise BadInputError(
        "the command is not `lmcache server`",
        reason="BadCommand",
        remedy="give --engine lmcache the server's own command: -- lmcache server ...; vLLM with "
        "LMCache inside its processes is --engine lmcache-inprocess",
    )


def _long(name: str) -> str | None:
    """Return the option that a name or its beginning stands for; None for all others."""
    if name in _OPTIONS:
        return name
    if len(name) <= _SHORTEST or not name.startswith("--"):
        return None
    matching = [option for option in _OPTIONS if option.startswith(name)]
    return matching[0] if len(matching) == 1 else None
