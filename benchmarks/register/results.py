"""A run as one document, and the ratios that promises are about."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measure import AtLeast, Below, Reach, Result, Sample
from hostprep.units import format_bytes

Document = dict[str, Any]
_OURS = "resident HugeTLB2Mi, mapped and registered by steered chunks"
_OURS_BASE = "resident Base, mapped and registered by steered chunks"
_COLD = "one call over cold 4 KiB memory"
_STALL_S = 0.25
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/sys/module/nvidia/version")


def document(
    traits: Mapping[str, object],
    rows: Sequence[object],
    left_out: Sequence[object],
    *,
    size_bytes: int,
    took_s: float,
) -> Document:
    """Return what `-o json` prints and `--from` reads."""
    return {
        "schema": "hostprep.dev/benchmarks-register/v1",
        "machine": {**machine(), **traits},
        "size_bytes": size_bytes,
        "took_s": took_s,
        "rows": list(rows),
        "left_out": list(left_out),
    }


def machine() -> dict[str, object]:
    """Return what names this machine in a report."""
    cpus = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    driver = next((lines[0] for path in _DRIVER_FILES if (lines := _lines(path))), "unknown")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "cpus": len(cpus),
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.machine(),
        "driver": driver.strip(),
    }


def headlines(run: Document) -> list[Result]:
    """Return the rows with a rival; those whose figures are not in the run are left out."""
    size = format_bytes(run["size_bytes"])
    ways = {
        f"{row['measurement']}: {row['way']}": Sample(tuple(row["took_s"]))
        for row in run["rows"]
        if row.get("took_s") and "way" in row
    }
    pairs: list[tuple[str, str, str, str, Reach | None]] = [
        (
            f"register {size} of 2 MiB pages",
            f"today: {_OURS}",
            f"today: {_COLD}",
            _COLD,
            AtLeast(5),
        ),
        (f"register {size} of 4 KiB pages", f"today: {_OURS_BASE}", f"today: {_COLD}", _COLD, None),
        (
            f"register {size} of 2 MiB pages",
            f"today: {_OURS}",
            "today: cudaHostAlloc",
            "cudaHostAlloc",
            None,
        ),
        (
            "two ranks, slices in turns",
            "two ranks: each its slice, in turns",
            "two ranks: each all of it, in one call",
            "each all of it, in one call",
            None,
        ),
        (
            f"a second process, {size}",
            "handles: registered: resident HugeTLB2Mi",
            "handles: second process imports and maps",
            "memory of cuMemCreate, imported and mapped",
            None,
        ),
    ]
    found = [
        _against(number, ways[ours], rival_name, ways[rival], reach)
        for number, ours, rival, rival_name, reach in pairs
        if ours in ways and rival in ways
    ]
    return [*found, *_stalls(run)]


def _against(number: str, ours: Sample, name: str, rival: Sample, reach: Reach | None) -> Result:
    """Return the ratio of medians: rounds were not made in turns, and their numbers may differ."""
    middle = statistics.median(ours.values)
    ratio = Sample(tuple(value / middle for value in rival.values), "×")
    return Result(number, ours, name, rival, ratio, reach)


def _stalls(run: Document) -> Iterator[Result]:
    worst = {
        (row["way"], row["neighbour"]): row["worst_s"]
        for row in run["rows"]
        if row["measurement"] == "stalls"
    }
    ours_way, cold_way = "resident HugeTLB2Mi, steered chunks", _COLD
    for neighbour in sorted({neighbour for _, neighbour in worst}):
        ours, rival = worst.get((ours_way, neighbour)), worst.get((cold_way, neighbour))
        if ours is None or rival is None:
            continue
        yield Result(
            f"worst stall: {neighbour}",
            Sample((ours,)),
            cold_way,
            Sample((rival,)),
            Sample((rival / ours,), "×"),
            # A fresh context takes as long by itself; the goal is about those that run.
            None if neighbour == "context" else Below(_STALL_S, "250 ms"),
        )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
