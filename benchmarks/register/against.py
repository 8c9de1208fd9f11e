"""Registering prepared memory against what engines do today, and against the driver's own ways."""

from __future__ import annotations

import tempfile
from functools import partial

from benchmarks.measure import Sample
from benchmarks.register.crew import Answer, Process, mapped, together
from benchmarks.register.rates import span
from benchmarks.register.scene import Scene, rate, slice_bytes
from hostprep.backing import MIB, Backing

_ROUNDS = 3
_PIECE_BYTES = 256 * MIB
"""Of memory by cuMemCreate: it holds the locks of all GPUs while it zeroes (research: memory)."""


def measure_today(scene: Scene) -> None:
    """One rank: the same bytes from a mapping's birth to the last page registered."""
    rank, size = scene.crew.rank(), scene.size_bytes

    def cold() -> float:
        rank.ask("map_cold", name="cold", size_bytes=size)
        try:
            took = rank.ask("register", name="cold", chunk=0)["took_s"]
            rank.ask("unregister", name="cold")
        finally:
            rank.ask("unmap", name="cold")
        return float(took)

    with scene.trying("today", "one call over cold 4 KiB memory"):
        _keep(scene, "today", "one call over cold 4 KiB memory", scene.repeat(_ROUNDS, cold))
    for backing in (Backing.HUGETLB_2MI, Backing.BASE):
        name = f"resident {backing}, mapped and registered by steered chunks"
        with scene.trying("today", name), scene.memory(backing) as path:
            _keep(scene, "today", name, scene.repeat(_ROUNDS, partial(_attach, rank, path, size)))
    with scene.trying("today", "cudaHostAlloc"):
        sample = scene.repeat(2, lambda: float(rank.ask("host_alloc", size_bytes=size)["took_s"]))
        _keep(scene, "today", "cudaHostAlloc", sample)


def _attach(rank: Process, path: str, size_bytes: int) -> float:
    """Return the seconds of mapping, page tables included, and of registering."""
    took = rank.ask("map", name="ours", path=path, offset=0, size_bytes=size_bytes)["took_s"]
    try:
        took += rank.ask("register", name="ours", chunk="steered")["took_s"]
        rank.ask("unregister", name="ours")
    finally:
        rank.ask("unmap", name="ours")
    return float(took)


def _keep(scene: Scene, measurement: str, way: str, sample: Sample) -> None:
    scene.samples[f"{measurement}: {way}"] = sample
    scene.add(
        measurement,
        way=way,
        size_bytes=scene.size_bytes,
        took_s=sample.values,
        rate_gib_s=rate(scene.size_bytes, sample),
    )


def measure_two_ranks(scene: Scene) -> None:
    """Two ranks begin at once: each all of it (today), each its slice, and slices in turns."""
    size, ranks = scene.size_bytes, scene.crew.ranks(2)
    half = slice_bytes(size, 2)
    with scene.trying("two ranks", "resident memory"), scene.memory(Backing.HUGETLB_2MI) as path:
        with scene.trying("two ranks", "each registers all in one call"):
            for rank in ranks:
                rank.ask("map", name="all", path=path, offset=0, size_bytes=size)
            whole = ("register", {"name": "all", "chunk": 0})
            _both(scene, ranks, "each all of it, in one call", *whole)
            for rank in ranks:
                rank.ask("unmap", name="all")
        with mapped(ranks, "half", path, half * 2):
            with scene.trying("two ranks", "each its slice"):
                steered = {"name": "half", "chunk": "steered"}
                _both(scene, ranks, "each its slice, at once", "register", steered)
            with (
                scene.trying("two ranks", "slices in turns"),
                tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
            ):
                turns = {"name": "half", "folder": folder}
                _both(scene, ranks, "each its slice, in turns", "register_in_turns", turns)


def _both(scene: Scene, ranks: list[Process], way: str, do: str, how: Answer) -> None:
    longest: list[float] = []

    def once() -> float:
        answers = together(ranks, do, [how for _ in ranks])
        together(ranks, "unregister", [{"name": how["name"]} for _ in ranks])
        longest.append(max(answer["longest_call_s"] for answer in answers))
        return span(answers)

    sample = scene.repeat(_ROUNDS, once)
    scene.samples[f"two ranks: {way}"] = sample
    scene.add("two ranks", way=way, took_s=sample.values, longest_call_s=max(longest))


def measure_handles(scene: Scene) -> None:
    """Map the driver's own memory in a second process, against registering the same bytes."""
    with scene.trying("handles", "cuMemCreate HOST_NUMA, exported and mapped"):
        _handles(scene)
    name = "registered: resident HugeTLB2Mi"
    with scene.trying("handles", name), scene.memory(Backing.HUGETLB_2MI) as path:
        rank = scene.crew.rank(1)
        sample = scene.repeat(_ROUNDS, lambda: _attach(rank, path, scene.size_bytes))
        _keep(scene, "handles", name, sample)


def _handles(scene: Scene) -> None:
    piece_bytes = min(_PIECE_BYTES, scene.size_bytes)
    size = scene.size_bytes // piece_bytes * piece_bytes
    owner, engine = scene.crew.ranks(2)
    piece: Answer = {"size_bytes": size, "piece_bytes": piece_bytes, "node": 0}
    taken: list[Answer] = []
    try:
        made = owner.ask("create_handles", **piece)
        scene.add("handles", way="owner creates and exports", size_bytes=size, **_seconds(made))

        def once() -> float:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                path = f"{folder}/handles"
                owner.ask("serve_handles", path=path)
                taken.append(engine.ask("import_handles", path=path, **piece))
            engine.ask("drop_handles")
            return float(taken[-1]["took_s"])

        sample = scene.repeat(_ROUNDS, once)
    finally:
        for process in (engine, owner):
            if process.is_alive:
                process.ask("drop_handles")
    _keep(scene, "handles", "second process imports and maps", sample)
    scene.rows[-1].update(_seconds(taken[-1]))


def _seconds(answer: Answer) -> dict[str, object]:
    left_out = ("begin_s", "end_s", "took_s")
    return {name: value for name, value in answer.items() if name not in left_out}
