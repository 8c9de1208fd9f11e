"""What registering leaves behind while it lasts: graphs, memory, and the rate of copies."""

from __future__ import annotations

from pathlib import Path

from benchmarks.register.crew import mapped
from benchmarks.register.scene import Scene
from hostprep.backing import GIB, Backing

_COPY_BYTES = GIB
_COPY_ROUNDS = 5


def measure_graph(scene: Scene) -> None:
    """Capture a graph meanwhile: it stays valid; without the relaxed mode is the control."""
    rank = scene.crew.rank()
    for relaxed in (True, False):
        way = "relaxed capture mode (ours)" if relaxed else "no exchange (control)"
        with (
            scene.trying("graph", way),
            scene.memory(Backing.HUGETLB_2MI) as path,
            mapped([rank], "graph", path, scene.size_bytes),
        ):
            scene.add("graph", way=way, **rank.ask("capture", name="graph", relaxed=relaxed))


def measure_footprint(scene: Scene) -> None:
    """Memory of the GPU and of the host's kernel that goes while memory is registered."""
    rank = scene.crew.rank()
    for backing in (Backing.HUGETLB_2MI, Backing.BASE):
        with (
            scene.trying("footprint", str(backing)),
            scene.memory(backing) as path,
            mapped([rank], "footprint", path, scene.size_bytes),
        ):
            gib = scene.size_bytes / GIB
            gpu_free, host_free = rank.ask("free_bytes")["free_bytes"], _free_bytes()
            rank.ask("register", name="footprint", chunk="steered")
            gpu_taken = gpu_free - rank.ask("free_bytes")["free_bytes"]
            scene.add(
                "footprint",
                backing=str(backing),
                size_bytes=scene.size_bytes,
                gpu_bytes_per_gib=gpu_taken / gib,
                host_bytes_per_gib=(host_free - _free_bytes()) / gib,
            )


def _free_bytes() -> int:
    """Return the host's free memory: what the kernel takes for itself is missing there."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemFree:"))


def measure_copies(scene: Scene) -> None:
    """Copy 1 GiB from and to each kind of memory, and memory that nobody registered."""
    rank = scene.crew.rank()
    how = {"size_bytes": min(_COPY_BYTES, scene.size_bytes), "rounds": _COPY_ROUNDS}
    for name, words in (("driver", "cudaHostAlloc"), ("plain", "not registered")):
        with scene.trying("copies", words):
            scene.add("copies", memory=words, **rank.ask("copy", name=name, **how))
    for backing in Backing:
        with (
            scene.trying("copies", str(backing)),
            scene.memory(backing, how["size_bytes"]) as path,
            mapped([rank], "copies", path, how["size_bytes"]),
        ):
            rank.ask("register", name="copies", chunk=0)
            rates = rank.ask("copy", name="copies", **how)
            scene.add("copies", memory=f"registered {backing}", **rates)
