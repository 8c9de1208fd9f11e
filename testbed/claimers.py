"""Processes that fight for regions; used by the short test and by the long benchmark."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import hostprep
from hostprep.client import lease
from hostprep.errors import BusyError


@dataclass(frozen=True, slots=True)
class ClaimerReport:
    """What one process lived through."""

    rounds: int
    partial_sets: int
    overlaps: int
    timeouts: int
    longest_wait_s: float


def run_claimers(
    root: str, pool: str, *, processes: int, rounds: int, regions: int, seed: int
) -> list[ClaimerReport]:
    """Have processes claim any 2 to 4 regions in rounds, with random pauses between locks.

    Each writes its id over the first bytes of what it holds and looks whether it stays there.
    """
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    start = context.Barrier(processes)
    children = [
        context.Process(
            target=_claimer,
            args=((root, pool), (rounds, min(4, regions), seed + index), start, results),
        )
        for index in range(processes)
    ]
    for child in children:
        child.start()
    reports = [results.get(timeout=600) for _ in children]
    for child in children:
        child.join()
    return reports


def _claimer(
    where: tuple[str, str], numbers: tuple[int, int, int], start: Any, results: Any
) -> None:
    (root, pool), (rounds, most, seed) = where, numbers
    chance = random.Random(seed)
    _pause_between_locks(chance)
    partial = overlaps = timeouts = done = 0
    longest_s = 0.0
    start.wait()
    for _ in range(rounds):
        count = chance.randint(2, most)
        begin_s = time.monotonic()
        try:
            held = hostprep.attach_many(pool, count=count, root=root, wait_timeout_s=120)
        except BusyError:
            timeouts += 1
            continue
        longest_s = max(longest_s, time.monotonic() - begin_s)
        partial += len({memory.path for memory in held}) != count
        overlaps += not _alone(held, chance)
        for memory in held:
            memory.close()
        done += 1
    results.put(ClaimerReport(done, partial, overlaps, timeouts, longest_s))


def _alone(held: list[hostprep.Attachment], chance: random.Random) -> bool:
    mine = os.getpid().to_bytes(8, "little")
    for memory in held:
        memory.buffer[:8] = mine
    time.sleep(chance.random() * 0.004)
    return all(memory.buffer[:8].tobytes() == mine for memory in held)


def _pause_between_locks(chance: random.Random) -> None:
    """Sleep between the locks of a batch, where a wrong order would deadlock or overlap."""
    lock_both = lease._lock_both

    def slow(*arguments: Any) -> Any:
        time.sleep(chance.random() * 0.001)
        return lock_both(*arguments)

    lease._lock_both = slow  # type: ignore[assignment]
