"""`hostprep exec` over a bare interpreter: what a container's start pays for claiming."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from benchmarks.machine import own_node
from benchmarks.measure import Below, Result, alternate, compare, timed
from benchmarks.running import main
from hostprep.api.pool_resource import spec_from_options
from hostprep.backing import MIB

_LIMIT_S = 0.15


def run(*, short: bool = False) -> list[Result]:
    """Measure exec of a program that does nothing. Returns one row."""
    spec = spec_from_options(name="bench", size=str(2 * MIB), backings="Base", regions=1)
    with own_node() as node:
        node.prepare([spec])
        claim = ["-m", "hostprep", "exec", "--root", node.root, "--pool", "bench", "--", "true"]
        ours, bare = alternate(
            [_start(claim), _start(["-c", "pass"])],
            rounds=2 if short else 30,
            # The command may have written to its region: the agent's next round cleans it.
            before_each=lambda: node.prepare([spec]),
        )
    over_s = ours.median - bare.median
    return [
        compare(
            "hostprep exec",
            ours,
            "python -c pass",
            bare,
            reach=Below(_LIMIT_S, "150 ms over it"),
            judged=over_s,
            notes=(f"{over_s * 1000:.1f} ms over a bare interpreter, start of `true` included",),
        )
    ]


def _start(arguments: list[str]) -> Callable[[], float]:
    command = [sys.executable, *arguments]
    return lambda: timed(lambda: subprocess.run(command, check=True))


if __name__ == "__main__":
    main(run)
