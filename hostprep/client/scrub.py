"""Zeroing a region between owners: by memset, which beats punching holes and refaulting."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from hostprep.client.handoff import Region
from hostprep.linux.memory import address_of, explain, map_shared, populate, zero
from hostprep.linux.threads import run_pieces

__all__ = ["PIECE_BYTES", "scrub_file", "usable_cpus"]

PIECE_BYTES = 64 << 20


def usable_cpus() -> int:
    """Return the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def scrub_file(
    region: Region,
    fd: int,
    *,
    threads: int | None = None,
    on_done: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Overwrite an open region, held exclusively by the caller, with zeros.

    Each piece is populated first: a bad page is reported as an error then, where the memset
    alone would end the process with SIGBUS. Raises NotReadyError, FailedError, Stopped.
    """
    with map_shared(fd, region.size_bytes) as mapping:
        address = address_of(mapping)

        def clear(offset: int, length: int) -> None:
            try:
                populate(address + offset, length, write=True)
            except OSError as error:
                raise explain(error.errno, f"scrubbing {region.name}") from error
            zero(address + offset, length)

        run_pieces(
            clear,
            size_bytes=region.size_bytes,
            piece_bytes=PIECE_BYTES,
            threads=threads or min(16, usable_cpus()),
            on_done=on_done,
            stop=stop,
        )
