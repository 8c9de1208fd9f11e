"""Writers with the real protocol, each killed at a random moment; what they left is checked.

Run as a program: `python -m tests.kernel.slots.killed_writer ROOT ROUNDS SEED [MUTANT]` prints how
many records it believed, how many of them were wrong, and how many old ones were lost. It is a
process of its own since it forks: a writer that had to import Python's modules takes too long for
thousands of rounds.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass

import hostprep
from hostprep.client.owner import Owner
from hostprep.slots import Directory, Group, Layout, Request, SlotPool
from testbed.machine import POOL

_SLOTS = 64
_SLOT_BYTES = 16384
_LAYOUT = Layout(1, (Group("kv", _SLOTS, _SLOT_BYTES),))
_SIZE_BYTES = Directory.size_bytes_for(_SLOTS, 32)
_THREADS = 3
_LONGEST_S = 0.015
_LONGEST_START_S = 0.002
_EARLY = 0.25
"""Share of the writers that are killed while they begin: they recover, or reset."""
_OTHER_WEIGHTS = 0.1
"""Share of the writers that begin with other weights than the one before."""
_OLD = [hashlib.sha256(b"old %d" % number).digest() for number in range(8)]
"""Committed by the first writer with its weights, and claimed by every one: never to be lost."""

mutant = ""


def _contents(key: bytes, weights: str) -> bytes:
    return hashlib.sha256(key + weights.encode()).digest() * (_SLOT_BYTES // 32)


class _Writer:
    """One engine's scheduler and ranks, as threads of one process."""

    def __init__(self, memory: memoryview, weights: str) -> None:
        self._memory = memory
        self._weights = weights
        directory = _open(memory)
        if directory.identity != {"weights": weights}:
            directory.reset({"weights": weights})
        self._pool = SlotPool(_LAYOUT, spare=0, directory=directory)
        self._pool.recover(quarantine_s=0)

    def write(self, keys: list[bytes], *, hold: bool = False) -> None:
        end = 1 + len(keys)
        request = Request("r", end, keys, computed_tokens=1, first_block=1, reuse_limit_tokens=0)
        (claim,) = self._pool.claim_batch([request]).claims
        blocks = list(claim.unwritten[0])
        if mutant == "validated-before-the-copy":
            claim.commit()
        for block in blocks:
            at = claim.uses[0].slots[block] * _SLOT_BYTES
            contents = _contents(keys[block], self._weights)
            for piece in range(0, _SLOT_BYTES, 2048):  # in pieces: a kill lies between any two
                self._memory[at + piece : at + piece + 2048] = contents[piece : piece + 2048]
        claim.commit()
        if not hold:
            claim.release()

    def work(self, seed: int) -> None:
        choose = random.Random(seed)
        while True:
            some = choose.sample(range(100), choose.randrange(1, 7))
            self.write([hashlib.sha256(b"%d" % one).digest() for one in some])


def _open(memory: memoryview) -> Directory:
    return Directory(memory[-_SIZE_BYTES:], _LAYOUT, key_bytes=32)


def _break() -> None:
    """Take one step out of the protocol."""
    if mutant == "not-voided-before-reuse":
        own_begin = Directory.begin

        def begin(self: Directory, group: int, slots: list[int], generation: int) -> None:
            before = bytes(self._states)
            own_begin(self, group, slots, generation)
            self._states[:] = before

        Directory.begin = begin  # type: ignore[assignment,method-assign]
    if mutant == "reset-leaves-the-records":
        own_reset = Directory.reset

        def reset(self: Directory, identity: dict[str, str]) -> None:
            """Neither their states change nor the epoch: either would do."""
            os.urandom = lambda size: b"\1" * size
            self._header[32:36] = bytes(4)
            before = bytes(self._states)
            own_reset(self, identity)
            self._states[:] = before

        Directory.reset = reset  # type: ignore[assignment,method-assign]


def _run(memory: memoryview, weights: str, seed: int, ready: int) -> None:
    sys.setswitchinterval(1e-5)
    _break()
    writer = _Writer(memory, weights)
    writer.write(_OLD, hold=True)
    os.write(ready, b"1")
    for number in range(_THREADS):
        one = seed * _THREADS + number
        threading.Thread(target=writer.work, args=(one,), daemon=True).start()
    time.sleep(60)


def _kill_one(fd: int, size_bytes: int, weights: str, seed: int) -> bool:
    """Start a writer, kill it. Returns whether it was up.

    Raises RuntimeError for one that ended by itself.
    """
    choose = random.Random(seed)
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _run(memoryview(mmap.mmap(fd, size_bytes)), weights, seed, there)  # not inherited
        except BaseException:
            traceback.print_exc()  # a forked process must not go on with its parent's work
        finally:
            os._exit(1)
    os.close(there)
    is_up = False
    try:
        if choose.random() < _EARLY:
            time.sleep(choose.uniform(0, _LONGEST_START_S))
        else:
            is_up = bool(os.read(here, 1))
            time.sleep(choose.uniform(0, _LONGEST_S))
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        is_up = is_up or bool(os.read(here, 1))
        os.close(here)
    if not os.WIFSIGNALED(status):
        raise RuntimeError("the writer ended before it was killed")
    return is_up


@dataclass
class _Sums:
    valid: int = 0
    """Records that are believed."""
    wrong: int = 0
    """Those whose slot has other bytes."""
    lost: int = 0
    """Old blocks that are not believed any more."""
    writing: int = 0
    """Slots in which a writer was killed."""
    early: int = 0
    """Writers that were killed before they were up."""
    voided: int = 0
    """Times that nothing was left of other weights."""


def _check(memory: memoryview, sums: _Sums, committed: str) -> None:
    """Count what is believed. `committed`: by which weights old blocks are to be there."""
    found = _open(memory)
    (kept,) = found.read()
    if found.identity is None:
        sums.voided += 1
    weights = (found.identity or {}).get("weights", "")
    sums.valid += len(kept.slots)
    sums.writing += len(kept.writing)
    sums.wrong += sum(
        bytes(memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]) != _contents(key, weights)
        for key, slot in kept.slots.items()
    )
    if weights == committed:
        sums.lost += len(set(_OLD) - set(kept.slots))


def main(root: str, rounds: int, seed: int) -> int:
    """Print the sums over all rounds as JSON."""
    sums, choose = _Sums(), random.Random(seed)
    weights, committed = 1, ""
    with hostprep.attach(POOL, owner=Owner("t" * 32), root=root) as attachment:
        for number in range(rounds):
            weights += choose.random() < _OTHER_WEIGHTS
            one = seed * 1_000_000 + number
            if _kill_one(attachment.fd, attachment.size_bytes, str(weights), one):
                committed = str(weights)
            else:
                sums.early += 1
            _check(attachment.buffer, sums, committed)
    print(json.dumps(asdict(sums)))
    return 0


if __name__ == "__main__":
    mutant = sys.argv[4] if len(sys.argv) > 4 else ""
    raise SystemExit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
