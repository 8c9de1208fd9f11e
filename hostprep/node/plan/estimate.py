"""What a plan costs: seconds, threads, and each engine process's page tables.

The rates are measurements, so that a plan's times are right to an order of magnitude; no decision
rests on them. Populating: the kernel clears pages at 10 GiB/s and more a core in blocks of 2 MiB
(docs/benchmarks: 16 to 22 on an EPYC of 2024; QEMU's preallocation: 1 to 4 on older ones), and at
2 to 4 GiB/s a core in pages of 4 KiB. Many cores share their node's memory: cloud-hypervisor's pull
request 8785 cleared 2 x 1,477 GiB of 1 GiB pages in 51.8 s (57 GiB/s) with up to 16 threads a zone,
not pinned and one zone after the other; pinned and both zones at once in 16.6 s (178 GiB/s) with up
to 32, and in 7.4 s (400 GiB/s) with 132 (two Xeon 6776P).
"""

from __future__ import annotations

from hostprep.api.pool_spec import Placement
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.facts import Facts, NumaNode

_HUGE_BYTES_PER_S = 8 * GIB
"""A thread clearing pages of 2 MiB or 1 GiB."""
_BASE_BYTES_PER_S = 2 * GIB
"""A thread faulting 4 KiB pages into tmpfs."""
_NODE_BYTES_PER_S = {
    Backing.HUGETLB_1GI: 200 * GIB,
    Backing.HUGETLB_2MI: 100 * GIB,
    Backing.THP: 100 * GIB,
}
"""Where one node's memory saturates. Pages of 1 GiB: half of the two sockets' 400 above. Of 2 MiB
nothing beyond 65 to 70 is published (Mooncake #2838: 16 threads over two sockets, which are what
limits there): half of that of 1 GiB is assumed."""
_TMPFS_FILE_BYTES_PER_S = 10 * GIB
"""One tmpfs file's page cache takes 4 KiB pages under one lock (Mooncake #3939: 10 with 8)."""
_SCRUB_BYTES_PER_S = 6 * GIB
"""A thread's memset over resident pages (13 with two threads)."""
_RESERVE_S_PER_GIB = 0.05
"""Adding huge pages to a pool with some compaction; on clean memory it is a tenth of that."""
_SHARE_BESIDE_ENGINES = 1 / 8
"""Of the CPUs, for populating while an engine runs. A thread clears memory as fast as a core can,
so it is the engine's memory bandwidth that threads take: 16 of 128 CPUs wrote 65 to 70 GiB/s
(Mooncake #2838) of some 400. Its own few busy threads find seven CPUs of eight without ours."""
_PAGE_TABLE_ENTRY_BYTES = 8

PIECE_BYTES = {
    Backing.HUGETLB_1GI: GIB,
    Backing.HUGETLB_2MI: 64 * MIB,
    Backing.THP: 64 * MIB,
    Backing.BASE: 16 * MIB,
}
"""What a thread populates at a time. About 10 ms of its work each (1 GiB pages cannot be cut):
progress moves, and Ctrl-C takes effect."""


def cpus_and_threads(
    placement: Placement, nodes: tuple[NumaNode, ...], facts: Facts
) -> tuple[tuple[int, ...], int]:
    """Return the CPUs near a region that this process may use, and how many threads work on it.

    A thread for each of them; for a share of them while an engine runs on this machine. All CPUs
    of the process where none is near.
    """
    near = {cpu for node in nodes if placement.node in (None, node.node_id) for cpu in node.cpus}
    cpus = tuple(cpu for cpu in facts.process.cpus if cpu in near) or facts.process.cpus
    share = _SHARE_BESIDE_ENGINES if facts.may_have_engines else 1
    return cpus, max(1, int(len(cpus) * share))


def pieces(size_bytes: int, backing: Backing) -> int:
    """Return in how many pieces so much is populated: more threads than that are of no use."""
    return max(1, -(-size_bytes // PIECE_BYTES[backing]))


def populate_s(size_bytes: int, backing: Backing, threads: int, node_count: int) -> float:
    """Return the seconds to populate so much over so many nodes."""
    if backing is Backing.BASE:
        rate = min(threads * _BASE_BYTES_PER_S, _TMPFS_FILE_BYTES_PER_S)
    else:
        rate = min(threads * _HUGE_BYTES_PER_S, node_count * _NODE_BYTES_PER_S[backing])
    return size_bytes / rate


def reserve_s(size_bytes: int) -> float:
    """Return the seconds to add so much to a huge-page pool."""
    return size_bytes / GIB * _RESERVE_S_PER_GIB


def scrub_s(size_bytes: int, backing: Backing, threads: int, node_count: int) -> float:
    """Return the seconds to zero a resident region: memory limits it as it does populating."""
    most = node_count * _NODE_BYTES_PER_S.get(backing, _NODE_BYTES_PER_S[Backing.HUGETLB_2MI])
    return size_bytes / min(threads * _SCRUB_BYTES_PER_S, most)


def page_table_bytes(size_bytes: int, backing: Backing, base_page_bytes: int) -> int:
    """Return what one process pays for mapping it: an entry for each base page, else nothing.

    The tables above the last level are a 512th of that again, and left out.
    """
    if backing is not Backing.BASE:
        return 0
    return size_bytes // base_page_bytes * _PAGE_TABLE_ENTRY_BYTES
