"""Segments of a Mooncake store by its service's REST interface; the standard library alone.

Paths and fields: mooncake/mooncake_store_service.py, 0.3.13.post1. A segment's file is named by
what it is called in /dev/shm: a link there leads to the region. The interface knows no
authentication and listens everywhere: keep it inside the pod.
"""

from __future__ import annotations

from hostprep.engines.json_interface import JsonInterface
from hostprep.errors import BadInputError


class Service:
    """One running store service, on this machine."""

    def __init__(self, port: str) -> None:
        """Take the number of a port. Raises BadInputError for anything else."""
        if not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise BadInputError(
                f"{port!r} is no port of a Mooncake store's service",
                reason="BadPort",
                remedy="give the number of its --port",
            )
        self._interface = JsonInterface(
            "127.0.0.1",
            int(port),
            server="Mooncake store",
            place=f"on port {port}",
            options="--port",
            refused="StoreRefused",
            remedy="look at its log, and at its master's",
            may_answer_text=True,
        )

    def check(self) -> None:
        """Raise NotReadyError unless it answers."""
        self._interface.ask("/")

    def add(self, name: str, size_bytes: int) -> None:
        """Have it offer /dev/shm/`name` to the pool.

        Raises NotReadyError where no store answers, FailedError where it refuses.
        """
        self._interface.expect("/api/mount_shm", {"name": name, "size": size_bytes})
