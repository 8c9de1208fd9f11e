"""What a plan costs: seconds, threads, and each engine process's page tables.

The constants are measurements, so that a plan's times are right to an order of magnitude; no
decision rests on them. Populating: the kernel clears pages at 10 GiB/s and more a core in blocks of
2 MiB (docs/benchmarks: 16 to 22 on an EPYC of 2024; QEMU's preallocation: 1 to 4 on older ones),
and at 2 to 4 GiB/s a core in pages of 4 KiB.
"""

from __future__ import annotations

from hostprep.api.pool_spec import Placement
from hostprep.backing import GIB, Backing
from hostprep.node.facts import NumaNode, ProcessFacts

_HUGE_BYTES_PER_S = 8 * GIB
"""A thread clearing pages of 2 MiB or 1 GiB."""
_BASE_BYTES_PER_S = 2 * GIB
"""A thread faulting 4 KiB pages into tmpfs."""
_NODE_BYTES_PER_S = 60 * GIB
"""Where one node's memory saturates with huge pages (Mooncake #2838: 65 to 70 with 16 threads
over two sockets; eight channels of DDR5-4800 write some 200)."""
_TMPFS_FILE_BYTES_PER_S = 10 * GIB
"""One tmpfs file's page cache takes 4 KiB pages under one lock (Mooncake #3939: 10 with 8)."""
_SCRUB_BYTES_PER_S = 6 * GIB
"""A thread's memset over resident pages (13 with two threads)."""
_RESERVE_S_PER_GIB = 0.05
"""Adding huge pages to a pool with some compaction; on clean memory it is a tenth of that."""
_THREADS_PER_NODE = 16
_THREADS_INTERLEAVED = 32
_PAGE_TABLE_ENTRY_BYTES = 8


def cpus_and_threads(
    placement: Placement, nodes: tuple[NumaNode, ...], process: ProcessFacts
) -> tuple[tuple[int, ...], int]:
    """Return the CPUs near a region that this process may use, and how many threads populate it.

    All CPUs of the process where none is near.
    """
    near = {cpu for node in nodes if placement.node in (None, node.node_id) for cpu in node.cpus}
    cpus = tuple(cpu for cpu in process.cpus if cpu in near) or process.cpus
    limit = _THREADS_INTERLEAVED if placement.node is None else _THREADS_PER_NODE
    return cpus, max(1, min(len(cpus), limit))


def populate_s(size_bytes: int, backing: Backing, threads: int, node_count: int) -> float:
    """Return the seconds to populate so much over so many nodes."""
    if backing is Backing.BASE:
        rate = min(threads * _BASE_BYTES_PER_S, _TMPFS_FILE_BYTES_PER_S)
    else:
        rate = min(threads * _HUGE_BYTES_PER_S, node_count * _NODE_BYTES_PER_S)
    return size_bytes / rate


def reserve_s(size_bytes: int) -> float:
    """Return the seconds to add so much to a huge-page pool."""
    return size_bytes / GIB * _RESERVE_S_PER_GIB


def scrub_s(size_bytes: int, threads: int) -> float:
    """Return the seconds to zero a resident region."""
    return size_bytes / min(threads * _SCRUB_BYTES_PER_S, _NODE_BYTES_PER_S)


def page_table_bytes(size_bytes: int, backing: Backing, base_page_bytes: int) -> int:
    """Return what one process pays for mapping it: an entry for each base page, else nothing.

    The tables above the last level are a 512th of that again, and left out.
    """
    if backing is not Backing.BASE:
        return 0
    return size_bytes // base_page_bytes * _PAGE_TABLE_ENTRY_BYTES
