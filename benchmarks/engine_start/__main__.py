"""How long vLLM, SGLang and LMCache take to have their host memory: cold, and prepared.

python -m benchmarks.engine_start --size 8Gi     # as root; takes that much memory, gives it back
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from benchmarks.engine_start.engines import CHUNK_BYTES, ENGINES, Engine
from benchmarks.machine import BenchmarkError
from hostprep.backing import GIB, MIB
from hostprep.console import print_table
from hostprep.errors import HostprepError
from hostprep.units import format_bytes, parse_quantity
from testbed.machine import machine_lock

_COLUMNS = ("ENGINE", "WHAT", "SIZE", "COLD", "PREPARED", "RATIO", "REACH", "MET")


def main() -> int:
    """Return 0 where every reach is met, 1 where one is missed, 2 where it cannot run here."""
    options = _options()
    if os.geteuid() != 0:
        print("benchmarks: needs root: it adds huge pages and mounts hugetlbfs", file=sys.stderr)
        return 2
    rows = []
    for engine in ENGINES:
        if options.names and engine.name.lower() not in options.names:
            continue
        try:
            rows.append(_measured(engine, options.size))
            print(f"engine_start: {' | '.join(_cells(rows[-1]))}", file=sys.stderr, flush=True)
        except (BenchmarkError, HostprepError) as error:
            print(f"benchmarks: engine_start: {error}", file=sys.stderr)
            if options.names:
                return 2
    if options.output == "json":
        print(json.dumps(rows, indent=1))
    else:
        show(rows)
    return 0 if all(_is_met(row) for row in rows) else 1


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print_table("Host memory of an engine's start", _COLUMNS, [_cells(row) for row in rows])
    print(
        f"Second runs of two. vLLM's chunks: {format_bytes(CHUNK_BYTES)}. Prepared: 2 MiB pages; "
        "claiming and cleaning are before it, but within LMCache's."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = row["ratio"]
    return (
        row["engine"],
        row["timed"],
        format_bytes(row["size_bytes"]),
        _seconds(row["cold_s"][-1]),
        _seconds(row["prepared_s"][-1]),
        f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}",
        f">= {row['reach']:g}" if row["reach"] else "",
        ("yes" if _is_met(row) else "NO") if row["reach"] else "",
    )


def _is_met(row: dict[str, Any]) -> bool:
    return bool(row["ratio"] >= (row["reach"] or 0))


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _measured(engine: Engine, size_bytes: int) -> dict[str, Any]:
    python = engine.python()
    print(f"engine_start: {engine.name}", file=sys.stderr, flush=True)
    load_average = os.getloadavg()[0]
    with machine_lock():
        times = engine.measure(python, size_bytes)
    return {
        "engine": engine.name,
        "timed": engine.timed,
        "size_bytes": times.size_bytes,
        "cold_s": times.cold_s,
        "prepared_s": times.prepared_s,
        "ratio": times.cold_s[-1] / times.prepared_s[-1],
        "reach": engine.reach,
        "load_average": [round(load_average, 1), round(os.getloadavg()[0], 1)],
    }


def _options() -> argparse.Namespace:
    names = [engine.name.lower() for engine in ENGINES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_start", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ENGINE", help=f"{', '.join(names)}; or all")
    parser.add_argument("--size", default="8Gi", help="of the host memory (8Gi)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"no engine of the name {', '.join(sorted(unknown))}")
    try:
        options.size = parse_quantity(options.size) // GIB * GIB or 64 * MIB
    except HostprepError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    sys.exit(main())
