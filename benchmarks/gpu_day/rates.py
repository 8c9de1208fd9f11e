"""How fast memory is registered: pages, chunks, processes, and what engines do today."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu_day.day import Case, Day, Figures
from benchmarks.gpu_day.sizes import text_of
from benchmarks.register.crew import Answer, MeasureError, Process, mapped, together
from benchmarks.register.memory import NotHereError
from hostprep.backing import GIB, MIB, Backing
from hostprep.units import format_bytes

BACKINGS = (Backing.HUGETLB_2MI, Backing.BASE, Backing.HUGETLB_1GI, Backing.THP)
"""In order of interest."""
CHUNKS: tuple[int | str, ...] = ("steered", 0, 16 * MIB, 64 * MIB, 256 * MIB, 480 * MIB, GIB)
"""Bytes in one call; 0 is everything; `steered` is what Hostprep does before an engine serves."""
OURS = ("HugeTLB2Mi, steered", "Base, steered")
COLD = "one call over cold 4 KiB memory"
VLLM_32 = "vLLM 0.32: populated by one thread, then one call"
VLLM_33 = "vLLM 0.33: 32 segments, populated by one thread, then one call"
_SEGMENTS = 32
_THREADS = 4
_NAME = "rates"


def cases(day: Day) -> Iterator[Case]:
    """Memory that it takes first, in fresh processes; then from a mapping's birth; then calls."""
    size = day.sizes.region_bytes
    for backing in BACKINGS[:2]:
        yield Case(f"footprint: {backing}", 10, partial(_footprint, day, backing))
    for backing in (*BACKINGS[:2], BACKINGS[2]):
        ours = partial(_from_birth, day, backing)
        yield Case(f"from birth: {backing}, steered", day.seconds(size, 4), ours)
    for name, segments, is_populated in (
        (COLD, 1, False),
        (VLLM_32, 1, True),
        (VLLM_33, _SEGMENTS, True),
    ):
        today = partial(_today, day, segments, is_populated=is_populated)
        yield Case(f"from birth: {name}", day.seconds(size, 12), today)
    yield Case("from birth: cudaHostAlloc", day.seconds(size, 9), partial(_host_alloc, day))
    yield from _cases_of_calls(day, size)
    for way in ("all of it each, in one call", "a slice each, at once", "a slice each, in turns"):
        yield Case(f"two ranks: {way}", day.seconds(size, 10), partial(_two_ranks, day, way))
    yield Case("large", day.seconds(day.sizes.large_bytes, 3), partial(_large, day))


def _cases_of_calls(day: Day, size: int) -> Iterator[Case]:
    for backing in BACKINGS:
        for chunk in CHUNKS:
            if isinstance(chunk, int) and chunk >= size:
                continue  # the same as everything
            name = f"calls: {backing}, {chunk_name(chunk)}"
            yield Case(name, day.seconds(size, 4), partial(_calls, day, backing, chunk, 1))
        name = f"calls: {backing}, {_THREADS} threads of one process, 256 MiB"
        yield Case(name, day.seconds(size, 4), partial(_threads, day, backing))
    for backing in BACKINGS[:2]:
        for count in (2, 3, 4):
            for chunk in ("steered", 0):
                name = f"calls: {backing}, {chunk_name(chunk)}, {count} processes"
                calls = partial(_calls, day, backing, chunk, count)
                yield Case(name, day.seconds(size, 6), calls)


def chunk_name(chunk: int | str) -> str:
    """Return how a chunk is called in the names of cases."""
    if isinstance(chunk, str):
        return chunk
    return format_bytes(chunk) if chunk else "one call"


def _footprint(day: Day, backing: Backing) -> Figures:
    """Memory of the GPU and of the host's kernel that goes while memory is registered."""
    size = day.sizes.region_bytes
    path = day.memory(backing)
    with day.crew.fresh() as rank, mapped([rank], _NAME, path, size):
        rank.ask("free_bytes")
        gpu_free, host_free = rank.ask("free_bytes")["free_bytes"], _free_bytes()
        rank.ask("register", name=_NAME, chunk="steered")
        gpu_taken = gpu_free - rank.ask("free_bytes")["free_bytes"]
        return {
            "size_bytes": size,
            "gpu_bytes_per_gib": gpu_taken * GIB // size,
            "host_bytes_per_gib": (host_free - _free_bytes()) * GIB // size,
        }


def _free_bytes() -> int:
    """Return the host's free memory: what the kernel takes for itself is missing there."""
    lines = text_of(Path("/proc/meminfo")).splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemFree:"))


def _repeated(day: Day, measure: Callable[[], float]) -> list[float]:
    """Return the seconds of the rounds, after one that does not count; fewer where time is up."""
    took: list[float] = []
    for turn in range(day.rounds + (not day.is_short)):
        if took and day.left_s <= 0:
            break
        value = measure()
        if turn or day.is_short:
            took.append(value)
    if not took:
        raise MeasureError("time was up")
    return took


def rate(size_bytes: int, took_s: list[float]) -> Figures:
    """Return the figures of some rounds."""
    return {
        "size_bytes": size_bytes,
        "took_s": took_s,
        "gib_s": size_bytes / GIB / statistics.median(took_s),
    }


def _from_birth(day: Day, backing: Backing) -> Figures:
    """Take the seconds of mapping resident memory, page tables included, and of registering it."""
    size, path, rank = day.sizes.region_bytes, day.memory(backing), day.crew.rank()
    return rate(size, _repeated(day, lambda: attach_once(rank, path, size)))


