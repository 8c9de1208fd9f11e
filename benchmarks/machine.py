"""The machine under the benchmarks: left as found, quiet before a measurement, memory at hand."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hostprep.backing import MIB
from hostprep.node.apply.service import Node
from hostprep.node.observe.pools import observe_pools
from testbed.machine import huge_pages_total

_HUGE_BYTES = 2 * MIB
_POOL_FILE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
_PREFIX = "hostprep-bench-"
_QUIET_BUSY_SHARE = 0.15
_QUIET_LIMIT_S = 180.0


class BenchmarkError(Exception):
    """The benchmark cannot run here; the text says why and what would help."""


@contextlib.contextmanager
def own_node() -> Iterator[Node]:
    """Give a node with a root of its own; its pools are released, whatever happens."""
    if os.geteuid() != 0:
        raise BenchmarkError("benchmarks need root: they add huge pages and mount hugetlbfs")
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir="/dev/shm")
    node = Node(f"{folder}/root")
    try:
        yield node
    finally:
        # Where releasing fails the folder stays, for a person to look into.
        release_all(node)
        shutil.rmtree(folder)


def release_all(node: Node) -> None:
    """Release every pool below the node's root."""
    names = [pool.name for pool in observe_pools(node.root)]
    if names:
        node.release(names, force=True)


@contextlib.contextmanager
def huge_page_pool(size_bytes: int) -> Iterator[None]:
    """Have so many bytes more in free 2 MiB pages, and exactly as many as before afterwards.

    Ours and its rival then populate the very same pages, and neither meets a page that the
    hypervisor has taken back meanwhile. Raises BenchmarkError where they cannot be had.
    """
    pages = -(-size_bytes // _HUGE_BYTES)
    before = huge_pages_total()
    _resize_pool(pages)
    added = huge_pages_total() - before
    try:
        if added < pages:
            raise BenchmarkError(f"only {added} of {pages} huge pages can be had")
        yield
    finally:
        # By difference: somebody else's pages may have come or gone meanwhile.
        _resize_pool(-added)


def _resize_pool(pages: int) -> None:
    _POOL_FILE.write_text(str(max(0, huge_pages_total() + pages)), encoding="ascii")


def free_bytes() -> int:
    """Return MemFree."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemFree:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError("/proc/meminfo has no MemFree")


def contiguous_free_bytes() -> int:
    """Return the free memory that lies in blocks of 2 MiB or more, from /proc/buddyinfo."""
    total = 0
    for line in Path("/proc/buddyinfo").read_text(encoding="ascii").splitlines():
        for order, count in enumerate(line.split()[4:]):
            if 4096 << order >= _HUGE_BYTES:
                total += int(count) * (4096 << order)
    return total


def wait_until_quiet(limit_s: float = _QUIET_LIMIT_S) -> bool:
    """Wait for two seconds in which the CPUs idle and nobody adds huge pages; False if none came.

    Measures now, instead of the load average, which still holds our own last benchmark.
    """
    deadline_s = time.monotonic() + limit_s
    told = False
    while time.monotonic() < deadline_s:
        pages = huge_pages_total()
        if _busy_share(2.0) < _QUIET_BUSY_SHARE and pages == huge_pages_total() == 0:
            return True
        if not told:
            print("benchmarks: waiting for a quiet machine", file=sys.stderr, flush=True)
        told = True
    return False


def _busy_share(duration_s: float) -> float:
    busy, total = _cpu_ticks()
    time.sleep(duration_s)
    busy_later, total_later = _cpu_ticks()
    return (busy_later - busy) / max(1, total_later - total)


def _cpu_ticks() -> tuple[int, int]:
    """Return the ticks not idle and all of them, summed over the CPUs (proc(5), /proc/stat)."""
    fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    ticks = [int(field) for field in fields]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
