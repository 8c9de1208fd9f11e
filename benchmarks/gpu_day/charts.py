"""The charts of the page: rates, stalls inside the process, time between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.journal import Row
from benchmarks.register.decoding import WAYS
from benchmarks.register.inside import INSIDE
from benchmarks.register.mappings import GAPS
from hostprep.units import format_bytes

_COLORS = ("#2a7f62", "#c0392b", "#2c6fa8", "#7f8c8d", "#b07d2b")


def draw_rates(rows: Sequence[Row], path: Path) -> bool:
    """Draw a group of bars for each size of chunk, one bar for each kind of page."""
    rates = {
        (row.figures["backing"], row.figures["chunk"]): row.figures["gib_s"]
        for row in _measured(rows, "rates", "calls: ")
        if row.figures.get("processes") == 1
    }
    if not rates:
        return False
    backings = list(dict.fromkeys(backing for backing, _ in rates))
    chunks = list(dict.fromkeys(chunk for _, chunk in rates))
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10, 4))
    width = 0.8 / len(backings)
    for index, backing in enumerate(backings):
        places = [place + index * width for place in range(len(chunks))]
        heights = [rates.get((backing, chunk), 0.0) for chunk in chunks]
        axes.bar(places, heights, width=width * 0.92, label=backing, color=_color(index))
    middle = (len(backings) - 1) * width / 2
    axes.set_xticks([place + middle for place in range(len(chunks))], chunks)
    axes.set_ylabel("registered, GiB/s")
    axes.set_xlabel("bytes in one call")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, [axes], path)
    return True


def draw_stalls(rows: Sequence[Row], path: Path) -> bool:
    """Draw the worst and the 99th percentile by chunk: a panel for each action, a line a gap."""
    ours = [row.figures for row in _measured(rows, "stalls", "inside: ") if row.figures["chunk"]]
    if not ours:
        return False
    backings = list(dict.fromkeys(one["backing"] for one in ours))
    chunks = sorted({one["chunk"] for one in ours})
    plt = _pyplot()
    figure, grid = plt.subplots(
        len(backings),
        len(INSIDE),
        figsize=(3 * len(INSIDE), 2.8 * len(backings)),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for across, backing in zip(grid, backings, strict=True):
        for axes, action in zip(across, INSIDE, strict=True):
            for index, gap in enumerate(GAPS):
                for name, style in (("worst_s", "-"), ("p99_s", ":")):
                    values = _by_chunk(ours, backing, action, gap, name)
                    shown = [chunk for chunk in chunks if chunk in values]
                    axes.plot(
                        [chunks.index(chunk) for chunk in shown],
                        [1000 * values[chunk] for chunk in shown],
                        style,
                        color=_color(index),
                        label=f"gaps of {gap}, {name.removesuffix('_s')}",
                    )
            axes.set_title(f"{action}, {backing}", size=9)
            axes.set_yscale("log")
            axes.set_xticks(range(len(chunks)), [format_bytes(chunk) for chunk in chunks], size=7)
    grid[0][0].set_ylabel("ms")
    grid[0][-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    _save(figure, [axes for across in grid for axes in across], path)
    return True


def _by_chunk(
    ours: Sequence[dict[str, Any]], backing: str, action: str, gap: str, name: str
) -> dict[int, float]:
    return {
        one["chunk"]: one["inside"][action][name]
        for one in ours
        if one["backing"] == backing and one["gap"] == gap and name in one["inside"].get(action, {})
    }


def draw_decode(rows: Sequence[Row], path: Path) -> bool:
    """Draw the time between tokens, worst and 99th percentile, for each way to register."""
    ours = [row.figures for row in _measured(rows, "decode", "torch: ")] or [
        row.figures for row in _measured(rows, "decode", "")
    ]
    if not ours:
        return False
    backings = list(dict.fromkeys(one["backing"] for one in ours))
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10, 4))
    width = 0.8 / len(backings)
    for index, backing in enumerate(backings):
        figures = {one["way"]: one["meanwhile"] for one in ours if one["backing"] == backing}
        shown = [(place, figures[way]) for place, way in enumerate(WAYS) if way in figures]
        places = [place + index * width for place, _ in shown]
        worst = [1000 * one["worst_s"] for _, one in shown]
        usual = [1000 * one["p99_s"] for _, one in shown]
        axes.bar(places, worst, width=width * 0.92, color=_color(index), alpha=0.4)
        axes.bar(places, usual, width=width * 0.92, color=_color(index), label=backing)
    middle = (len(backings) - 1) * width / 2
    axes.set_xticks([place + middle for place in range(len(WAYS))], list(WAYS), size=8)
    axes.set_yscale("log")
    axes.set_ylabel("ms between tokens: p99, worst (pale)")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, [axes], path)
    return True


def _measured(rows: Sequence[Row], part: str, prefix: str) -> list[Row]:
    return [
        row
        for row in rows
        if row.part == part and row.outcome == "measured" and row.case.startswith(prefix)
    ]


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "hostprep"  # the same numbers give the same file
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, all_axes: Sequence[Any], path: Path) -> None:
    for axes in all_axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    _pyplot().close(figure)
