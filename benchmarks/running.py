"""Running one benchmark by itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.measure import Result
from benchmarks.report import document, print_results


def main(run: Callable[..., list[Result]]) -> None:
    """Run it and print its rows. Exits 1 where a reach is missed, 2 where it cannot run here."""
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or ""))
    parser.add_argument("--short", action="store_true", help="only that it works: no real number")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    short = options.short
    try:
        if not short and not wait_until_quiet():
            print("benchmarks: the machine never was quiet; measured all the same", file=sys.stderr)
        results = run(short=short)
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if options.output == "json":
        print(json.dumps(document(results), indent=2))
    else:
        print_results(results)
    missed = any(result.met is False for result in results)
    raise SystemExit(1 if missed and not short else 0)
