"""A process is killed whose GPU writes into its region: until when does the memory change.

Hostprep hands a region on once its lock is free and its owner's processes are gone. Were bytes
written after that, they would be written into the next owner's memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.gpu_day.day import Case, Day, Figures
from benchmarks.gpu_day.sizes import text_of
from benchmarks.register.crew import MeasureError, Process
from hostprep.backing import MIB, Backing
from hostprep.linux.memory import map_shared

_ROUNDS = 5
_PLACES = 64
_QUIET_S = 2.0
"""So long the bytes must not change any more before the watch ends."""
_SHORT_QUIET_S = 0.1
_MOST_S = 60.0
_COPYING_S = 0.5
_PART_BYTES = 64 * MIB
_NAME = "kill"


def cases(day: Day) -> Iterator[Case]:
    """Take a few rounds of each kind of page: what is looked for may be rare."""
    for backing in (Backing.BASE, Backing.HUGETLB_2MI):
        for number in range(day.rounds if day.is_short else _ROUNDS):
            name = f"{backing}, round {number + 1}"
            yield Case(name, 15, partial(_kill, day, backing))


@dataclass(slots=True)
class Watch:
    """When things happened, in seconds after the signal; -1: not seen."""

    leader_zombie_s: float = -1.0
    """The process's first thread: others may still be inside the driver."""
    all_threads_dead_s: float = -1.0
    lock_free_s: float = -1.0
    last_change_s: float = 0.0
    changes: int = 0
    changed_when: set[str] = field(default_factory=set)
    """What had been seen before the memory was looked at, and looked at once more."""
    longest_gap_s: float = 0.0
    """Between two looks: how exact the times are."""

    @property
    def seen(self) -> set[str]:
        """Return what has happened."""
        times = {
            "zombie": self.leader_zombie_s,
            "death": self.all_threads_dead_s,
            "lock": self.lock_free_s,
        }
        return {name for name, at_s in times.items() if at_s >= 0}

    def is_over(self, now_s: float, quiet_s: float) -> bool:
        """Tell whether nothing more is to be expected."""
        ends = (self.leader_zombie_s, self.all_threads_dead_s, self.lock_free_s)
        return min(ends) >= 0 and now_s - max(*ends, self.last_change_s) > quiet_s


def _kill(day: Day, backing: Backing) -> Figures:
    size = day.sizes.copy_bytes
    path = day.memory(backing, size)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = map_shared(fd, size)
        try:
            with day.crew.fresh() as victim:
                _begin_copies(victim, path, size)
                if not _changes_within(memory, _MOST_S):
                    raise MeasureError("no byte changed while copies ran")
                time.sleep(0.05 if day.is_short else _COPYING_S)
                watch = _watch(victim.pid, fd, memory, day)
        finally:
            memory.close()
    finally:
        os.close(fd)
    return {
        "backing": str(backing),
        "size_bytes": size,
        "leader_zombie_s": watch.leader_zombie_s,
        "all_threads_dead_s": watch.all_threads_dead_s,
        "lock_free_s": watch.lock_free_s,
        "last_change_s": watch.last_change_s,
        "changes": watch.changes,
        "exact_to_s": watch.longest_gap_s,
        "is_written_after_zombie": "zombie" in watch.changed_when,
        "is_written_after_lock": "lock" in watch.changed_when,
        "is_written_after_death": "death" in watch.changed_when,
    }


def _begin_copies(victim: Process, path: str, size_bytes: int) -> None:
    victim.ask("hold_lock", path=path)
    victim.ask("map", name=_NAME, path=path, offset=0, size_bytes=size_bytes)
    victim.ask("register", name=_NAME, chunk="steered")
    victim.ask("keep_copying", name=_NAME, part_bytes=min(_PART_BYTES, size_bytes))


def _bytes_at_places(memory: mmap.mmap) -> bytes:
    """Return some bytes of the memory, the first and the last among them."""
    with memoryview(memory) as view, view[:: len(memory) // _PLACES] as places:
        return places.tobytes() + view[-1:].tobytes()


def _changes_within(memory: mmap.mmap, seconds: float) -> bool:
    before, limit_s = _bytes_at_places(memory), time.monotonic() + seconds
    while time.monotonic() < limit_s:
        if _bytes_at_places(memory) != before:
            return True
        time.sleep(0.001)
    return False


def _watch(pid: int, fd: int, memory: mmap.mmap, day: Day) -> Watch:
    """Kill, and look at all three as often as possible."""
    watch = Watch()
    quiet_s = _SHORT_QUIET_S if day.is_short else _QUIET_S
    before = _bytes_at_places(memory)
    begin_s = last_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while True:
        now_s = time.monotonic() - begin_s
        watch.longest_gap_s = max(watch.longest_gap_s, now_s + begin_s - last_s)
        last_s = now_s + begin_s
        # A change between two looks at the memory is one after what the first of them followed.
        seen_before = watch.seen
        _look_at_process(watch, pid, now_s)
        if watch.lock_free_s < 0 and _is_free(fd):
            watch.lock_free_s = now_s
        bytes_now = _bytes_at_places(memory)
        if bytes_now != before:
            before = bytes_now
            watch.last_change_s = time.monotonic() - begin_s
            watch.changes += 1
            watch.changed_when |= seen_before
        if watch.is_over(now_s, quiet_s):
            return watch
        if now_s > _MOST_S:
            raise MeasureError(f"the process has not gone for {_MOST_S:.0f} s")


def _look_at_process(watch: Watch, pid: int, now_s: float) -> None:
    if watch.leader_zombie_s < 0:
        state = text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1]
        if state in (["Z"], ["X"], []):
            watch.leader_zombie_s = now_s
    if watch.all_threads_dead_s < 0:
        dead = None
        with contextlib.suppress(ChildProcessError):
            # It stays a zombie: whoever started it asks for its status as well.
            dead = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if dead is not None:
            watch.all_threads_dead_s = now_s


def _is_free(fd: int) -> bool:
    """Tell whether the lease's lock can be had, and let go of it at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True
