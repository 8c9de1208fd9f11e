"""Cold start against attach, by size: the picture docs/pictures/cold-start.svg and its numbers.

    sudo .venv/bin/python -m benchmarks.cold_start            measure, then draw
    .venv/bin/python -m benchmarks.cold_start --draw          draw the numbers that are there

Sizes that fit are measured, the best of several runs of each, since what else runs on a machine
only ever adds time. Beyond them a straight line through the smallest and the largest goes on:
populating and attaching both take their time page by page. It is dashed, and said to be so.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attach import attach_in_a_process
from benchmarks.machine import free_bytes, own_node
from benchmarks.rival import run_rival
from hostprep.api.pool_resource import spec_from_options
from hostprep.backing import GIB, MIB
from hostprep.node.apply.service import Node
from hostprep.units import format_bytes, format_seconds

_SIZES = tuple(GIB << shift for shift in range(4))
_BEYOND = tuple(GIB << shift for shift in (6, 8, 10))
_RUNS = 4
_BACKING = "HugeTLB2Mi"
_PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
_NUMBERS, _PICTURE = _PICTURES / "cold-start.json", _PICTURES / "cold-start.svg"
_KINDS = (
    ("cold_s", "#c2410c", "today: fresh 4 KiB pages, one thread"),
    ("scrub_s", "#64748b", "attach to a used region, zeroed first"),
    ("attach_s", "#0f766e", "attach to a clean region"),
)

Row = dict[str, float]


def main() -> None:
    """Measure all sizes that fit, write the numbers and the picture; or only draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_start", description=__doc__)
    parser.add_argument("--draw", action="store_true", help="from the numbers that are there")
    if not parser.parse_args().draw:
        run = _measure()
        _NUMBERS.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    draw(json.loads(_NUMBERS.read_text(encoding="utf-8")), _PICTURE)


def _measure() -> dict[str, Any]:
    with own_node() as node:
        rows = [_measure_size(size, node) for size in _SIZES if size < free_bytes() * 3 // 4]
    return {
        "made": f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}",
        "backing": _BACKING,
        "runs": _RUNS,
        "rows": rows,
    }


def _measure_size(size_bytes: int, node: Node) -> Row:
    """Cold first, while no region takes memory: the largest size need fit only once."""
    file = Path(node.root).parent / "cold.mmap"
    cold = []
    for _ in range(_RUNS):
        try:
            cold.append(run_rival("engines", "vllm", str(file), size_bytes, 2 * MIB, 1))
        finally:
            file.unlink(missing_ok=True)
    spec = spec_from_options(name="picture", size=str(size_bytes), backings=_BACKING, regions=1)
    clean, used = [], []
    node.prepare([spec])
    try:
        for _ in range(_RUNS):
            node.prepare([spec])  # adopts the region, and zeroes it where it was used
            clean.append(attach_in_a_process(node, spec.name))
            used.append(attach_in_a_process(node, spec.name))
    finally:
        node.release([spec.name])
    row = {"size_bytes": size_bytes, "cold_s": min(cold)}
    return {**row, "scrub_s": min(used), "attach_s": min(clean)}


def extrapolate(rows: Sequence[Mapping[str, float]], kind: str, size_bytes: int) -> float:
    """Go on with the straight line through the smallest and the largest size; in seconds."""
    first, last = rows[0], rows[-1]
    slope = (last[kind] - first[kind]) / (last["size_bytes"] - first["size_bytes"])
    return last[kind] + slope * (size_bytes - last["size_bytes"])


def draw(run: Mapping[str, Any], path: Path) -> None:
    """Draw a run as its numbers say it: measured as points and lines, the rest dashed."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "hostprep"  # the same numbers give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    rows = run["rows"]
    sizes = [row["size_bytes"] for row in rows]
    figure, axes = plt.subplots(figsize=(8.6, 4.3), layout="constrained")
    for kind, color, words in _KINDS:
        measured = [row[kind] for row in rows]
        beyond = [extrapolate(rows, kind, size) for size in _BEYOND]
        axes.plot(sizes, measured, "o-", color=color, lw=2, ms=4, label=words)
        line = axes.plot((sizes[-1], *_BEYOND), (measured[-1], *beyond), "o--", color=color)[0]
        line.set(linewidth=1.3, markersize=4, markerfacecolor="white", zorder=1)
        for size, seconds in ((sizes[-1], measured[-1]), *zip(_BEYOND, beyond, strict=True)):
            axes.annotate(
                format_seconds(seconds),
                (size, seconds),
                xytext=(0, 6),
                textcoords="offset points",
                ha="right",
                size=8,
                color=color,
            )
    axes.axvspan(sizes[-1] * 1.4, _BEYOND[-1] * 1.6, color="#f1f5f9", zorder=0)
    axes.text(_BEYOND[-1] * 1.4, 1.4e-3, "extrapolated, not measured", ha="right", size=8)
    ticks = (*sizes, *_BEYOND)
    axes.set(xscale="log", yscale="log", xlim=(sizes[0] / 1.3, _BEYOND[-1] * 1.6), ylim=(1e-3, 4e3))
    axes.set_xticks(ticks, [format_bytes(size) for size in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(
        (0.01, 0.1, 1, 10, 60, 600), ("10 ms", "100 ms", "1 s", "10 s", "1 min", "10 min")
    )
    axes.set_yticks([], minor=True)
    axes.grid(axis="y", color="#e2e8f0")
    axes.set_title(
        "An engine starts: time until every page of its host memory is there", loc="left"
    )
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
