"""A client for the HTTP interface of LMCache's server; the standard library alone.

Paths and fields: lmcache/v1/multiprocess/http_apis/l1_reconfigure_api.py and info_api.py, 0.5.6.
The interface knows no authentication: it is to listen on 127.0.0.1, its default.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hostprep.engines.json_interface import OK, JsonInterface, reason_in
from hostprep.errors import BadInputError, NotReadyError

_PAUSE_S = 0.2


@dataclass(frozen=True)
class Arena:
    """A file that the server has mapped as part of its L1."""

    path: str
    size_bytes: int
    used_bytes: int
    state: str
    """`active`, or `draining`: it takes nothing new, and goes when the last object has."""
    is_primary: bool
    """The first one of a server started with it: cannot be drained."""


class Server:
    """One running server, by the URL of its HTTP interface."""

    def __init__(self, url: str) -> None:
        """Take an http:// URL. Raises BadInputError for anything else."""
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host, port = None, 80
        if parts.scheme != "http" or not host:
            raise BadInputError(
                f"{url!r} is no URL of an LMCache server's HTTP interface",
                reason="BadServer",
                remedy="write it like http://127.0.0.1:8080 (--http-host and --http-port)",
            )
        self.url = url
        self._interface = JsonInterface(
            host,
            port,
            server="LMCache server",
            place=f"at {url}",
            options="--http-host and --http-port",
            refused="ServerRefused",
            remedy="it must have been started with its L1 in a file, as `hostprep exec "
            "--engine lmcache` does",
        )

    def check(self) -> None:
        """Raise NotReadyError unless the server answers and its cache works."""
        status, document = self._interface.ask("/healthcheck")
        if status != OK:
            raise NotReadyError(
                f"the LMCache server at {self.url} is not healthy: {reason_in(document)}",
                reason="ServerNotReady",
                remedy="look at its log",
            )

    def wait(self, timeout_s: float) -> None:
        """Return once it is healthy; raises the last NotReadyError after `timeout_s` seconds.

        For vLLM's start: over a server that is not there, vLLM's own waits for minutes.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self.check()
            except NotReadyError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_PAUSE_S)
            else:
                return

    def arenas(self) -> tuple[Arena, ...]:
        """Return the files it has mapped, in its order.

        Raises NotReadyError where no server answers, FailedError where its L1 is of another kind.
        """
        document = self._interface.expect("/reconfigure/dax/l1/status")
        return tuple(_arena(row) for row in document["arenas"])

    def arena(self, path: str) -> Arena | None:
        """Return the arena of that path, None when it has none. Raises as `arenas` does."""
        return next((arena for arena in self.arenas() if arena.path == path), None)

    def add(self, path: str, size_bytes: int) -> Arena:
        """Have it map a file, which is part of its L1 from then on. Raises as `arenas` does."""
        body = {"device_path": path, "size": size_bytes}
        return _arena(self._interface.expect("/reconfigure/dax/l1/add", body)["added"])

    def drain(self, path: str) -> bool:
        """Have it put nothing new there. True when it has unmapped it already.

        Otherwise it does so once the last object in it was evicted or cleared. Raises as `arenas`
        does; FailedError for its first arena, and for one that it does not have.
        """
        document = self._interface.expect("/reconfigure/dax/l1/remove", {"device_path": path})
        return all(_arena(row).state == "removed" for row in document["removed"]["arenas"])


def _arena(row: dict[str, Any]) -> Arena:
    return Arena(
        path=row["device_path"],
        size_bytes=row["size_in_bytes"],
        used_bytes=row["used_bytes"],
        state=row["state"],
        is_primary=row["is_primary"],
    )
