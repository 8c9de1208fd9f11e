"""Adopt: a prepare that finds everything right, against preparing it again.

The time is that of the whole call: observing and planning included.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.machine import huge_page_pool, own_node, release_all
from benchmarks.measure import Below, Result, Sample, compare, timed
from benchmarks.running import main
from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, MIB
from hostprep.node.apply.service import Node
from hostprep.units import format_bytes


def run(*, short: bool = False) -> list[Result]:
    """Measure at two sizes. Returns a row for each."""
    sizes = (16 * MIB, 64 * MIB) if short else (1 * GIB, 8 * GIB)
    return [_at_size(size_bytes, rounds=1 if short else 9) for size_bytes in sizes]


def _at_size(size_bytes: int, *, rounds: int) -> Result:
    spec = spec_from_options(name="bench", size=str(size_bytes), backings="HugeTLB2Mi")
    again: list[float] = []
    adopted: list[float] = []
    with own_node() as node, huge_page_pool(size_bytes):
        for _ in range(rounds + 1):
            release_all(node)
            again.append(timed(_prepare(node, spec)))
            adopted.append(timed(_prepare(node, spec)))
    return compare(
        f"adopt {format_bytes(size_bytes)}",
        Sample(tuple(adopted[1:])),
        "preparing it again (its huge pages reserved already)",
        Sample(tuple(again[1:])),
        reach=Below(0.1, "100 ms"),
    )


def _prepare(node: Node, spec: PoolSpec) -> Callable[[], object]:
    return lambda: node.prepare([spec])


if __name__ == "__main__":
    main(run)
