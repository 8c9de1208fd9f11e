"""The kill run: prepare, grow, release, attach and scrub, killed at any instant, 300 times.

Torn handoffs, wrong states and leaked pages must be none, and every phase must have been hit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from benchmarks.machine import BenchmarkError, own_node, wait_until_quiet
from hostprep.console import print_table
from testbed.kill_harness import _TARGETS as TARGETS
from testbed.kill_harness import KillRun, Tally, kill_spec
from testbed.machine import huge_pages_total

_LEAST_HITS = 10
_BAR_CHARS = 40


def run(kills: int, seed: int) -> Tally:
    """Kill that many steps; what must hold is checked after each."""
    with own_node() as node:
        run = KillRun(node, kill_spec(64), kill_spec(96), seed, huge_pages_total())
        tally = run.run(kills)
        while missed(tally) and sum(tally.hits.values()) < 2 * kills:
            tally = run.run(10)
        return tally


def missed(tally: Tally, least: int = _LEAST_HITS) -> list[str]:
    """Return the phases of the targets that were hit less often than `least`."""
    wanted = {phase for phases in TARGETS.values() for phase in phases}
    return sorted(phase for phase in wanted if tally.hits[phase] < least)


def show(tally: Tally) -> None:
    """Print the histogram and what was found broken."""
    most = max(tally.hits.values(), default=1)
    rows = [
        (phase, str(hits), "█" * max(1, round(_BAR_CHARS * hits / most)))
        for phase, hits in Counter(tally.hits).most_common()
    ]
    print_table(f"{sum(tally.hits.values())} kills, by the phase they hit", ("PHASE", "", ""), rows)
    print(
        f"torn handoffs {len(tally.torn_handoffs)}, leaked {len(tally.leaks)}, "
        f"wrong states {len(tally.wrong_states)}"
    )
    for line in tally.broken:
        print(f"  {line}")


def main() -> int:
    """Run it. Returns 1 if anything was broken or a phase was hit too seldom."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    print(f"seed {options.seed}")
    if not wait_until_quiet():
        print("kill run: others use this machine; leaks may be theirs", file=sys.stderr)
    try:
        tally = run(options.kills, options.seed)
    except BenchmarkError as error:
        print(f"kill run: {error}", file=sys.stderr)
        return 2
    show(tally)
    seldom = missed(tally)
    if seldom:
        print(f"hit less than {_LEAST_HITS} times: {', '.join(seldom)}")
    return 1 if tally.broken or seldom else 0


if __name__ == "__main__":
    sys.exit(main())
