"""Populate one size in other ways: more threads, several files, larger folios, huge pages.

Says what a region of several files, or another `huge=` option, would gain on this machine. Not
Hostprep's own way but its parts: the same threads, pieces and system calls, on a mount each turn.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.machine import huge_page_pool, own_node
from benchmarks.measure import Result, alternate, compare
from benchmarks.running import main
from hostprep.backing import GIB, MIB, Backing
from hostprep.linux.files import closing_fd
from hostprep.linux.memory import address_of, advise, map_shared, populate
from hostprep.linux.mounts import mount, unmount
from hostprep.linux.threads import Workers, pieces_of, working
from hostprep.node.plan.estimate import PIECE_BYTES

_MADV_HUGEPAGE = 14
"""asm-generic/mman-common.h."""
_MANY_FILES = 8


@dataclass(frozen=True)
class _Way:
    """How memory is populated; one file by one thread is what others are compared with."""

    name: str
    backing: Backing
    options: str
    """Of the mount; its type follows from the backing."""
    threads: int = 1
    files: int = 1
    fallocate: bool = False
    """Each piece first: that is what takes large folios with `huge=within_size`."""
    madvise: bool = False

    @property
    def text(self) -> str:
        return f"{self.name}, {self.files} file(s), {self.threads} thread(s)"


_SMALL = _Way("4 KiB folios", Backing.BASE, "huge=never")
_WITHIN = _Way("huge=within_size and fallocate", Backing.BASE, "huge=within_size", fallocate=True)
_ADVISE = _Way("huge=advise and madvise", Backing.THP, "huge=advise", madvise=True)
_ALWAYS = _Way("huge=always", Backing.THP, "huge=always")
_HUGE = _Way("hugetlbfs 2 MiB", Backing.HUGETLB_2MI, "pagesize=2M")


def run(*, short: bool = False) -> list[Result]:
    """Measure all ways in turns. Returns a row for each way but the first of its kind."""
    size_bytes = 64 * MIB if short else 2 * GIB
    cpus = len(os.sched_getaffinity(0))
    small = [
        _SMALL,
        *(replace(_SMALL, threads=cpus, files=files) for files in (1, cpus, _MANY_FILES)),
    ]
    larger = [
        replace(way, threads=cpus, files=files)
        for way in (_WITHIN, _ADVISE, _ALWAYS)
        for files in (1, cpus)
    ]
    huge = [replace(_HUGE, threads=threads) for threads in sorted({1, cpus, 4 * cpus})]
    huge.append(replace(_HUGE, threads=cpus, files=cpus))
    ways = [*small, *larger, *huge]
    with own_node() as node, huge_page_pool(size_bytes):
        folder = Path(node.root).parent / "files"
        folder.mkdir()
        samples = alternate(
            [_measure(way, folder, size_bytes) for way in ways],
            rounds=1 if short else 9,
            # What a hypervisor takes back while others are slow is there again.
            before_each=_measure(replace(_ALWAYS, threads=cpus), folder, size_bytes),
        )
    measured = dict(zip(ways, samples, strict=True))
    # Threads and huge pages against one thread, files and folios against one file of 4 KiB pages.
    rivals = {
        **dict.fromkeys(small[1:2], small[0]),
        **dict.fromkeys([*small[2:], *larger], small[1]),
        **dict.fromkeys(huge[1:], huge[0]),
    }
    return [
        compare(way.text, measured[way], rival.text, measured[rival], size_bytes=size_bytes)
        for way, rival in rivals.items()
    ]


def _measure(way: _Way, folder: Path, size_bytes: int) -> Callable[[], float]:
    """Return what populates on a mount of its own, and gives the seconds without mounting."""

    def measure() -> float:
        fs_type = "hugetlbfs" if way.backing.is_hugetlb else "tmpfs"
        size = "" if way.backing.is_hugetlb else f",size={size_bytes}"
        mount(fs_type, str(folder), f"{way.options}{size}")
        try:
            begin_s = time.perf_counter()
            _populate(way, folder, size_bytes // way.files)
            return time.perf_counter() - begin_s
        finally:
            for path in folder.iterdir():
                path.unlink()
            unmount(str(folder))

    return measure


def _populate(way: _Way, folder: Path, file_bytes: int) -> None:
    """Populate files of so many bytes each; neighbouring pieces are of different files."""
    with contextlib.ExitStack() as stack:
        files: list[tuple[int, int]] = []
        for number in range(way.files):
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            fd = stack.enter_context(closing_fd(os.open(folder / str(number), flags)))
            os.ftruncate(fd, file_bytes)
            address = address_of(stack.enter_context(map_shared(fd, file_bytes)))
            if way.madvise:
                advise(address, file_bytes, _MADV_HUGEPAGE)
            files.append((fd, address))

        def work(item: tuple[tuple[int, int], tuple[int, int]]) -> None:
            (offset, length), (fd, address) = item
            if way.fallocate:
                os.posix_fallocate(fd, offset, length)
            populate(address + offset, length, write=True)

        workers = Workers(way.threads)
        stack.enter_context(working([workers]))
        pieces = pieces_of(file_bytes, PIECE_BYTES[way.backing])
        workers.run(work, itertools.product(pieces, files), threading.Event())


if __name__ == "__main__":
    main(run)
