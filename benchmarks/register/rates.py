"""How fast resident memory is registered and unregistered: pages, chunks, processes."""

from __future__ import annotations

from benchmarks.measure import Sample
from benchmarks.register.crew import Answer, Process, mapped, together
from benchmarks.register.scene import Scene, rate, slice_bytes
from hostprep.backing import GIB, MIB, Backing

BACKINGS = (Backing.HUGETLB_2MI, Backing.BASE, Backing.HUGETLB_1GI, Backing.THP)
"""In order of interest: the last ones are left out first where time is short."""
CHUNKS: tuple[int | str, ...] = ("steered", 0, 256 * MIB, 64 * MIB, 480 * MIB, GIB)
"""Bytes in one call; 0 is everything; `steered` is what Hostprep does."""
_CHUNKS_TOGETHER: tuple[int | str, ...] = ("steered", 0)
_ROUNDS = 2


def measure_chunks(scene: Scene) -> None:
    """One process, every kind of page, every size of chunk."""
    for backing in BACKINGS:
        with scene.trying("chunks", str(backing)), scene.memory(backing) as path:
            (rank,) = scene.crew.ranks(1)
            with mapped([rank], "rates", path, scene.size_bytes):
                for chunk in CHUNKS:
                    if isinstance(chunk, int) and chunk >= scene.size_bytes:
                        continue  # the same as everything
                    with scene.trying("chunks", f"{backing}, chunks of {chunk or 'everything'}"):
                        _measure(scene, "chunks", [rank], backing, chunk)


def measure_processes(scene: Scene) -> None:
    """Two to four processes at once, each with its own slice of the same file."""
    for backing in BACKINGS[:2]:
        with scene.trying("processes", str(backing)), scene.memory(backing) as path:
            for count in (2, 4, 3):
                with scene.trying("processes", f"{backing}, {count} processes"):
                    ranks = scene.crew.ranks(count)
                    size = slice_bytes(scene.size_bytes, count) * count
                    with mapped(ranks, "rates", path, size):
                        for chunk in _CHUNKS_TOGETHER:
                            _measure(scene, "processes", ranks, backing, chunk)


def _measure(
    scene: Scene, measurement: str, ranks: list[Process], backing: Backing, chunk: int | str
) -> None:
    """Add a row: bytes of all processes over the time from the first start to the last end."""
    longest: list[float] = []
    undone: list[float] = []
    calls = 0

    def once() -> float:
        nonlocal calls
        answers = together(ranks, "register", [{"name": "rates", "chunk": chunk} for _ in ranks])
        back = together(ranks, "unregister", [{"name": "rates"} for _ in ranks])
        longest.append(max(answer["longest_call_s"] for answer in answers))
        undone.append(span(back))
        calls = sum(answer["calls"] for answer in answers)
        return span(answers)

    sample = scene.repeat(_ROUNDS, once)
    counted = len(sample.values)
    size = slice_bytes(scene.size_bytes, len(ranks)) * len(ranks)
    scene.add(
        measurement,
        backing=str(backing),
        chunk=chunk,
        processes=len(ranks),
        size_bytes=size,
        calls=calls,
        register_s=sample.values,
        register_gib_s=rate(size, sample),
        unregister_gib_s=rate(size, Sample(tuple(undone[-counted:]))),
        longest_call_s=max(longest[-counted:]),
    )


def span(answers: list[Answer]) -> float:
    """Return the seconds from the first begin to the last end."""
    ends, begins = (a["end_s"] for a in answers), (a["begin_s"] for a in answers)
    return float(max(ends) - min(begins))
