"""The parts of the day, in the order of what would be missed most, and how long each takes."""

from __future__ import annotations

from benchmarks.gpu_day import copies, decode, facts, kill, probes, rates, stalls, tier
from benchmarks.gpu_day.day import Part

PARTS = (
    Part(
        "facts",
        "kernel, driver, zones, huge pages, rights, gVisor or not; memory touched once",
        90,
        facts.cases,
    ),
    Part("probes", "short questions to the driver, each in a process of its own", 60, probes.cases),
    Part("tier", "the tests of tier gpu with the real driver", 240, tier.cases),
    Part(
        "stalls",
        "threads of the registering process and its neighbours: chunks and gaps",
        420,
        stalls.cases,
    ),
    Part("decode", "time between tokens while memory is registered", 480, decode.cases),
    Part("rates", "pages, chunks, processes, and what engines do today", 480, rates.cases),
    Part("kill", "kill -9 while the GPU writes to host memory", 90, kill.cases),
    Part("copies", "copies from each kind of memory, and cuMemCreate", 150, copies.cases),
)
