"""What waits while memory is registered: the process's own threads, and its neighbours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.gpu_day.day import Case, Day, Figures
from benchmarks.gpu_day.rates import COLD, chunk_name
from benchmarks.register.crew import MeasureError, mapped
from benchmarks.register.inside import INSIDE
from benchmarks.register.mappings import GAPS
from benchmarks.register.watching import ACTIONS
from hostprep.backing import MIB, Backing

CHUNKS = (16 * MIB, 64 * MIB, 256 * MIB, 480 * MIB)
NOBODY = "nobody registers"
_BACKINGS = (Backing.BASE, Backing.HUGETLB_2MI)
_LEAST_S = 1.5
"""For so long calls are repeated, so that the action meets them often."""
_SHORT_S = 0.02
_NAME = "stalls"


def cases(day: Day) -> Iterator[Case]:
    """Inside first: nobody has measured that yet."""
    inside_s = 4 + len(INSIDE) * (_LEAST_S + 1.5)
    yield Case(f"inside: {NOBODY}", inside_s, partial(_inside, day, _BACKINGS[0], None, "none"))
    for backing in _BACKINGS:
        for chunk in _below(day, CHUNKS):
            for gap in GAPS if chunk else GAPS[:1]:
                name = f"inside: {backing}, {chunk_name(chunk)}, gaps of {gap}"
                yield Case(name, inside_s, partial(_inside, day, backing, chunk, gap))
    yield Case(f"neighbours: {NOBODY}", 15, partial(_neighbours, day, lambda: time.sleep(0.1)))
    for backing in _BACKINGS:
        ways: tuple[int | str, ...] = ("steered", *_below(day, CHUNKS))
        for way in ways:
            name = f"neighbours: {backing}, {chunk_name(way)}"
            yield Case(name, 12, partial(_of_resident, day, backing, way))
    yield Case(f"neighbours: {COLD}", 15, partial(_cold, day))
    size = day.sizes.stall_bytes
    host_alloc = partial(_ask, day, "host_alloc", size_bytes=size)
    yield Case("neighbours: cudaHostAlloc", 15, partial(_neighbours, day, host_alloc))


def _below(day: Day, chunks: Sequence[int]) -> tuple[int, ...]:
    """Return the chunks that are not everything, and 0, which is."""
    return (*(chunk for chunk in chunks if chunk < day.sizes.stall_bytes), 0)


def _inside(day: Day, backing: Backing, chunk: int | None, gap: str) -> Figures:
    """Take the figures of each action by its name."""
    size = day.sizes.stall_bytes
    path, rank = day.memory(backing, size), day.crew.rank()
    found: Figures = {}
    least_s = _SHORT_S if day.is_short else _LEAST_S
    how = {"name": _NAME, "chunk": chunk, "gap": gap, "least_s": least_s}
    with mapped([rank], _NAME, path, size):
        for action in INSIDE:
            try:
                found[action] = rank.ask("stalls", action=action, **how)
            except MeasureError as error:
                if not rank.is_alive:
                    raise
                found[action] = {"failed": str(error)}
    return {"backing": str(backing), "chunk": chunk, "gap": gap, "inside": found}


def _of_resident(day: Day, backing: Backing, chunk: int | str) -> Figures:
    size = day.sizes.stall_bytes
    path, rank = day.memory(backing, size), day.crew.rank()

    def once() -> None:
        rank.ask("register", name=_NAME, chunk=chunk)
        rank.ask("unregister", name=_NAME)

    with mapped([rank], _NAME, path, size):
        return _neighbours(day, once)


def _cold(day: Day) -> Figures:
    rank, size = day.crew.rank(), day.sizes.stall_bytes

    def once() -> None:
        rank.ask("map_cold", name=_NAME, size_bytes=size, segments=1)
        try:
            rank.ask("register", name=_NAME, chunk=0)
            rank.ask("unregister", name=_NAME)
        finally:
            if rank.is_alive:
                rank.ask("unmap", name=_NAME)

    return _neighbours(day, once)


def _ask(day: Day, do: str, **arguments: object) -> None:
    day.crew.rank().ask(do, **arguments)


def _neighbours(day: Day, work: Callable[[], object]) -> Figures:
    """Take the figures of each neighbour by what it repeats, of all calls that met the work."""
    found: Figures = {}
    for action in ACTIONS:
        try:
            day.crew.watcher(action)
        except MeasureError as error:
            found[action] = {"failed": str(error)}
    begin_s = end_s = time.monotonic()
    while end_s - begin_s < (_SHORT_S if day.is_short else _LEAST_S):
        work()
        end_s = time.monotonic()
    for action in day.crew.watched:
        try:
            found[action] = day.crew.watcher(action).ask("watched", from_s=begin_s, to_s=end_s)
        except MeasureError as error:
            found[action] = {"failed": str(error)}
            day.crew.dismiss(action)
    return {"lasted_s": end_s - begin_s, "neighbours": found}
