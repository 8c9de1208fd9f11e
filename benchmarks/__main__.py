"""Run all benchmarks, or those that are named, and print one table."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.measure import Result
from benchmarks.report import document, print_results, write_docs

NAMES = (
    "populate_2m",
    "populate_4k",
    "fragmented",
    "attach",
    "adopt",
    "memory",
    "startup",
    "directory",
)


def main() -> int:
    """Return 0 where every reach is met, 1 where one is missed, 2 where it cannot run here."""
    options = _options()
    results: list[Result] = []
    for name in options.names or NAMES:
        quiet = options.short or wait_until_quiet()
        print(f"{name}{'' if quiet else ' (the machine never was quiet)'}", file=sys.stderr)
        try:
            results += importlib.import_module(f"benchmarks.{name}").run(short=options.short)
        except BenchmarkError as error:
            print(f"benchmarks: {name}: {error}", file=sys.stderr)
            return 2
    if options.output == "json":
        print(json.dumps(document(results), indent=2))
    else:
        print_results(results, "Hostprep beside its rivals, in one run")
    if options.write_docs:
        write_docs(results)
    return 1 if not options.short and any(result.met is False for result in results) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=(*NAMES, []), metavar="NAME", help=str(NAMES))
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--short", action="store_true", help="only that it works: no real number")
    parser.add_argument(
        "--write-docs", action="store_true", help="docs/benchmarks.md and its chart"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
