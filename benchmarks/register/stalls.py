"""What other processes of the node notice while one registers."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.register.crew import MeasureError, Process, mapped
from benchmarks.register.scene import Scene
from benchmarks.register.watching import ACTIONS
from hostprep.backing import Backing

_AT_LEAST_S = 2.0
"""What is shorter is repeated for that long, so that neighbours meet it often."""
_SHORT_S = 0.1


def measure_stalls(scene: Scene) -> None:
    """Every neighbour's longest call while nobody registers, and in each way to register."""
    try:
        for action in ACTIONS:
            with scene.trying("stalls", f"neighbour {action}"):
                scene.crew.watcher(action)
        _watch(scene, "nobody registers", lambda: time.sleep(0.1))
        rank = scene.crew.rank()
        _of_resident(scene, rank, Backing.HUGETLB_2MI, "steered")
        _of_resident(scene, rank, Backing.BASE, "steered")
        _of_resident(scene, rank, Backing.HUGETLB_2MI, 0)
        with scene.trying("stalls", "one call over cold 4 KiB memory"):
            _watch(scene, "one call over cold 4 KiB memory", lambda: _cold(rank, scene.size_bytes))
        with scene.trying("stalls", "cudaHostAlloc"):
            size = scene.size_bytes
            _watch(scene, "cudaHostAlloc", lambda: rank.ask("host_alloc", size_bytes=size))
    finally:
        for action in scene.crew.watched:
            scene.crew.dismiss(action)


def _of_resident(scene: Scene, rank: Process, backing: Backing, chunk: int | str) -> None:
    way = f"resident {backing}, {'one call' if chunk == 0 else 'steered chunks'}"
    with (
        scene.trying("stalls", way),
        scene.memory(backing) as path,
        mapped([rank], "stalls", path, scene.size_bytes),
    ):
        _watch(scene, way, lambda: _once(rank, chunk))


def _once(rank: Process, chunk: int | str) -> None:
    rank.ask("register", name="stalls", chunk=chunk)
    rank.ask("unregister", name="stalls")


def _cold(rank: Process, size_bytes: int) -> None:
    rank.ask("map_cold", name="cold", size_bytes=size_bytes)
    try:
        rank.ask("register", name="cold", chunk=0)
        rank.ask("unregister", name="cold")
    finally:
        rank.ask("unmap", name="cold")


def _watch(scene: Scene, way: str, work: Callable[[], object]) -> None:
    scene.clock.check()
    begin_s = time.monotonic()
    end_s = begin_s
    while end_s - begin_s < (_SHORT_S if scene.is_short else _AT_LEAST_S):
        work()
        end_s = time.monotonic()
    for action in scene.crew.watched:
        try:
            told = scene.crew.watcher(action).ask("watched", from_s=begin_s, to_s=end_s)
        except MeasureError as error:
            scene.crew.dismiss(action)
            scene.leave_out("stalls", f"neighbour {action}, from '{way}' on", str(error))
        else:
            scene.add("stalls", way=way, neighbour=action, lasted_s=end_s - begin_s, **told)
