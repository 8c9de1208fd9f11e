"""One job over a long range of memory, in pieces, by several threads."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Stop(Protocol):
        """Tells whether to stop: a threading.Event, or what is asked like one."""

        def is_set(self) -> bool:
            """Tell whether to stop."""


_SIGNAL_WITHIN_S = 0.2
"""Seconds that a main thread waits for others at a time. A signal that comes between Python's last
check for one and the wait's system call takes effect only once that wait ends."""

Work = Callable[[int, int], None]
"""Called with offset and size in bytes of one piece; must release the GIL to be of use."""


class Stopped(Exception):  # noqa: N818 - an outcome, not an error
    """The caller stopped it before all pieces were done."""


class CancelEvent(threading.Event):
    """Set by one of several threads that work together, or from outside through `outer`."""

    def __init__(self, *outer: Stop) -> None:
        super().__init__()
        self._outer = outer

    def is_set(self) -> bool:
        """Tell whether to stop."""
        return super().is_set() or any(stop.is_set() for stop in self._outer)


def shielded(work: Callable[[Stop], None]) -> None:
    """Run `work` where Ctrl-C cannot interrupt it; its argument says when to stop.

    KeyboardInterrupt is raised in the main thread only, and there at any step of Python's own code:
    within that of an Event it leaves its lock held, within Thread.join a thread counts as ended
    that is not (CPython 3.11, threading.py). So the work gets a thread of its own, and the main
    one waits for it by nothing but a lock in C. Raises what `work` raises; KeyboardInterrupt
    only once it has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        work(_ShieldedRun(work))  # never stopped
        return
    run = _ShieldedRun(work)
    try:
        _thread.start_new_thread(run.do, ())
        while not run.is_over:
            run.wait()
    except BaseException:
        run.is_stopped = True
        while run.is_begun and not run.is_over:
            try:
                run.wait()
            except KeyboardInterrupt:  # once more: what is in flight takes milliseconds
                continue
        raise
    if run.error is not None:
        raise run.error


class _ShieldedRun:
    """Work in a thread of its own. Plain flags, since no lock is safe from Ctrl-C."""

    def __init__(self, work: Callable[[Stop], None]) -> None:
        self._work = work
        self._over = _thread.allocate_lock()
        self._over.acquire()
        self.is_begun = self.is_over = self.is_stopped = False
        self.error: BaseException | None = None

    def is_set(self) -> bool:
        """Tell whether the work is to stop."""
        return self.is_stopped

    def do(self) -> None:
        """Do it, unless the main thread has given up before."""
        self.is_begun = True
        try:
            if not self.is_stopped:
                self._work(self)
        except BaseException as error:
            self.error = error
        finally:
            self.is_over = True
            self._over.release()

    def wait(self) -> None:
        """Wait for its end, for a while."""
        self._over.acquire(timeout=_SIGNAL_WITHIN_S)


class _Pieces:
    """Hands out the pieces of a range in order, to whichever thread asks next.

    Asking beats an even split when threads do not progress evenly, as with noisy neighbours;
    on quiet machines the two are equal.
    """

    def __init__(self, size_bytes: int, piece_bytes: int) -> None:
        self._lock = threading.Lock()
        self._offsets = iter(range(0, size_bytes, piece_bytes))
        self._size_bytes = size_bytes
        self._piece_bytes = piece_bytes

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while True:
            with self._lock:
                offset = next(self._offsets, None)
            if offset is None:
                return
            yield offset, min(self._piece_bytes, self._size_bytes - offset)


def run_pieces(
    work: Work,
    *,
    size_bytes: int,
    piece_bytes: int,
    threads: int,
    cpus: Sequence[int] = (),
    on_thread_start: Callable[[], None] | None = None,
    on_done: Callable[[int], None] | None = None,
    stop: Stop | None = None,
) -> None:
    """Run `work` over [0, size_bytes) in pieces of `piece_bytes` by `threads` threads.

    `cpus` binds the threads, `on_thread_start` runs in each of them first (memory policy),
    `on_done` gets the bytes of every finished piece, in the thread that did it; `stop` is checked
    before each piece.
    Raises the first error of a thread, after all have stopped; Stopped if `stop` was set.
    Ctrl-C stops after the pieces in flight.
    """

    def prepare_thread() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)
        if on_thread_start is not None:
            on_thread_start()

    def do_piece(offset: int, length: int) -> None:
        work(offset, length)
        if on_done is not None:
            on_done(length)

    count = max(1, min(threads, -(-size_bytes // piece_bytes)))

    def run(interrupted: Stop) -> None:
        cancelled = CancelEvent(interrupted) if stop is None else CancelEvent(interrupted, stop)
        _ThreadGroup(_Pieces(size_bytes, piece_bytes), do_piece, prepare_thread, cancelled).run(
            count
        )

    shielded(run)


@dataclass
class _ThreadGroup:
    """The threads of one run, and how they stop together."""

    _pieces: _Pieces
    _do_piece: Work
    _prepare_thread: Callable[[], None]
    _cancelled: CancelEvent
    _begin: threading.Event = field(default_factory=threading.Event)
    _errors: list[BaseException] = field(default_factory=list)

    def run(self, count: int) -> None:
        threads = [threading.Thread(target=self._worker, daemon=True) for _ in range(count)]
        started = []
        try:
            # All threads exist before any works: a thread's stack is an mmap of its own, which
            # would wait for the populating ones (seen by QEMU: commit 037fb5eb39).
            for thread in threads:
                thread.start()
                started.append(thread)
            self._begin.set()
            for thread in started:
                thread.join()
        except BaseException:
            self._cancelled.set()
            self._begin.set()
            for thread in started:
                thread.join()
            raise
        if self._errors:
            raise self._errors[0]
        if self._cancelled.is_set():
            raise Stopped

    def _worker(self) -> None:
        try:
            self._prepare_thread()
            self._begin.wait()
            for offset, length in self._pieces:
                if self._cancelled.is_set():
                    return
                self._do_piece(offset, length)
        except BaseException as error:
            self._errors.append(error)
            self._cancelled.set()
