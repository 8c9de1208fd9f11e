"""A fragmented host: time to ready, against the way that ends in minutes, and a quiet host.

The rival faults huge pages that are not there: every fault compacts memory, in vain. Ours sees
it beforehand and does without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.fragment import fragmented_memory
from benchmarks.machine import own_node, release_all
from benchmarks.measure import AtLeast, Result, Sample, alternate, compare, timed
from benchmarks.rival import run_rival
from benchmarks.running import main
from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, KIB, MIB
from hostprep.node.apply.service import Node


def run(*, short: bool = False) -> list[Result]:
    """Measure before and after fragmenting. Returns a row for each rival."""
    size_bytes = 64 * MIB if short else 2 * GIB
    rounds = 1 if short else 3
    any_spec = _spec(size_bytes, "HugeTLB2Mi,THP,Base")
    # A short run fragments nothing: filling a machine's memory takes its time.
    with own_node() as node:
        (clean,) = alternate(
            [lambda: _base_pages(node, size_bytes)],
            rounds=rounds,
            before_each=lambda: _touch(0 if short else size_bytes * 5 // 4),
        )
        with fragmented_memory(0 if short else None, spare_contiguous=-1 if short else 128 * MIB):
            notes = _why(node, any_spec)
            ours, thp_one, thp_all = alternate(
                [
                    _prepare(node, any_spec),
                    lambda: run_rival("engines", "thp", size_bytes, 1),
                    lambda: run_rival("engines", "thp", size_bytes, 2),
                ],
                rounds=rounds,
            )
    return _rows(ours, thp_one, thp_all, clean, size_bytes=size_bytes, notes=notes)


def _rows(
    ours: Sample,
    thp_one: Sample,
    thp_all: Sample,
    clean: Sample,
    *,
    size_bytes: int,
    notes: tuple[str, ...],
) -> list[Result]:
    number = "fragmented host"
    rivals = (
        ("THP faults as a registration makes them, 1 thread", thp_one, AtLeast(5.0)),
        ("the same by 2 threads", thp_all, None),
        (
            "4 KiB shared memory in C, 2 threads, before fragmenting (≤ 1.5× its time)",
            clean,
            AtLeast(1 / 1.5),
        ),
    )
    return [
        compare(number, ours, name, rival, reach=reach, size_bytes=size_bytes, notes=notes)
        for name, rival, reach in rivals
    ]


def _spec(size_bytes: int, backings: str) -> PoolSpec:
    return spec_from_options(name="bench", size=str(size_bytes), backings=backings, regions=1)


def _prepare(node: Node, spec: PoolSpec) -> Callable[[], float]:
    """Time a whole prepare, from the call to the published handoff."""

    def measure() -> float:
        try:
            return timed(lambda: node.prepare([spec]))
        finally:
            release_all(node)

    return measure


def _base_pages(node: Node, size_bytes: int) -> float:
    """Populate 4 KiB shared memory as plainly as can be."""
    path = Path(node.root).parent / "plain"
    try:
        return run_rival("prealloc", "populate", str(path), size_bytes, 4 * KIB, 2)
    finally:
        path.unlink(missing_ok=True)


def _why(node: Node, spec: PoolSpec) -> tuple[str, ...]:
    (pool,) = node.plan([spec]).pools
    passed = tuple(f"passed over {over.backing}: {over.why}" for over in pool.passed_over)
    return (*passed, f"chose {pool.backing_words}")


def _touch(size_bytes: int) -> None:
    """Have a hypervisor give this machine so much memory before a measurement needs it."""
    if size_bytes:
        run_rival("engines", "trtllm", size_bytes, 512 * MIB, 2)


if __name__ == "__main__":
    main(run)
