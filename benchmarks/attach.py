"""Attach to resident memory, against what engines do today: allocate, zero and fault it again.

Each round is a fresh process, as an engine's start is. The memory of 2 MiB pages stays; between
rounds the agent cleans it. Rivals' first turns are discarded: a hypervisor's pages exist then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.fragment import fragmented_memory
from benchmarks.machine import BenchmarkError, huge_page_pool, own_node
from benchmarks.measure import AtLeast, Below, Result, Sample, alternate, compare
from benchmarks.populate_2m import hugetlbfs
from benchmarks.rival import run_rival
from benchmarks.running import main
from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, MIB
from hostprep.node.apply.service import Node
from hostprep.units import format_bytes

_ENGINE = """
import time
begin_s = time.perf_counter()
from hostprep.client.attach import attach
imported_s = time.perf_counter()
import sys
called_s = time.perf_counter()
memory = attach(sys.argv[1], root=sys.argv[2])
end_s = time.perf_counter()
mapped_kib = 0
with open("/proc/self/smaps_rollup") as rollup:
    for line in rollup:
        if line.split(":")[0] in ("Shared_Hugetlb", "Private_Hugetlb"):
            mapped_kib += int(line.split()[1])
import json
print(json.dumps({"call_s": end_s - called_s, "imports_s": imported_s - begin_s,
                  "size_bytes": memory.size_bytes, "mapped_bytes": mapped_kib * 1024}))
memory.close()
"""


def run(*, short: bool = False) -> list[Result]:
    """Measure both rivals, each in turns with ours. Returns a row for each figure."""
    size_bytes = 32 * MIB if short else 8 * GIB
    rounds = 1 if short else 5
    spec = spec_from_options(name="bench", size=str(size_bytes), backings="HugeTLB2Mi", regions=1)
    with own_node() as node:
        node.prepare([spec])
        # Keeps a hypervisor from taking the rival's memory back between turns: it takes whole
        # blocks only. To 4 KiB pages it makes no other difference.
        with fragmented_memory(0 if short else size_bytes * 5 // 4, spare_contiguous=-1):
            rows = _against_base_pages(node, spec, size_bytes, rounds)
        with huge_page_pool(size_bytes), hugetlbfs(node) as folder:
            rows.append(_against_huge_pages(node, spec, folder, rounds))
    return rows


def _against_base_pages(node: Node, spec: PoolSpec, size_bytes: int, rounds: int) -> list[Result]:
    path = Path(node.root).parent / "vllm.mmap"
    engine = _Engine(node, spec)
    vllm = ("engines", "vllm", str(path), size_bytes, 2 * MIB, 1)
    ours, rival = alternate(
        [engine.attach, lambda: _fresh(path, *vllm)], rounds=rounds, before_each=engine.clean
    )
    included = Sample(tuple(engine.with_imports_s[-rounds:]))
    name = "vLLM's way: fresh 4 KiB shared memory, 1 rank"
    number = f"attach {format_bytes(size_bytes)}"
    per_gib = Below(1e-3, "1 ms per GiB")
    return [
        compare(number, ours, name, rival, reach=AtLeast(500)),
        compare(
            number,
            ours,
            "1 ms per GiB",
            Sample(tuple(1e-3 * size_bytes / GIB for _ in ours.values)),
            reach=per_gib,
            judged=ours.median / (size_bytes / GIB),
        ),
        compare(f"{number}, imports too", included, name, rival),
    ]


def _against_huge_pages(node: Node, spec: PoolSpec, folder: Path, rounds: int) -> Result:
    path = folder / "memory"
    size_bytes = spec.size_bytes or 0
    engine = _Engine(node, spec)
    fresh = ("prealloc", "populate", str(path), size_bytes, 2 * MIB, 1)
    ours, rival = alternate(
        [engine.attach, lambda: _fresh(path, *fresh)], rounds=rounds, before_each=engine.clean
    )
    return compare(
        f"attach {format_bytes(size_bytes)}", ours, "a fresh hugetlbfs file, 1 thread", rival
    )


class _Engine:
    """A process that attaches and ends, again and again."""

    def __init__(self, node: Node, spec: PoolSpec) -> None:
        self._node = node
        self._spec = spec
        self.with_imports_s: list[float] = []

    def clean(self) -> None:
        """Let the agent scrub what the last one used."""
        self._node.prepare([self._spec])

    def attach(self) -> float:
        """Return the seconds from call to return; every page must be mapped by then."""
        call_s, imports_s = _attach(self._node, self._spec.name)
        self.with_imports_s.append(call_s + imports_s)
        return call_s


def attach_in_a_process(node: Node, pool: str) -> float:
    """Attach in a fresh process; return the seconds from call to return, every page mapped."""
    return _attach(node, pool)[0]


def _attach(node: Node, pool: str) -> tuple[float, float]:
    """Return the seconds of the call, and those of the imports before it."""
    command = [sys.executable, "-c", _ENGINE, pool, node.root]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"attach failed: {done.stderr.strip()}")
    told = json.loads(done.stdout)
    if told["mapped_bytes"] < told["size_bytes"]:
        raise BenchmarkError(f"only {told['mapped_bytes']} bytes are in the page tables")
    return float(told["call_s"]), float(told["imports_s"])


def _fresh(path: Path, program: str, *arguments: str | int) -> float:
    try:
        return run_rival(program, *arguments)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(run)
