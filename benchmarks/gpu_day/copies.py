"""Copies from each kind of memory, memory of the driver's own, and what many registrations cost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_day.day import Case, Day, Figures
from benchmarks.gpu_day.rates import attach_once, rate
from benchmarks.register.crew import Answer, MeasureError, Process, mapped
from hostprep.backing import KIB, MIB, Backing

DRIVERS = "cudaHostAlloc"
_ROUNDS = 5
_PIECE_BYTES = 256 * MIB
"""Of memory by cuMemCreate: it holds the locks of all GPUs while it zeroes (research: memory)."""
_CHUNKS = (0, 64 * MIB, 4 * MIB, MIB, 256 * KIB)
_LATENCY_CALLS = 2000
_NAME = "copies"


def cases(day: Day) -> Iterator[Case]:
    """Both ways, from each kind of memory; then what a second process can map; then latencies."""
    for name, words in (("driver", DRIVERS), ("plain", "not registered")):
        yield Case(f"rate: {words}", 10, partial(_made_for_it, day, name))
    for backing in Backing:
        for chunk in (0, 64 * MIB) if backing == Backing.HUGETLB_2MI else (0,):
            words = ", by 64 MiB" if chunk else ""
            yield Case(f"rate: {backing}{words}", 10, partial(_registered, day, backing, chunk))
    yield Case("handles: created, exported, mapped by a second process", 60, partial(_handles, day))
    yield Case("handles: the same bytes registered there", 20, partial(_instead, day))
    for chunk in _CHUNKS:
        if chunk >= day.sizes.stall_bytes:
            continue  # one registration, as with 0
        count = day.sizes.stall_bytes // chunk if chunk else 1
        name = f"latency: registrations: {count}"
        yield Case(name, 10 + count / 1000, partial(_latency, day, chunk, count))


def _made_for_it(day: Day, name: str) -> Figures:
    return day.crew.rank().ask("copy", name=name, **_how(day))


def _how(day: Day) -> Answer:
    return {"size_bytes": day.sizes.copy_bytes, "rounds": 1 if day.is_short else _ROUNDS}


def _registered(day: Day, backing: Backing, chunk: int) -> Figures:
    """Copy as a whole; in registrations of 64 MiB, the first of them only, as often."""
    size = day.sizes.copy_bytes
    path, rank = day.memory(backing, size), day.crew.rank()
    how = _how(day)
    with mapped([rank], _NAME, path, size):
        rank.ask("register", name=_NAME, chunk=chunk)
        how["size_bytes"] = min(size, chunk or size)
        return {**rank.ask("copy", name=_NAME, **how), "size_bytes": how["size_bytes"]}


def _handles(day: Day) -> Figures:
    """Host memory of the driver's, mapped by a second process for its GPU and its CPU."""
    day.shelf.clear()
    piece_bytes = min(_PIECE_BYTES, day.sizes.region_bytes)
    size = day.sizes.region_bytes // piece_bytes * piece_bytes
    owner, engine = day.crew.ranks(2)
    piece: Answer = {"size_bytes": size, "piece_bytes": piece_bytes, "node": 0}
    taken: list[Answer] = []
    copied: Answer = {}
    try:
        made = owner.ask("create_handles", **piece)
        for _ in range(day.rounds):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                path = f"{folder}/handles"
                owner.ask("serve_handles", path=path)
                taken.append(engine.ask("import_handles", path=path, **piece))
            copied = _copied(engine, day)
            engine.ask("drop_handles")
    finally:
        for process in (engine, owner):
            if process.is_alive:
                process.ask("drop_handles")
    steps = {name: value for name, value in taken[-1].items() if name not in _CLOCKS}
    return {
        **rate(size, [answer["took_s"] for answer in taken]),
        **{name: value for name, value in made.items() if name not in _CLOCKS},
        **steps,
        **copied,
    }


def _copied(engine: Process, day: Day) -> Answer:
    """Return rates of copies; where they are refused, the rest was measured all the same."""
    try:
        return engine.ask("copy", name="handles", **_how(day))
    except MeasureError as error:
        if not engine.is_alive:
            raise
        return {"copies": {"failed": str(error)}}


_CLOCKS = ("begin_s", "end_s", "took_s")


def _instead(day: Day) -> Figures:
    size, (path, backing) = day.sizes.region_bytes, day.best_memory()
    rank = day.crew.rank(1)
    pages = {"pages": str(backing)}
    return pages | rate(size, [attach_once(rank, path, size) for _ in range(day.rounds + 1)][1:])


def _latency(day: Day, chunk: int, count: int) -> Figures:
    """Time a launch and a small copy while so many ranges are registered in the process."""
    size = day.sizes.stall_bytes
    path, rank = day.memory(Backing.BASE, size), day.crew.rank()
    with mapped([rank], _NAME, path, size):
        told = rank.ask("register", name=_NAME, chunk=chunk)
        calls = 20 if day.is_short else _LATENCY_CALLS
        return {
            "registrations": count,
            "register_s": told["took_s"],
            "latency": rank.ask("latencies", calls=calls),
        }
