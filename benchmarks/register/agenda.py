"""What is measured, in order of importance, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.register.against import measure_handles, measure_today, measure_two_ranks
from benchmarks.register.effects import measure_copies, measure_footprint, measure_graph
from benchmarks.register.rates import measure_chunks, measure_processes
from benchmarks.register.scene import Scene
from benchmarks.register.stalls import measure_stalls


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement."""

    name: str
    what: str
    allowed_s: float
    """Of a whole run; what is not done by then is left out, and named."""
    measure: Callable[[Scene], None]


AGENDA = (
    Item(
        "today",
        "one rank, from a mapping's birth to the last page registered: resident 2 MiB and 4 KiB "
        "pages in steered chunks, one call over cold 4 KiB memory, cudaHostAlloc",
        80,
        measure_today,
    ),
    Item(
        "stalls",
        "the longest call of four neighbours (a cheap driver call, an empty kernel, a fresh "
        "context, NVML) while nobody registers, and in each of five ways to register",
        80,
        measure_stalls,
    ),
    Item(
        "chunks",
        "GiB/s of registering and unregistering resident 2 MiB, 4 KiB, 1 GiB and THP pages in "
        "steered chunks, all at once, and in chunks of 64, 256, 480 MiB and 1 GiB",
        120,
        measure_chunks,
    ),
    Item(
        "graph",
        "a CUDA graph that another thread captures meanwhile: valid, and runs",
        10,
        measure_graph,
    ),
    Item(
        "two ranks",
        "two ranks at once: each all of the memory, each its slice, and slices in turns",
        40,
        measure_two_ranks,
    ),
    Item(
        "processes",
        "two, three and four processes at once, each with its own slice",
        60,
        measure_processes,
    ),
    Item(
        "footprint",
        "memory of the GPU and of the host's kernel per GiB registered",
        20,
        measure_footprint,
    ),
    Item(
        "copies",
        "GiB/s both ways from every kind of page, from cudaHostAlloc's memory and from memory "
        "that nobody registered",
        40,
        measure_copies,
    ),
    Item(
        "handles",
        "cuMemCreate HOST_NUMA memory, exported and mapped by a second process, against "
        "registering the same bytes there",
        70,
        measure_handles,
    ),
)
"""520 s in all: with the start of the processes under ten minutes."""
