"""Segments of a Mooncake store in prepared regions: from Python, and by its store service.

The store opens the region's file itself and maps it; it never reads what is in there
(mooncake-store/src/real_client.cpp, mountSegment): zeros are the claim's doing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from hostprep.client.attach import Attachment
from hostprep.engines.json_interface import JsonInterface
from hostprep.errors import BadInputError, FailedError


class Store(Protocol):
    """What we call of mooncake.store.MooncakeDistributedStore (0.3.13.post1)."""

    def mount_segment(
        self, path: str, size: int, offset: int, protocol: str, location: str
    ) -> dict[str, Any]:
        """Map a part of a file, and offer it to the pool."""

    def unmount_segment(self, segment_ids: list[str]) -> int:
        """Take it away again: 0 when that is done."""


class Segment:
    """A region in the pool of a store. A context manager: at its end it is taken away again."""

    def __init__(self, store: Store, attachment: Attachment, segment_ids: list[str]) -> None:
        self._store = store
        self._attachment = attachment
        self.segment_ids = segment_ids

    def unmount(self) -> None:
        """Take it from the pool, with all that is stored in it, then end the attachment.

        Raises FailedError where the store keeps it; the lease is kept as well then.
        """
        if self.segment_ids:
            code = self._store.unmount_segment(self.segment_ids)
            if code != 0:
                raise FailedError(
                    f"Mooncake did not unmount {self._attachment.path}: code {code}",
                    reason="StoreRefused",
                    remedy="look at the log of its master, and try again",
                )
            self.segment_ids = []
        self._attachment.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unmount()


def mount(
    store: Store,
    attachment: Attachment,
    *,
    size_bytes: int | None = None,
    protocol: str = "tcp",
    location: str = "",
) -> Segment:
    """Offer a region to the pool of a store that is set up; the attachment is taken over.

    `size_bytes`: its beginning only. `protocol`: the store's own. `location` is Mooncake's name of
    a place, such as cpu:0; by default the region's NUMA node. Raises BadInputError for a size that
    the region does not have, FailedError where Mooncake refuses.
    """
    wanted = attachment.size_bytes if size_bytes is None else size_bytes
    if not 0 < wanted <= attachment.size_bytes:
        raise BadInputError(
            f"a segment of {wanted} bytes does not fit into {attachment.region.name}, which has "
            f"{attachment.size_bytes} bytes",
            reason="RegionTooSmall",
            remedy="ask for less, or attach to a larger region",
        )
    if not location and attachment.numa_node is not None:
        location = f"cpu:{attachment.numa_node}"
    answer = store.mount_segment(attachment.path, wanted, 0, protocol, location)
    if answer["ret"] != 0:
        raise FailedError(
            f"Mooncake did not mount {attachment.path}: code {answer['ret']}",
            reason="StoreRefused",
            remedy="look at its log; the store must have been set up, and its master answer",
        )
    return Segment(store, attachment, list(answer["segment_ids"]))


class Service:
    """One running store service on this machine, by its REST interface.

    Paths and fields: mooncake/mooncake_store_service.py, 0.3.13.post1. A segment's file is named
    by what it is called in /dev/shm: a link there leads to the region. The interface knows no
    authentication and listens everywhere: keep it inside the pod.
    """

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
