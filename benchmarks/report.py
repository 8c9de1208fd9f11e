"""Results as a table for people, as JSON, and as a page with a chart."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Result, Sample
from hostprep.backing import MIB
from hostprep.console import print_table

_DOCS = Path(__file__).parent.parent / "docs"
_TEXT = """# Benchmarks

Every number stands beside its rival, measured in the same run in turns, because machines are
noisy: `make bench` runs them all and prints this table, `python -m benchmarks.NAME` runs one.
Values are medians, in brackets the quartiles; a ratio above 1 means that Hostprep is better.

This run: {machine}.

{table}

![Ratio of every rival to Hostprep](benchmarks.svg)

{notes}

## How it is measured

- Everybody's first turn is discarded. It touches as much memory as the later ones, so that what
  a hypervisor hands out at first touch is there; every other round runs backwards.
- The rivals are small C programs of our own (`benchmarks/rivals`) that make the same system calls
  as QEMU, vLLM and TensorRT-LLM do. In C they are at least as fast as the originals in Python.
- `populate`: ours is the whole step, from creating the file to its verified, clean, published
  name; the rival's time ends with the last page. Huge pages come from one pool that stays
  reserved. For 4 KiB pages the memory is fragmented first: it makes no difference to them, and
  keeps a hypervisor from taking free memory back between turns.
- `fragmented host`: nearly all free memory has one page held in every 2 MiB; ours is the whole
  call, from reading the policy to the published handoff.
- `attach`: a fresh process each turn. `hostprep.attach` returns with every page in the page
  tables, which the process itself checks in smaps; the rival is a fresh allocation.
  Other pages have other times for a cold 8 GiB:
  [why](benchmarks-engines.md#cold-8-gib-one-work-several-times).
- `adopt`: the whole call that finds everything right. `memory`: RssAnon, sampled each
  millisecond. `hostprep exec`: claims a region and becomes `true`.
- `directory` counts CPU time: the recovery of a million blocks by a restarted engine, and stores
  with and without a record of each block, in turns in one pool. [More](directory.md#figures).
- The fight for regions (`python -m benchmarks.claims`) is about fairness: 8 processes claim any 2
  to 4 of 6 regions, 1,000 rounds, with random pauses between the locks; nobody got a part of a set,
  shared a region or waited in vain.
- The kill run (`python -m benchmarks.kill_run`) is about crashes, not about speed: 300 steps
  killed at any instant, by the phase that was hit, and what was found broken afterwards.
- The hostile files (`python -m benchmarks.hostile_files --seconds 3600`) are about security: an
  attacker changes files below the root at random, with an engine's rights or with root's, while
  every command, the agent's worker and engines of another pool run. It prints what was run, how
  long the slowest took and what broke: a traceback, an operation above 20 s, another pool that
  failed, foreign files changed, old bytes handed out, output that is no JSON or holds control
  characters. `--seed S --rounds 1` repeats a round, as far as its moves beside an operation meet
  the same files. Run for 73 minutes in all, at low priority beside other work: 15,505 operations
  against 163,783 moves in 1,227 rounds (`--backing Base` from seeds 1000000, 2000000, 4000000 and
  5000000, `--backing HugeTLB2Mi` from 3000000 and 3100000). With an engine's rights no other pool
  was reached. With root's an agent's round, or a forced release, took a minute and more: thousands
  of files named like regions, compared with each other, and `links/` or the pool's folder looked
  through for each. All three are mended, and no lease on a file is waited for any more. One
  `prepare` took 22 s while the machine was busy, and 0.4 s when its round was repeated: since
  then the time that a command waits for a CPU is taken off. The last 9 minutes, with all of that
  but the last, found nothing.
"""

COLUMNS = ("NUMBER", "OURS", "RIVAL", "", "RATIO", "REACH", "MET")


def print_results(results: Sequence[Result], title: str = "") -> None:
    """Write the table to standard output, and what is worth knowing below it."""
    print_table(title, COLUMNS, [cells(result) for result in results])
    for number, note in _notes(results):
        print(f"{number}: {note}")


def cells(result: Result) -> tuple[str, ...]:
    """Return one row of the table."""
    met = {True: "yes", False: "NO", None: ""}[result.met]
    return (
        result.number,
        _value(result.ours, result.size_bytes),
        _value(result.rival, result.size_bytes),
        result.rival_name,
        _ratio(result.ratio),
        str(result.reach or ""),
        met,
    )


def document(results: Sequence[Result]) -> list[dict[str, object]]:
    """Return the rows for programs: medians, quartiles and every round's values."""
    return [
        {
            "number": result.number,
            "ours": _plain(result.ours),
            "rival_name": result.rival_name,
            "rival": _plain(result.rival),
            "ratio": _plain(result.ratio),
            "reach": str(result.reach) if result.reach else None,
            "judged": result.judged,
            "met": result.met,
            "size_bytes": result.size_bytes,
            "notes": result.notes,
        }
        for result in results
    ]


def write_docs(results: Sequence[Result], folder: Path = _DOCS) -> None:
    """Write the page and its chart into the folder."""
    (folder / "benchmarks.md").write_text(_page(results), encoding="utf-8")
    from benchmarks.chart import draw  # late: only this needs matplotlib

    draw(results, folder / "benchmarks.svg")


def _page(results: Sequence[Result]) -> str:
    rows = [f"| {' | '.join(cells(result))} |" for result in results]
    notes = [f"- {number}: {note}" for number, note in _notes(results)]
    header = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    table = "\n".join([header, *rows])
    return _TEXT.format(machine=_machine(), table=table, notes="\n".join(notes))


def _machine() -> str:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return (
        f"{len(names)} CPUs ({names[0] if names else platform.machine()}), {total:.0f} GiB, "
        f"Linux {platform.release()}, {platform.machine()}"
    )


def _notes(results: Sequence[Result]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((r.number, note) for r in results for note in r.notes))


def _plain(sample: Sample) -> dict[str, object]:
    low, high = sample.spread
    return {
        "median": sample.median,
        "quartiles": (low, high),
        "unit": sample.unit,
        "rounds": sample.values,
    }


def _value(sample: Sample, size_bytes: int) -> str:
    if not sample.values:
        return ""
    low, high = sample.spread
    if sample.unit == "s" and size_bytes:
        rate = size_bytes / sample.median / (1 << 30)
        return f"{_seconds(sample.median)} ({rate:.1f} GiB/s)"
    if sample.unit == "B":
        return f"{sample.median / MIB:.1f} MiB"
    return f"{_seconds(sample.median)} ({_seconds(low)} to {_seconds(high)})"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.3g} ms" if value >= 1e-3 else f"{value * 1000:.2g} ms"


def _ratio(sample: Sample) -> str:
    if not sample.values:
        return ""
    low, high = sample.spread
    digits = 0 if sample.median >= 100 else 2
    return f"{sample.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
