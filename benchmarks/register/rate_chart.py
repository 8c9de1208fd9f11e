"""The chart of rates: kinds of pages by size of chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostprep.units import format_bytes

_COLORS = ("#2a7f62", "#c0392b", "#2c6fa8", "#7f8c8d")


def draw_rates(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a group of bars for each size of chunk, one bar for each kind of page."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "hostprep"  # the same numbers give the same file
    import matplotlib.pyplot as plt

    rates = {
        (row["backing"], row["chunk"]): row["register_gib_s"]
        for row in rows
        if row["measurement"] == "chunks"
    }
    backings = list(dict.fromkeys(backing for backing, _ in rates))
    chunks = sorted({chunk for _, chunk in rates}, key=_order)
    figure, axes = plt.subplots(figsize=(10, 4))
    width = 0.8 / max(1, len(backings))
    for index, backing in enumerate(backings):
        places = [place + index * width for place in range(len(chunks))]
        heights = [rates.get((backing, chunk), 0.0) for chunk in chunks]
        color = _COLORS[index % len(_COLORS)]
        axes.bar(places, heights, width=width * 0.92, label=backing, color=color)
    middle = (len(backings) - 1) * width / 2
    axes.set_xticks([place + middle for place in range(len(chunks))], [_named(c) for c in chunks])
    axes.set_ylabel("registered, GiB/s")
    axes.set_xlabel("bytes in one call")
    if backings:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def _order(chunk: int | str) -> tuple[int, int]:
    """Steered first, then by size, everything last."""
    return (0, 0) if isinstance(chunk, str) else (1, chunk) if chunk else (2, 0)


def _named(chunk: int | str) -> str:
    if isinstance(chunk, str):
        return chunk
    return format_bytes(chunk) if chunk else "everything"
