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

import hostprep
from hostprep.client.owner import Owner
from hostprep.slots import Directory, Group, Layout, Request, SlotPool
from testbed.machine import POOL

_SLOTS = 64
_SLOT_BYTES = 16384
_LAYOUT = Layout(1, (Group("kv", _SLOTS, _SLOT_BYTES),))
_SIZE_BYTES = Directory.size_bytes_for(_SLOTS, 32)
_IDENTITY = {"model": "m"}
_THREADS = 3
_LONGEST_S = 0.015
_OLD = [hashlib.sha256(b"old %d" % number).digest() for number in range(8)]
"""Committed by the first writer, and claimed by every one: never to be lost."""

mutant = ""


def _contents(key: bytes) -> bytes:
    return key * (_SLOT_BYTES // len(key))


def _write(pool: SlotPool, memory: memoryview, keys: list[bytes], *, hold: bool = False) -> None:
    end = 1 + len(keys)
    request = Request("r", end, keys, computed_tokens=1, first_block=1, reuse_limit_tokens=0)
    (claim,) = pool.claim_batch([request]).claims
    blocks = list(claim.unwritten[0])
    if mutant == "validated-before-the-copy":
        claim.commit()
    for block in blocks:
        at, contents = claim.uses[0].slots[block] * _SLOT_BYTES, _contents(keys[block])
        for piece in range(0, _SLOT_BYTES, 2048):  # in pieces: a kill lies between any two
            memory[at + piece : at + piece + 2048] = contents[piece : piece + 2048]
    claim.commit()
    if not hold:
        claim.release()


def _open(memory: memoryview) -> Directory:
    return Directory(memory[-_SIZE_BYTES:], _LAYOUT, key_bytes=32)


def _writer(memory: memoryview, seed: int, ready: int) -> None:
    sys.setswitchinterval(1e-5)
    if mutant == "not-voided-before-reuse":
        own = Directory.begin

        def begin(self: Directory, group: int, slots: list[int], generation: int) -> None:
            before = bytes(self._states)
            own(self, group, slots, generation)
            self._states[:] = before

        Directory.begin = begin  # type: ignore[assignment,method-assign]
    found = _open(memory)
    if found.identity != _IDENTITY:
        found.reset(_IDENTITY)
    pool = SlotPool(_LAYOUT, spare=0, directory=found)
    pool.recover(quarantine_s=0)
    _write(pool, memory, _OLD, hold=True)
    os.write(ready, b"1")

    def work(number: int) -> None:
        choose = random.Random(seed * _THREADS + number)
        while True:
            some = choose.sample(range(100), choose.randrange(1, 7))
            _write(pool, memory, [hashlib.sha256(b"%d" % one).digest() for one in some])

    for number in range(_THREADS):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    time.sleep(60)


def _kill_one(fd: int, size_bytes: int, seed: int) -> None:
    """Start a writer, kill it. Raises RuntimeError for one that ended by itself."""
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _writer(memoryview(mmap.mmap(fd, size_bytes)), seed, there)  # not inherited
        except BaseException:
            traceback.print_exc()  # a forked process must not go on with its parent's work
        finally:
            os._exit(1)
    os.close(there)
    try:
        started = os.read(here, 1)
        time.sleep(random.Random(seed).uniform(0, _LONGEST_S))
    finally:
        os.close(here)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not started or not os.WIFSIGNALED(status):
        raise RuntimeError("the writer ended before it was killed")


def _check(memory: memoryview) -> tuple[int, int, int, int]:
    found = _open(memory)
    (kept,) = found.read()
    wrong = sum(
        bytes(memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]) != _contents(key)
        for key, slot in zip(kept.keys, kept.slots, strict=True)
    )
    return len(kept.keys), wrong, len(set(_OLD) - set(kept.keys)), len(kept.writing)


def main(root: str, rounds: int, seed: int) -> int:
    """Print the sums over all rounds as JSON."""
    sums = [0, 0, 0, 0]
    with hostprep.attach(POOL, owner=Owner("t" * 32), root=root) as attachment:
        for number in range(rounds):
            _kill_one(attachment.fd, attachment.size_bytes, seed * 1_000_000 + number)
            sums = [a + b for a, b in zip(sums, _check(attachment.buffer), strict=True)]
    print(json.dumps(dict(zip(("valid", "wrong", "lost", "writing"), sums, strict=True))))
    return 0


if __name__ == "__main__":
    mutant = sys.argv[4] if len(sys.argv) > 4 else ""
    raise SystemExit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
