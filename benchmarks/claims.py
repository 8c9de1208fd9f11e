"""Eight processes claim any 2 to 4 of 6 regions, 1,000 rounds in all: nobody starves or overlaps.

Run by `python -m benchmarks.claims [ROUNDS]`. Exit code 1 if anybody got a part, shared a region,
or waited in vain.
"""

from __future__ import annotations

import sys
import tempfile
import time

from hostprep.node.apply.service import Node
from testbed.claimers import run_claimers
from testbed.machine import POOL, pool_of

_PROCESSES = 8
_REGIONS = 6


def main() -> int:
    """Run the fight and print who got what. Returns the exit code."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory(prefix="hostprep-bench-", dir="/dev/shm") as folder:
        node = Node(f"{folder}/root")
        node.prepare([pool_of(regions=_REGIONS, mib=1)])
        try:
            begin_s = time.monotonic()
            reports = run_claimers(
                node.root,
                POOL,
                processes=_PROCESSES,
                rounds=rounds // _PROCESSES,
                regions=_REGIONS,
                seed=time.time_ns() % 1_000_000,
            )
            took_s = time.monotonic() - begin_s
        finally:
            node.release([POOL])
    print("process  rounds  partial  overlaps  timeouts  longest wait")
    for index, report in enumerate(reports):
        print(
            f"{index:7}  {report.rounds:6}  {report.partial_sets:7}  {report.overlaps:8}"
            f"  {report.timeouts:8}  {report.longest_wait_s * 1000:9.0f} ms"
        )
    print(f"{sum(report.rounds for report in reports)} rounds in {took_s:.1f} s")
    broken = any(r.partial_sets or r.overlaps or r.timeouts for r in reports)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
