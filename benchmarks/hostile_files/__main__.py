"""Attack every file below a root for so long, and print what was done, what was slow, what broke.

`--seed S --rounds 1` repeats a finding's round: its attacker makes the same moves again, as far as
those that it makes beside an operation meet the same files; give the same `--rights` and
`--backing`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from typing import Any

from benchmarks.hostile_files.fuzzer import ENGINE, ROOT, Report, run
from benchmarks.machine import BenchmarkError
from hostprep.backing import Backing
from hostprep.console import print_table


def main() -> int:
    """Run it. Returns 1 where anything was found, 2 where it cannot run here."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was made is taken away
    print(f"seed {options.seed}", file=sys.stderr)
    begin_s = time.monotonic()
    try:
        report = run(
            seed=options.seed,
            seconds=options.seconds,
            rounds=options.rounds,
            verbose=True,
            rights=options.rights,
            backing=options.backing and Backing(options.backing),
        )
    except BenchmarkError as error:
        print(f"hostile files: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    took_s = time.monotonic() - begin_s
    if options.output == "json":
        print(json.dumps(document(report, options.seed, took_s), indent=2))
    else:
        show(report, options.seed, took_s)
    return 1 if report.findings else 0


def show(report: Report, seed: int, took_s: float) -> None:
    """Print the tables."""
    total = sum(report.operations.values())
    moves = sum(count for kind, count in report.moves.items() if kind != "refused")
    rounds = ", ".join(f"{count} as {rights}" for rights, count in sorted(report.rounds.items()))
    print(
        f"{total} operations against {moves} moves ({report.moves['refused']} more refused) in"
        f" {took_s:.0f} s; rounds: {rounds}; first seed {seed}"
    )
    print_table(
        "Operations",
        ("OPERATION", "RUNS", "MEAN", "SLOWEST", "PEAK MiB", "EXIT CODES"),
        [
            (
                name,
                str(count),
                f"{report.total_s[name] / count:.2f} s",
                f"{report.slowest_s[name]:.2f} s",
                str(report.peak_bytes[name] >> 20) if name in report.peak_bytes else "",
                _exits(report, name),
            )
            for name, count in sorted(report.operations.items())
        ],
    )
    print_table(
        "Moves", ("KIND", "TIMES"), [(kind, str(n)) for kind, n in report.moves.most_common()]
    )
    if report.wiped:
        refused = sum(report.wiped.values())
        print(f"with root's rights, {refused} pools could not be released and were wiped:")
        for why, count in report.wiped.most_common(5):
            print(f"  {count} times: {why}")
    print(f"{len(report.findings)} findings")
    for finding in report.findings.values():
        print(
            f"seed {finding.seed} ({finding.rights}), {finding.count} times:"
            f" {finding.operation}: {finding.what.strip()}"
        )


def document(report: Report, seed: int, took_s: float) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "seed": seed,
        "took_s": round(took_s, 1),
        "rounds": dict(report.rounds),
        "moves": dict(report.moves),
        "operations": {
            name: {
                "runs": count,
                "mean_s": round(report.total_s[name] / count, 3),
                "slowest_s": round(report.slowest_s[name], 3),
                "peak_bytes": report.peak_bytes.get(name),
                "exit_codes": _exits(report, name),
            }
            for name, count in sorted(report.operations.items())
        },
        "wiped": dict(report.wiped),
        "findings": [vars(finding) for finding in report.findings.values()],
    }


def _exits(report: Report, name: str) -> str:
    found = sorted((code, n) for (of, code), n in report.exits.items() if of == name)
    return ", ".join(f"{code}: {count}" for code, count in found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile_files", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, help="so many rounds, instead of a time")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--rights", choices=(ENGINE, ROOT), help="of the attacker, in all rounds")
    parser.add_argument("--backing", choices=("Base", "HugeTLB2Mi"), help="in all rounds")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
