"""The chart of the ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import AtLeast, Result

_MET, _MISSED, _INFORMS = "#2a7f62", "#c0392b", "#7f8c8d"


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw one bar a row: how many times better than the rival, with its reach as a mark."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "hostprep"  # the same numbers give the same file
    import matplotlib.pyplot as plt

    rows = [result for result in results if result.rival.unit == "s"][::-1]
    figure, axes = plt.subplots(figsize=(10, 0.45 * len(rows) + 1.2))
    places = range(len(rows))
    ratios = [result.ratio.median for result in rows]
    axes.barh(places, ratios, color=[_color(result) for result in rows], height=0.62)
    for place, result in zip(places, rows, strict=True):
        axes.plot(result.ratio.spread, (place, place), color="black", linewidth=1.2)
        axes.text(max(*result.ratio.spread, 1) * 1.08, place, _label(result), va="center", size=8)
        if isinstance(result.reach, AtLeast):
            bound = (result.reach.bound, result.reach.bound)
            axes.plot(bound, (place - 0.4, place + 0.4), color="black", linestyle=":")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(right=max([1.0, *ratios]) * 12)
    axes.set_yticks(places, [f"{r.number}\nagainst {r.rival_name}" for r in rows], size=7)
    axes.set_xlabel("times better than the rival (dotted: the reach)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def _color(result: Result) -> str:
    return {True: _MET, False: _MISSED, None: _INFORMS}[result.met]


def _label(result: Result) -> str:
    return f"{result.ratio.median:.{0 if result.ratio.median >= 100 else 2}f}×"
