"""Run the operator at several sizes of cluster on a real API server, and print what each cost.

`python -m benchmarks.control_plane [100 1000 5000] [--quiet SECONDS] [--write-docs]`. Needs the
testbed's programs (`python -m testbed build`). With several sizes: straight lines through
the points, so that what grows faster than the cluster is seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.control_plane.report import document, print_points, write_docs
from benchmarks.control_plane.scale import Point, Run, measure
from testbed.chart import apply_crds
from testbed.control_plane import ControlPlane
from testbed.processes import free_port

_SIZES = (100, 1000, 5000)


def main() -> int:
    """Return 0 where all reaches are met, 1 where one is missed."""
    options = _options()
    points = [_measure(count, options.quiet) for count in options.sizes or _SIZES]
    if options.output == "json":
        print(json.dumps([document(point) for point in points], indent=2))
    else:
        print_points(points)
    if options.write_docs:
        write_docs(points)
    return 0 if all(point.is_met for point in points) else 1


def _measure(count: int, quiet_s: float) -> Point:
    print(f"{count} nodes", file=sys.stderr)
    with ControlPlane() as cluster, tempfile.TemporaryDirectory(prefix="hostprep-bench-") as folder:
        apply_crds(cluster.api)
        run = Run(str(cluster.kubeconfig), Path(folder), port=free_port(), quiet_s=quiet_s)
        return asyncio.run(measure(run, count))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, metavar="NODES", help=f"default: {_SIZES}")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds of quiet to watch")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--write-docs", action="store_true", help="docs/benchmarks-cluster.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
