"""Jobs over long ranges of memory, in pieces, by several threads."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue

from hostprep.errors import FailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol, TypeVar

    Item = TypeVar("Item")

    class Stop(Protocol):
        """Tells whether to stop: a threading.Event, or what is asked like one."""

        def is_set(self) -> bool:
            """Tell whether to stop."""


_SIGNAL_WITHIN_S = 0.2
"""Seconds that a main thread waits for others at a time. A signal that comes between Python's last
check for one and the wait's system call takes effect only once that wait ends."""

_NO_ITEM = object()

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


def pieces_of(size_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Return offset and size in bytes of each piece of [0, size_bytes), in order."""
    for offset in range(0, size_bytes, piece_bytes):
        yield offset, min(piece_bytes, size_bytes - offset)


def run_pieces(
    work: Work,
    *,
    size_bytes: int,
    piece_bytes: int,
    threads: int,
    on_done: Callable[[int], None] | None = None,
    stop: Stop | None = None,
) -> None:
    """Run `work` over [0, size_bytes) in pieces of `piece_bytes` by `threads` threads.

    `on_done` gets the bytes of every finished piece, in the thread that did it; `stop` is checked
    before each piece.
    Raises the first error of a thread, after all have stopped; Stopped if `stop` was set.
    Ctrl-C stops after the pieces in flight.
    """

    def do_piece(piece: tuple[int, int]) -> None:
        work(*piece)
        if on_done is not None:
            on_done(piece[1])

    def run(interrupted: Stop) -> None:
        cancelled = CancelEvent(interrupted) if stop is None else CancelEvent(interrupted, stop)
        workers = Workers(min(threads, -(-size_bytes // piece_bytes)))
        with working([workers]):
            workers.run(do_piece, pieces_of(size_bytes, piece_bytes), cancelled)

    shielded(run)


class Workers:
    """Threads that do one job after another; `working` starts and ends them."""

    def __init__(self, count: int, prepare: Callable[[], None] = lambda: None) -> None:
        """Have at least one thread; `prepare` runs in each of them first (CPUs, memory policy)."""
        self.threads = [
            threading.Thread(target=self._worker, daemon=True) for _ in range(max(1, count))
        ]
        self.prepared = threading.Semaphore(0)
        """Released by each thread once it is ready to work."""
        self._prepare = prepare
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()

    def run(self, work: Callable[[Item], None], items: Iterable[Item], stop: Stop) -> None:
        """Call `work` with every item, each in whichever thread asks next. One job at a time.

        Asking beats an even split when threads do not progress evenly, as with noisy neighbours;
        on quiet machines the two are equal. `stop` is checked before each item.
        Raises the first error of a thread, after all have stopped; Stopped if `stop` was set.
        """
        job = _Job(work, iter(items), CancelEvent(stop))
        # A thread may take several of these, and finds no items left the second time.
        for _ in self.threads:
            self._jobs.put(job)
        for _ in self.threads:
            job.done.acquire()
        job.raise_error()

    @property
    def started(self) -> list[threading.Thread]:
        """The threads that could be started."""
        return [thread for thread in self.threads if thread.ident is not None]

    def end(self) -> None:
        """Let the threads end."""
        for _ in self.threads:
            self._jobs.put(None)

    def _worker(self) -> None:
        error: BaseException | None = None
        try:
            self._prepare()
        except BaseException as raised:
            error = raised
        self.prepared.release()
        while (job := self._jobs.get()) is not None:
            job.do(error)


class _Job:
    """One call of Workers.run."""

    def __init__(
        self, work: Callable[[Any], None], items: Iterator[Any], cancelled: CancelEvent
    ) -> None:
        self.done = threading.Semaphore(0)
        self._work = work
        self._items = items
        self._lock = threading.Lock()
        self._cancelled = cancelled
        self._errors: list[BaseException] = []

    def do(self, error: BaseException | None) -> None:
        """Do items until there are none, or fail at once with the error of a thread."""
        try:
            if error is not None:
                raise error
            for item in iter(self._next, _NO_ITEM):
                if self._cancelled.is_set():
                    break
                self._work(item)
        except BaseException as raised:
            self._errors.append(raised)
            self._cancelled.set()
        finally:
            self.done.release()

    def _next(self) -> object:
        with self._lock:
            return next(self._items, _NO_ITEM)

    def raise_error(self) -> None:
        """Raise the cause, rather than the Stopped of those that it stopped."""
        if self._errors:
            causes = (each for each in self._errors if not isinstance(each, Stopped))
            raise next(causes, self._errors[0])
        if self._cancelled.is_set():
            raise Stopped


@contextlib.contextmanager
def working(crews: Sequence[Workers]) -> Iterator[None]:
    """Have the threads of all crews ready before any of them works, and until all have worked.

    A thread's stack is mapped and unmapped: each waits for all populating calls in flight, and
    later ones wait for it (QEMU: commit 037fb5eb39; cloud-hypervisor: pull request 8785).
    Where no more threads can start, those that did do the work.
    Raises FailedError (NoThread) if that leaves a crew without any.
    """
    try:
        _start(crews)
        for crew in crews:
            for _ in crew.started:
                crew.prepared.acquire()
        yield
    finally:
        for crew in crews:
            crew.end()
        for crew in crews:
            for thread in crew.started:
                thread.join()


def _start(crews: Sequence[Workers]) -> None:
    """Start the first thread of each crew, then the second of each, and so on."""
    turns = itertools.zip_longest(*(crew.threads for crew in crews))
    for thread in filter(None, itertools.chain.from_iterable(turns)):
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if all(crew.started for crew in crews):
                return
            raise FailedError(
                f"no thread to work in: {error}",
                reason="NoThread",
                remedy="raise pids.max, kubelet's podPidsLimit or kernel.threads-max",
            ) from error
