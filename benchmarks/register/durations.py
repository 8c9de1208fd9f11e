"""Many durations as three numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

Window = tuple[float, float]
"""A begin and an end, in seconds of one clock."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of all does not exceed (nearest rank).

    `ordered` is sorted and not empty.
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(durations_s: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile, the worst and the number of them; not of none."""
    ordered = sorted(durations_s)
    return {
        "p50_s": percentile(ordered, 0.50),
        "p99_s": percentile(ordered, 0.99),
        "worst_s": ordered[-1],
        "calls": len(ordered),
    }


def within(calls: Sequence[Window], windows: Sequence[Window]) -> list[float]:
    """Return the durations of the calls that overlap one of the windows; both are in order."""
    found: list[float] = []
    first = 0
    for begin_s, end_s in calls:
        while first < len(windows) and windows[first][1] <= begin_s:
            first += 1
        if first < len(windows) and windows[first][0] < end_s:
            found.append(end_s - begin_s)
    return found
