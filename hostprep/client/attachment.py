"""A leased region, mapped."""

from __future__ import annotations

import builtins
import mmap
import os
import sys
import weakref
from types import TracebackType

from hostprep.client.handoff import Handoff, Region
from hostprep.client.lease import Lease
from hostprep.errors import HostprepError
from hostprep.linux.memory import address_of, explain, map_shared, populate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.linux.threads import Stop

__all__ = ["Attachment", "make_present"]

_PIECE_BYTES = 64 << 20


class Attachment:
    """A region's memory in this process; use it as a context manager.

    `buffer` is a flat memoryview of bytes (numpy.frombuffer and torch.frombuffer take it as it
    is), `address` its address for ctypes. The lease lasts as long as the mapping or any
    descriptor of it: views that outlive `close()` keep both, and are never left dangling.
    """

    def __init__(self, lease: Lease, *, writable: bool = True) -> None:
        """Map the lease's region with every page present. Takes the lease over, errors included."""
        self._lease = lease
        try:
            mapping = map_shared(lease.fd, lease.region.size_bytes, writable=writable)
            self._address = address_of(mapping)
            make_present(lease.region, self._address, lease.region.size_bytes)
        except BaseException:
            lease.retire()
            lease.close()
            raise
        self._buffer: memoryview | None = memoryview(mapping)
        _keep(mapping, lease)

    @property
    def buffer(self) -> memoryview:
        """The region's bytes, in place. Raises ValueError after `close()`."""
        if self._buffer is None:
            raise ValueError("the attachment is closed")
        return self._buffer

    @property
    def address(self) -> int:
        """Where the region is mapped, page-aligned."""
        return self._address

    @property
    def size_bytes(self) -> int:
        """Size of the whole region; at least what was asked for."""
        return self._lease.region.size_bytes

    @property
    def page_bytes(self) -> int:
        """Size of the pages behind it."""
        return self._lease.region.page_bytes

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that holds all of it; None if it is interleaved."""
        return self._lease.region.numa_node

    @property
    def generation(self) -> int:
        """The handoff's generation that this rests on."""
        return self._lease.handoff.generation

    @property
    def handoff(self) -> Handoff:
        """The handoff that this rests on."""
        return self._lease.handoff

    @property
    def region(self) -> Region:
        """The region as published, with the agent's advice for registering."""
        return self._lease.region

    @property
    def path(self) -> str:
        """Absolute path of the region's file."""
        return self._lease.path

    @property
    def lease_id(self) -> str:
        """Give it to the engine's other processes: `hostprep.join(pool, lease_id=...)`."""
        return self._lease.lease_id

    @property
    def is_leader(self) -> bool:
        """Whether this process leads the lease: it neither joined it nor only reads."""
        return self._lease.is_leader

    @property
    def fd(self) -> int:
        """The leased descriptor. Whoever holds a duplicate holds the lease."""
        return self._lease.fd

    @property
    def contents_kept(self) -> bool:
        """True where the owner's earlier bytes are here; otherwise the region is all zeros."""
        return self._lease.contents_kept

    @property
    def discarded(self) -> str | None:
        """Why the owner's earlier bytes were not given back."""
        return self._lease.discarded

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is known to go wrong where this memory is registered with CUDA, worst first.

        A sentence each, with the remedy; of this kernel, its zones, the NVIDIA driver and this
        process's limits, for calls of the size that `region.attach` advises. Looked up each time
        when asked, not by attaching. Empty where nothing is known, or no driver can be seen.
        """
        from hostprep.cuda.local_issues import faults_of

        return tuple(
            f"{fault.what}; {fault.remedy}"
            for fault in faults_of(self.region)
            if fault.severity != "info"
        )

    def close(self) -> None:
        """Let go: unmapped, and the lease ended, as soon as nobody uses the memory any more.

        Views keep it, and so do objects that merely remember the buffer (torch.frombuffer does
        not hold on to it in any other way): nothing is ever unmapped under them.
        """
        self._buffer = None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._buffer is None else f"at {self._address:#x}"
        return f"<Attachment {self._lease.handoff.pool}/{self.region.name} {state}>"


_alive: dict[int, weakref.ref[mmap.mmap]] = {}
_orphans: list[object] = []


def _keep(mapping: mmap.mmap, lease: Lease) -> None:
    """End the lease when the mapping is gone: when its last user has let go of it."""
    key = id(mapping)

    names, is_finalizing = vars(builtins), sys.is_finalizing

    def unmapped(_: object) -> None:
        if is_finalizing() and not names.get("open"):
            # The interpreter's very end, which some extensions' objects outlive: no file can be
            # read or written any more, and the end of the process says what `retire` would.
            return
        _alive.pop(key, None)
        lease.retire()
        lease.close()

    _alive[key] = weakref.ref(mapping, unmapped)


def _after_fork() -> None:
    """In a forked child, where the ranges are not mapped (MADV_DONTFORK): never unmap them.

    The child may have mapped something else there since. It keeps the objects for good, and
    says nothing about leases that are its parent's.
    """
    _orphans.extend(mapping for ref in _alive.values() if (mapping := ref()) is not None)
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)


def make_present(
    region: Region, address: int, size_bytes: int, *, stop: Stop | None = None
) -> None:
    """Build this process's page tables: at once for huge pages, by threads for base ones.

    `address` and `size_bytes` are of the region's mapping, or of a part of it. Reading populates
    2.5 times faster than writing, and the entries of a shared mapping are writable all the same
    (research: memory, section 4.4). Raises in plain words; `kernel.parallel.Stopped` if `stop`
    was set before base pages were all present: it is asked every 64 MiB.
    """

    def read(offset: int, length: int) -> None:
        populate(address + offset, length, write=False)

    from hostprep.linux.threads import run_pieces

    try:
        if region.page_bytes > os.sysconf("SC_PAGE_SIZE"):
            read(0, size_bytes)
            return
        run_pieces(
            read,
            size_bytes=size_bytes,
            piece_bytes=_PIECE_BYTES,
            threads=min(region.attach.populate_read_threads, len(os.sched_getaffinity(0))),
            stop=stop,
        )
    except OSError as error:
        raise _explained(error, region) from error


def _explained(error: OSError, region: Region) -> HostprepError:
    return explain(error.errno, f"attaching to {region.name}")
