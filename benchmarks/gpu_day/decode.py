"""Time between tokens while memory is registered in the engine's own process."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_day.day import Case, Day, Figures
from benchmarks.register.decoding import LOOPS, WAYS
from benchmarks.register.memory import NotHereError
from hostprep.backing import Backing

_ALONE_S = 3.0
_MOST_S = 30.0
"""Of registering: at a duty cycle of a twelfth 8 GiB of base pages take about that long."""
_SHORT_S = 0.1
_START_S = 20.0
"""Of a process with torch, and of its graphs."""


def cases(day: Day) -> Iterator[Case]:
    """Each loop with each way and kind of page, the one as long as the next in the worst case."""
    for loop in LOOPS:
        for backing in (Backing.BASE, Backing.HUGETLB_2MI):
            for way in WAYS:
                most_s = _MOST_S if way == "hostprep" else 5.0
                yield Case(
                    f"{loop}: {backing}, {way}",
                    _START_S + _ALONE_S + most_s,
                    partial(_decode, day, loop, backing, way),
                )


def _decode(day: Day, loop: str, backing: Backing, way: str) -> Figures:
    if loop == "torch" and importlib.util.find_spec("torch") is None:
        raise NotHereError("torch is not installed")
    size = day.sizes.region_bytes
    path = day.memory(backing)
    alone_s, most_s = (_SHORT_S, _SHORT_S) if day.is_short else (_ALONE_S, _MOST_S)
    how = {"loop": loop, "way": way, "alone_s": alone_s, "most_s": most_s}
    with day.crew.fresh() as rank:
        told = rank.ask("decode", path=path, size_bytes=size, **how)
    return {"loop": loop, "backing": str(backing), "way": way, "size_bytes": size, **told}
