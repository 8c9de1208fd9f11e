"""The directory of blocks: how long a million are recovered, and what a store pays for its records.

CPU time of the calling thread: a busy machine does not count. A store is what a scheduler and a
worker do for 512 new blocks: claim, copy, commit, release. The one with a directory and the one
without take turns, and each ratio is of two that follow each other.
"""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable, Sequence

from benchmarks.measure import AtLeast, Below, Reach, Result, Sample, alternate, compare
from benchmarks.running import main
from hostprep.backing import KIB
from hostprep.slots import Directory, Group, Layout, Request, SlotPool
from hostprep.units import format_bytes

_KEY_BYTES = 36
"""vLLM's: a SHA-256 and the number of a group of layers."""
_BLOCKS = 512
"""Of one request."""
_SMALL_BYTES = 64 * KIB
"""Smaller than any model's: to see what a record costs."""
_BLOCK_BYTES = 192 * KIB
"""16 tokens of a model with half a billion parameters (Qwen2.5-0.5B)."""
_COPIED_BYTES = 192 << 20
"""Where blocks are copied to: more than caches hold."""
_LIMIT_S = 1.0
_MOST_COST = 1.05


def run(*, short: bool = False) -> list[Result]:
    """Measure both. Returns a row for each."""
    slots = 20_000 if short else 1_000_000
    rounds = 2 if short else 60
    return [
        _recovery(slots, rounds=2 if short else 9),
        _store(slots, _BLOCK_BYTES, AtLeast(1 / _MOST_COST), rounds=rounds),
        _store(slots, _SMALL_BYTES, None, rounds=rounds),
    ]


def _recovery(slots: int, *, rounds: int) -> Result:
    layout, memory = _region(slots)
    before = _directory(memory, layout)
    before.reset({"model": "m"})
    _fill(before, slots)
    spent_s, wall_s = [], []
    for _ in range(rounds):
        pool = SlotPool(layout, hash_bytes=_KEY_BYTES, directory=_directory(memory, layout))
        begin_s, wall_begin_s = time.thread_time(), time.perf_counter()
        found = pool.recover()
        spent_s.append(time.thread_time() - begin_s)
        wall_s.append(time.perf_counter() - wall_begin_s)
        assert found == slots
        del pool  # not while the next one is timed
    wall = Sample(tuple(wall_s))
    each = (Directory.size_bytes_for(slots, _KEY_BYTES) - Directory.size_bytes_for(0)) / slots
    return compare(
        f"recover {slots:,} blocks",
        Sample(tuple(spent_s)),
        "1 s",
        Sample((_LIMIT_S,) * rounds),
        reach=Below(_LIMIT_S, "1 s"),
        notes=(
            f"CPU time; {wall.median:.2f} s in all, other load included",
            f"the directory takes {each:.0f} bytes a slot",
        ),
    )


def _store(slots: int, block_bytes: int, reach: Reach | None, *, rounds: int) -> Result:
    layout, memory = _region(slots)
    directory = _directory(memory, layout)
    directory.reset({"model": "m"})
    source = random.Random(1).randbytes(block_bytes)
    blocks = memoryview(mmap.mmap(-1, _COPIED_BYTES))
    pool = SlotPool(layout, hash_bytes=_KEY_BYTES, directory=directory)
    recorded, plain = alternate(
        [_storing(pool, each, blocks, source) for each in (directory, None)], rounds=rounds
    )
    more_us = (recorded.median - plain.median) / _BLOCKS * 1e6
    return compare(
        f"store {_BLOCKS} blocks of {format_bytes(block_bytes)}",
        recorded,
        "without a directory",
        plain,
        reach=reach,
        notes=(f"CPU time; {more_us:.2f} µs a block for its record",),
    )


def _storing(
    pool: SlotPool, directory: Directory | None, blocks: memoryview, source: bytes
) -> Callable[[], float]:
    """Return a store with the directory or without, in one pool: where its arrays lie matters."""
    keys, size, places = (
        random.Random(0 if directory is None else 1),
        len(source),
        len(blocks) // len(source),
    )

    def store() -> float:
        pool._directory = directory  # noqa: SLF001
        hashes = [keys.randbytes(_KEY_BYTES) for _ in range(_BLOCKS)]
        begin_s = time.thread_time()
        (claim,) = pool.claim_batch([Request("r", _BLOCKS, hashes)]).claims
        for slot in claim.uses[0].slots:
            at = slot % places * size
            blocks[at : at + size] = source
        claim.commit()
        claim.release()
        return time.thread_time() - begin_s

    return store


def _region(slots: int) -> tuple[Layout, memoryview]:
    """Return a layout, and memory for its directory: the slots' own bytes are not needed."""
    size_bytes = Directory.size_bytes_for(slots, _KEY_BYTES)
    return Layout(1, (Group("chunks", slots, 1),)), memoryview(mmap.mmap(-1, size_bytes))


def _directory(memory: memoryview, layout: Layout) -> Directory:
    return Directory(memory, layout, key_bytes=_KEY_BYTES)


def _fill(directory: Directory, slots: int) -> None:
    """Record every slot, request by request, as if all had been stored in their turn."""
    chance = random.Random(2)
    for first in range(0, slots, _BLOCKS):
        some: Sequence[int] = range(first, min(first + _BLOCKS, slots))
        generation = directory.new_generation()
        directory.begin(0, some, generation)
        directory.finish(0, some, [chance.randbytes(_KEY_BYTES) for _ in some], generation)
        directory.touch(0, some, again=bool(chance.randrange(2)))


if __name__ == "__main__":
    main(run)
