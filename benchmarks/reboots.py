"""Ten reboots of a real node, every third a power cut, with an engine that bears witness.

    python -m benchmarks.reboots [--times 10]

Checks after each: closed on the first Node update with the new bootID, prepared, opened, and no
container of the engine passed before memory was verified for its boot. Root; a quarter of an hour.
"""

from __future__ import annotations

import argparse
import sys

from testbed.chart import NAMESPACE, install_chart, scale_operator
from testbed.control_plane import ControlPlane
from testbed.node import NodeSettings, build_node_parts
from testbed.node_scene import KV, POOL_LABEL, apply, go_through
from testbed.operator_process import OperatorProcess


def main() -> int:
    """Run; a failed check ends it with an AssertionError."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    parts = build_node_parts(_say)
    with ControlPlane(controllers=True, scheduler=True) as cluster:
        settings = NodeSettings(labels={POOL_LABEL: "true"})
        with parts.node(cluster, settings=settings) as node:
            node.wait_ready()
            install_chart(cluster)
            scale_operator(cluster, 0)
            operator = OperatorProcess(cluster, f"--namespace={NAMESPACE}")
            operator.wait_ready(60)
            apply(cluster, KV)
            ways = [node.reboot, node.reboot, node.power_cut]
            restarts = [ways[number % len(ways)] for number in range(options.times)]
            go_through(cluster, node, operator, restarts, _say)
    _say(f"{options.times} restarts, nothing passed on unverified memory")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
