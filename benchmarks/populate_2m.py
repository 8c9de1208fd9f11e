"""Populate 2 MiB pages: ours against the same work in C, as QEMU preallocates.

Both take their pages from one pool that stays reserved over the whole run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.machine import huge_page_pool, own_node
from benchmarks.measure import AtLeast, Result, alternate, compare
from benchmarks.populating import populate_s, thread_count
from benchmarks.rival import run_rival
from benchmarks.running import main
from hostprep.api.pool_resource import spec_from_options
from hostprep.backing import GIB, MIB
from hostprep.linux.mounts import mount, unmount
from hostprep.node.apply.service import Node


def run(*, short: bool = False) -> list[Result]:
    """Measure both ways of QEMU's. Returns a row for each."""
    size_bytes = 64 * MIB if short else 4 * GIB
    spec = spec_from_options(name="bench", size=str(size_bytes), backings="HugeTLB2Mi", regions=1)
    with own_node() as node, huge_page_pool(size_bytes), hugetlbfs(node) as folder:
        threads = thread_count(node, spec)
        ours, populate, touch = alternate(
            [
                lambda: populate_s(node, spec),
                _prealloc("populate", folder, size_bytes, threads),
                _prealloc("touch", folder, size_bytes, threads),
            ],
            rounds=1 if short else 15,
        )
    rows = (("MADV_POPULATE_WRITE", populate), ("a write to every page", touch))
    return [
        compare(
            "populate 2 MiB",
            ours,
            f"QEMU's preallocation in C, {threads} threads, {how}",
            rival,
            reach=AtLeast(0.95),
            size_bytes=size_bytes,
        )
        for how, rival in rows
    ]


@contextlib.contextmanager
def hugetlbfs(node: Node) -> Iterator[Path]:
    """Mount a hugetlbfs of 2 MiB pages for rivals, beside the node's root."""
    folder = Path(node.root).parent / "rivals"
    folder.mkdir()
    mount("hugetlbfs", str(folder), "pagesize=2M")
    try:
        yield folder
    finally:
        for path in folder.iterdir():
            path.unlink()
        unmount(str(folder))
        folder.rmdir()


def _prealloc(how: str, folder: Path, size_bytes: int, threads: int) -> Callable[[], float]:
    path = folder / "memory"

    def measure() -> float:
        try:
            return run_rival("prealloc", how, str(path), size_bytes, 2 * MIB, threads)
        finally:
            path.unlink(missing_ok=True)

    return measure


if __name__ == "__main__":
    main(run)