def attach_once(rank: Process, path: str, size_bytes: int) -> float:
    """Map, register by steered chunks, and undo both; return the seconds until registered."""
    took = rank.ask("map", name=_NAME, path=path, offset=0, size_bytes=size_bytes)["took_s"]
    try:
        took += rank.ask("register", name=_NAME, chunk="steered")["took_s"]
        rank.ask("unregister", name=_NAME)
    finally:
        if rank.is_alive:
            rank.ask("unmap", name=_NAME)
    return float(took)


def _today(day: Day, segments: int, *, is_populated: bool) -> Figures:
    """Do what engines do: fresh shared memory, populated first or not, then one call."""
    day.shelf.clear()
    size, rank = day.sizes.region_bytes, day.crew.rank()
    populated: list[float] = []

    def once() -> float:
        took = rank.ask("map_cold", name=_NAME, size_bytes=size, segments=segments)["took_s"]
        try:
            if is_populated:
                populated.append(rank.ask("populate", name=_NAME, by_all_cpus=False)["took_s"])
                took += populated[-1]
            took += rank.ask("register", name=_NAME, chunk=0)["took_s"]
            rank.ask("unregister", name=_NAME)
        finally:
            if rank.is_alive:
                rank.ask("unmap", name=_NAME)
        return float(took)

    took_s = _repeated(day, once)
    more = {"populate_s": populated[-len(took_s) :]} if populated else {}
    return {**rate(size, took_s), **more}


def _host_alloc(day: Day) -> Figures:
    day.shelf.clear()
    size, rank = day.sizes.region_bytes, day.crew.rank()
    ask = partial(rank.ask, "host_alloc", size_bytes=size)
    return rate(size, _repeated(day, lambda: float(ask()["took_s"])))


def _calls(day: Day, backing: Backing, chunk: int | str, count: int) -> Figures:
    """Register and unregister resident memory, by processes that each have a slice of it."""
    size = slice_bytes(day.sizes.region_bytes, count) * count
    path, ranks = day.memory(backing), day.crew.ranks(count)
    how: Answer = {"do": "register", "name": _NAME, "chunk": chunk}
    about = {"backing": str(backing), "chunk": chunk_name(chunk), "processes": count}
    return about | _in_all(day, ranks, path, size, how)


def _in_all(
    day: Day,
    ranks: list[Process],
    path: str,
    size: int,
    how: Answer,
    *,
    same: bool = False,
) -> Figures:
    """Give a command to all at once, and undo it; `same`: each has all of the memory."""
    longest: list[float] = []
    undone: list[float] = []
    calls = 0
    arguments = dict(how)
    do = str(arguments.pop("do"))

    def once() -> float:
        nonlocal calls
        answers = together(ranks, do, [arguments for _ in ranks])
        undo: Answer = {"name": _NAME}
        undone.append(span(together(ranks, "unregister", [undo for _ in ranks])))
        longest.append(max(answer["longest_call_s"] for answer in answers))
        calls = sum(answer["calls"] for answer in answers)
        return span(answers)

    with contextlib.ExitStack() as held:
        if same:
            for rank in ranks:
                held.enter_context(mapped([rank], _NAME, path, size))
        else:
            held.enter_context(mapped(ranks, _NAME, path, size))
        took_s = _repeated(day, once)
    counted = len(took_s)
    return {
        **rate(size, took_s),
        "unregister_gib_s": size / GIB / statistics.median(undone[-counted:]),
        "calls": calls,
        "longest_call_s": max(longest[-counted:]),
    }


def _threads(day: Day, backing: Backing) -> Figures:
    """Chunks that several threads of one process take (LightLLM issue 1527)."""
    size, path, rank = day.sizes.region_bytes, day.memory(backing), day.crew.rank()
    how: Answer = {"name": _NAME, "chunk": min(256 * MIB, size // _THREADS), "threads": _THREADS}

    def once() -> float:
        took = float(rank.ask("register_by_threads", **how)["took_s"])
        rank.ask("unregister", name=_NAME)
        return took

    with mapped([rank], _NAME, path, size):
        return {"backing": str(backing), **rate(size, _repeated(day, once))}


def _two_ranks(day: Day, way: str) -> Figures:
    """Two ranks begin at once: each all of it, as engines do, each its slice, and in turns."""
    size = slice_bytes(day.sizes.region_bytes, 2) * 2
    (path, backing), ranks = day.best_memory(), day.crew.ranks(2)
    how: Answer = {"do": "register", "name": _NAME, "chunk": "steered"}
    is_all = way.startswith("all of it")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if is_all:
            how["chunk"] = 0
        elif way.endswith("in turns"):
            how = {"do": "register_in_turns", "name": _NAME, "folder": folder}
        return {"pages": str(backing)} | _in_all(day, ranks, path, size, how, same=is_all)


def _large(day: Day) -> Figures:
    """Whether the rate holds with more memory."""
    size = day.sizes.large_bytes
    if size == day.sizes.region_bytes:
        raise NotHereError("there is too little memory for more than a region")
    (path, backing), rank = day.best_memory(size), day.crew.rank()
    begin_s = time.monotonic()
    with mapped([rank], _NAME, path, size):
        mapped_s = time.monotonic() - begin_s
        told = rank.ask("register", name=_NAME, chunk="steered")
    return {
        "pages": str(backing),
        **rate(size, [told["took_s"]]),
        "map_s": mapped_s,
        "calls": told["calls"],
        "longest_call_s": told["longest_call_s"],
    }


def span(answers: list[Answer]) -> float:
    """Return the seconds from the first begin to the last end."""
    ends, begins = (a["end_s"] for a in answers), (a["begin_s"] for a in answers)
    return float(max(ends) - min(begins))


def slice_bytes(size_bytes: int, count: int) -> int:
    """Return one process's share, in pages of 2 MiB."""
    return size_bytes // count // (2 * MIB) * (2 * MIB)
