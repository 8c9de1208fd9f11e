"""Populate 4 KiB pages: ours against vLLM's and TensorRT-LLM's own ways, same cores.

All free memory is fragmented first (one pinned page in every 2 MiB): to 4 KiB pages that makes no
difference, nobody gets anything larger than 1 MiB, and a hypervisor that takes free memory back
takes only whole blocks. Without it every round would measure the hypervisor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.fragment import fragmented_memory
from benchmarks.machine import own_node
from benchmarks.measure import AtLeast, Result, alternate, compare
from benchmarks.populating import populate_s, thread_count
from benchmarks.rival import run_rival
from benchmarks.running import main
from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, MIB
from hostprep.node.apply.service import Node

_VLLM_CHUNK_BYTES = 2 * MIB
_TRTLLM_CHUNK_BYTES = 512 * MIB
_TRTLLM_MOST_THREADS = 64


def run(*, short: bool = False) -> list[Result]:
    """Measure one and two ranks at once. Returns a row for each rival."""
    size_bytes = 128 * MIB if short else 2 * GIB
    rounds = 1 if short else 7
    around = fragmented_memory(0 if short else None, spare_contiguous=-1 if short else 128 * MIB)
    with own_node() as node, around:
        return [*_one_rank(node, size_bytes, rounds), *_two_ranks(node, size_bytes, rounds)]


def _spec(size_bytes: int, regions: int) -> PoolSpec:
    return spec_from_options(name="bench", size=str(size_bytes), backings="Base", regions=regions)


def _one_rank(node: Node, size_bytes: int, rounds: int) -> list[Result]:
    spec = _spec(size_bytes, 1)
    cpus = thread_count(node, spec)
    half = max(1, min(_TRTLLM_MOST_THREADS, cpus // 2))
    ours, vllm, trtllm_all, trtllm_half = alternate(
        [
            lambda: populate_s(node, spec),
            _vllm(node, size_bytes, ranks=1),
            lambda: run_rival("engines", "trtllm", size_bytes, _TRTLLM_CHUNK_BYTES, cpus),
            lambda: run_rival("engines", "trtllm", size_bytes, _TRTLLM_CHUNK_BYTES, half),
        ],
        rounds=rounds,
    )
    rows = (
        ("vLLM, 1 rank: one shared file, 1 thread", vllm),
        (f"TensorRT-LLM, all CPUs: anonymous, {cpus} thread(s)", trtllm_all),
        (f"TensorRT-LLM, its default: anonymous, {half} thread(s)", trtllm_half),
    )
    return [
        compare("populate 4 KiB", ours, name, rival, reach=AtLeast(1.0), size_bytes=size_bytes)
        for name, rival in rows
    ]


def _two_ranks(node: Node, size_bytes: int, rounds: int) -> list[Result]:
    """Two regions prepared at once, against two ranks on one file, and two processes."""
    spec = _spec(size_bytes, 2)
    ours, vllm = alternate(
        [lambda: populate_s(node, spec), _vllm(node, size_bytes, ranks=2)], rounds=rounds
    )
    name = "vLLM, 2 ranks: one shared file, 2 processes"
    return [
        compare(
            "populate 4 KiB, 2 ranks",
            ours,
            name,
            vllm,
            reach=AtLeast(1.0),
            size_bytes=size_bytes,
        )
    ]


def _vllm(node: Node, size_bytes: int, *, ranks: int) -> Callable[[], float]:
    path = Path(f"{os.path.dirname(node.root)}/vllm.mmap")

    def measure() -> float:
        with contextlib.ExitStack() as stack:
            stack.callback(path.unlink, missing_ok=True)
            return run_rival("engines", "vllm", str(path), size_bytes, _VLLM_CHUNK_BYTES, ranks)

    return measure


if __name__ == "__main__":
    main(run)
