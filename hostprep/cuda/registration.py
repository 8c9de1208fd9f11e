"""Registering a slice of an attachment with CUDA, in the background, chunk by chunk."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from mmap import PAGESIZE
from types import TracebackType

from hostprep.client.attach import Attachment, make_present
from hostprep.cuda.chunks import ChunkPolicy, buffer_of, next_chunk_bytes, pool_of, slice_of
from hostprep.cuda.driver import CudaAccess, Driver, DriverError, forked_child_error
from hostprep.cuda.pace import Pace
from hostprep.cuda.registration_state import (
    CancelledError,
    Control,
    Progress,
    ProgressTracker,
    RegisteredRange,
)
from hostprep.cuda.turnstile import Turnstile, patience_for
from hostprep.errors import BadInputError, BusyError, FailedError, HostprepError
from hostprep.known_issues import warn_once
from hostprep.linux.threads import Stopped
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol, TypedDict, Unpack

    from hostprep.cuda.registration_state import Board

    class Turns(Protocol):
        """What a registration needs of a turnstile (hostprep.cuda.turnstile)."""

        def turn(
            self, timeout_s: float | None = None, stop: threading.Event | None = None
        ) -> contextlib.AbstractContextManager[None]:
            """Hold a turn. Raises BusyError where none is to be had."""

    class Options(TypedDict, total=False):
        """The options of Registration."""

        driver: Driver | None
        context: int | None
        offset_bytes: int
        size_bytes: int | None
        row_bytes: int
        turnstile: Turns | None
        deadline_s: float | None
        on_registered: Callable[[], object] | None
        on_progress: Callable[[Progress], object] | None
        board: Board | None
        policy: ChunkPolicy | None
        pace: Pace | None
        grows: bool


_SKIPPED = (
    "not registered: the device uses the host's page tables (ATS) and would gain nothing; the "
    "memory stays resident because the pool is pinned"
)
"""For base pages. Huge pages are registered where the driver takes them: cheaply, since their page
table entries are few, and only then CUDA says of the memory that it is pinned."""

_UNDO_TURN_S = 5.0
_FIRST_RETRY_S = 1.0
_MOST_RETRY_S = 60.0
_NEVER = threading.Event()


class Registration:
    """One slice of one attachment, registered in this process; use it as a context manager.

    `start()` returns at once and a thread does the work; `run()` does it before it returns.
    `state` goes Idle, Registering (page tables first), Waiting (for a turn), Registering and so on,
    perhaps Paused, to one of Registered, Skipped (ATS: nothing to do), Failed and Cancelled; Closed
    after `close()`. A failure takes back all that was registered, the last chunk first; the memory
    stays attached, and the engine serves from GPU memory alone.

    `driver` and `context`: the CUDA context that uses the memory; by default the one current in
    the thread that makes this object (loading the driver module takes it 0.1 s, once). `row_bytes`:
    no chunk ends inside a row, counted from the slice's start. `turnstile.turn(...)` is held
    during each call. `deadline_s`: for the first chunk, and for each that follows, pauses and turns
    included. `pace`: how short calls are and how long the gaps, once the engine says by `step()`
    that it works; several registrations may share it. `on_registered` is called when all is
    registered, in the thread that did it with the context current: only then does `board` get
    READY, and its exception is a failure. `on_progress` gets a Progress after each chunk and at the
    end. `policy` bounds the chunks.

    With `grows`, in the background, the engine uses what is registered while the rest follows:
    from the slice's start up to `progress.mark_bytes`, but for `progress.holes`: what the driver
    refuses for good, behind a first chunk, is passed over, in at most eight places and an eighth of
    the slice. A chunk that fails for a reason that may pass is tried again, after a second, two,
    and so on to a minute, until the deadline; and what is registered by then stays so until
    `close()`, whatever becomes of the rest. It has no `on_registered`: the engine's part comes
    before.

    Raises BadInputError for an invalid slice. Anything that prevents registering, such as a
    missing driver, becomes Failed: it must not keep an engine from serving.
    """

    def __init__(
        self,
        attachment: Attachment,
        *,
        driver: Driver | None = None,
        context: int | None = None,
        offset_bytes: int = 0,
        size_bytes: int | None = None,
        row_bytes: int = 0,
        turnstile: Turns | None = None,
        deadline_s: float | None = None,
        on_registered: Callable[[], object] | None = None,
        on_progress: Callable[[Progress], object] | None = None,
        board: Board | None = None,
        policy: ChunkPolicy | None = None,
        pace: Pace | None = None,
        grows: bool = False,
    ) -> None:
        if grows and on_registered is not None:
            raise BadInputError(
                "memory that is used as it is registered cannot wait for on_registered",
                reason="GrowsAndWaits",
                remedy="do the engine's part before, or leave grows out",
            )
        part = slice_of(attachment, offset_bytes, size_bytes, row_bytes)
        self._part = part
        self._control = Control(deadline_s)
        self._tracker = ProgressTracker(part.size_bytes, board, on_progress)
        self._range = RegisteredRange(
            part.name, buffer_of(attachment), part.address, part.size_bytes
        )
        self._policy = part.policy(policy, row_bytes)
        self._pace = pace or Pace(attachment.lease_id)
        self._grows = grows
        self._turnstile = turnstile
        self._on_registered = on_registered
        self._pid = os.getpid()
        self._in_background = False
        self._worker: int | None = None
        self._ended = threading.Event()
        self._closing = threading.Lock()
        self.error: HostprepError | None = None
        """Why it is Failed or Cancelled, with the remedy."""
        self._cuda = CudaAccess(driver, context)

    @property
    def state(self) -> str:
        """The current state; no system call, no lock."""
        return self._tracker.state

    @property
    def progress(self) -> Progress:
        """How far the registration is."""
        return self._tracker.progress()

    def start(self) -> Registration:
        """Begin in the background and return at once, within 1 ms.

        Raises BadInputError where part of the range belongs to another registration of this
        process, or where this one was started before; FailedError in a forked child.
        """
        self._begin()
        self._in_background = True
        try:
            # Not threading.Thread, whose start() waits until the new thread was scheduled and has
            # let go of the GIL: milliseconds on a busy machine, in the engine's own thread.
            _thread.start_new_thread(self._work, ())
        except RuntimeError as error:  # no thread can be had: a limit of the container
            self._fail(FailedError(f"{self._part.name}: {error}", reason="NoThread"))
            self._ended.set()
        return self

    def run(self) -> Registration:
        """Register before returning, in this thread, as engines do by themselves today.

        Raises as `start` does, and the error that made it fail.
        """
        self._begin()
        self._work()
        if self.error is not None:
            raise self.error
        return self

    def step(self) -> None:
        """Say that the engine begins a step; call it at each one, it takes less than 1 µs.

        From the first step on calls are short, and have gaps as long as steps go on: the threads of
        this process wait during a call as others do. Without steps it goes at full speed.
        """
        self._pace.step()

    def pause(self) -> None:
        """Stop after the chunk that is being registered, until `resume()`."""
        self._refuse_child()
        self._control.pause()

    def resume(self) -> None:
        """Go on after `pause()`."""
        self._refuse_child()
        self._control.resume()

    def cancel(self) -> None:
        """Stop after the chunk that is being registered, and take all back; does not wait.

        Without effect once it is Registered: `close()` takes that back, and what `grows`.
        """
        self._refuse_child()
        self._control.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, good or bad; return False if that took longer than `timeout_s`."""
        self._refuse_child()
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """Take everything back, the last chunk first, and let go of the memory.

        A registration still at work is cancelled and waited for: at most one chunk, and what
        `on_registered` takes. The memory must not be in use by copies any more. Raises FailedError
        where the driver did not take a chunk back: that memory then stays mapped until the
        process ends.
        """
        self._refuse_child()
        if self.state == "Closed":
            return
        if self._worker == threading.get_ident() and not self._ended.is_set():
            raise BadInputError(
                "a registration cannot be closed by its own callbacks",
                reason="ClosedFromWithin",
                remedy="raise an exception there: that makes it fail, and takes all back",
            )
        with self._closing:
            if self._tracker.has_begun:
                self._control.cancel()
                self._ended.wait()
            if self.state in ("Registered", "Skipped"):
                self._tracker.withdrawn()
            error = self._undo()
            self._tracker.state = "Closed"
        if error is not None:
            raise error

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == self._pid:  # a forked child leaves the block too, and holds nothing
            self.close()

    def __repr__(self) -> str:
        return f"<Registration of {self._part.name}: {self.state}>"

    def _refuse_child(self) -> None:
        if os.getpid() != self._pid:
            raise forked_child_error()

    def _begin(self) -> None:
        self._refuse_child()
        if self.state != "Idle":
            raise BadInputError(
                f"{self._part.name} is {self.state} already",
                reason="AlreadyStarted",
                remedy="make a new Registration",
            )
        self._range.claim()
        self._control.start_clock()
        self._tracker.begin()

    def _work(self) -> None:
        """Register in the calling thread and set the outcome."""
        self._worker = threading.get_ident()
        try:
            self._tracker.initializing()
            with self._cuda.use() as driver:
                try:
                    outcome = self._register(driver)
                    self._call_on_registered()
                    self._finish(outcome)
                except BaseException as error:
                    self._report_failure(error)  # before all is taken back, which may take minutes
                    if not self._keeps:
                        self._unregister_all(driver)
                    raise
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception) and not self._in_background:
                raise  # Ctrl-C in `run`
        finally:
            try:
                self._tracker.show()
            finally:
                self._ended.set()  # in any case: `close` waits for it

    def _register(self, driver: Driver) -> str:
        """Register the slice; return the outcome's name. Raises HostprepError: undo then."""
        traits = driver.attributes(driver.device_of(self._cuda.context))
        if traits.uses_host_page_tables and self._part.region.page_bytes <= PAGESIZE:
            self._tracker.note = _SKIPPED
            return "Skipped"
        flags = traits.registration_flags(read_only=self._part.read_only)
        most_bytes = max(self._policy.most_bytes, self._policy.step_bytes)
        warn_once(self._part.size_bytes, most_bytes, self._part.region)
        self._make_present()
        try:
            self._register_chunks(driver, flags)
        except DriverError as error:
            if not traits.uses_host_page_tables:
                raise
            # What is in use stays registered; the rest can be used as it is.
            if not self._keeps and self._unregister_all(driver) is not None:
                raise
            self._tracker.note = f"{_SKIPPED}. {error.message}"
            return "Skipped"
        return "Registered"

    def _make_present(self) -> None:
        """Build the page tables that are missing, where the driver would do it page by page."""
        part = self._part
        while True:
            self._go_on()
            try:
                make_present(part.region, part.address, part.size_bytes, stop=self._control)
            except Stopped:
                continue
            return

    def _register_chunks(self, driver: Driver, flags: int) -> None:
        offset = last = 0
        most: int | None = None
        last_s = 0.0
        retry_s = _FIRST_RETRY_S
        policy = self._policy
        while True:
            before = policy.target_s
            policy = self._pace.chunks(self._policy, self._part.size_bytes, last, last_s)
            size = next_chunk_bytes(
                policy,
                offset_bytes=offset,
                end_bytes=self._part.size_bytes,
                last_bytes=last if policy.target_s == before else 0,
                last_s=last_s,
            )
            if size == 0:
                return
            size = min(size, most or size)
            try:
                with contextlib.ExitStack() as turn:
                    while not self._enter_turn(turn):
                        pass
                    began_s = time.monotonic()
                    last_s = self._register_chunk(driver, offset, size, flags)
            except DriverError as error:
                if error.is_of_range and self._keeps:
                    most = policy.smaller_bytes(size)
                    if most == size:
                        most = self._pass_over(error, offset, size)
                        offset += most
                    continue
                if not (self._grows and self._in_background and error.is_passing):
                    raise
                self._wait_to_try_again(error, retry_s)
                retry_s = min(2 * retry_s, _MOST_RETRY_S)
                last, last_s = size // 2, policy.target_s  # and for less memory at a time
                continue
            retry_s = _FIRST_RETRY_S
            most = 2 * most if most and 2 * most < policy.most_bytes else None
            offset += size
            last = size
            self._tracker.chunk(size, last_s)
            if offset < self._part.size_bytes:
                self._pace.wait(began_s, last_s, self._control.interrupt)
            self._control.start_clock()

    def _pass_over(self, error: DriverError, offset: int, size: int) -> int:
        """Leave a hole where a chunk failed for good; return its size.

        One that follows a hole is as long as that one, so that few calls find its end. Raises the
        error where there are too many holes.
        """
        holes = self._tracker.holes
        if holes and holes[-1][1] == offset:
            begin, end = holes[-1]
            size = min(max(size, end - begin), self._part.size_bytes - offset)
        else:
            _warn(f"{error.message}; the host tier goes on without that part")
        if not self._tracker.hole(offset, size):
            raise error
        return size

    def _wait_to_try_again(self, error: DriverError, retry_s: float) -> None:
        """Report why a chunk failed, and wait; a pause counts as waiting.

        Raises CancelledError, and the error itself once the deadline is over.
        """
        self._tracker.note = f"{error.message}; tried again in {retry_s:g} s"
        if retry_s == _FIRST_RETRY_S:
            _warn(self._tracker.note)
        until_s = time.monotonic() + retry_s
        while (now_s := time.monotonic()) < until_s:
            left_s = self._control.left_s()
            if left_s == 0.0:
                raise error
            self._go_on()
            self._control.interrupt.wait(min(until_s - now_s, left_s or retry_s))
        self._tracker.note = ""

    def _register_chunk(self, driver: Driver, offset: int, size: int, flags: int) -> float:
        """Register one chunk; return the seconds that the call took."""
        self._tracker.calls += 1
        began_s = time.monotonic()
        try:
            self._range.register(driver, offset, size, flags)
        except DriverError as error:
            error.message = (
                f"{self._part.name}: {format_bytes(size)} at its byte {offset} "
                f"({self._part.address + offset:#x}) could not be registered. {error.message}"
            )
            raise
        return time.monotonic() - began_s

    def _enter_turn(self, turn: contextlib.ExitStack) -> bool:
        """Wait for our turn; False where the wait was cut short: ask again whether to go on."""
        self._go_on()
        if self._turnstile is None:
            return True
        self._tracker.state = "Waiting"
        left_s, stop = self._control.left_s(), self._control.interrupt
        try:
            turn.enter_context(self._turnstile.turn(timeout_s=left_s, stop=stop))
        except BusyError:
            return False
        if stop.is_set():  # paused or cancelled just as our turn began: let the next one in
            turn.close()
            return False
        self._tracker.state = "Registering"
        return True

    def _go_on(self) -> None:
        """Return once the work may go on; raises as Control does."""
        self._control.go_on(self._show_pause)
        self._tracker.state = "Registering"

    def _show_pause(self) -> None:
        self._tracker.state = "Paused"

    def _call_on_registered(self) -> None:
        """Let the engine do its part, such as making the copy streams of its host tier."""
        if self._on_registered is None:
            return
        self._go_on()
        try:
            self._on_registered()
        except Exception as error:
            raise FailedError(
                f"{self._part.name}: the engine's on_registered failed: "
                f"{type(error).__name__}: {error}",
                reason="OnRegisteredFailed",
                remedy="see the engine's log; it serves from GPU memory alone",
            ) from error
        self._control.start_clock()  # what it took was the engine's, or other registrations'

    def _finish(self, outcome: str) -> None:
        """Report READY, unless the registration was cancelled before."""
        with self._control.lock:
            self._control.check()
            self._tracker.end(outcome)  # first: who sees READY may use all of it
            self._tracker.ready()

    @property
    def _keeps(self) -> bool:
        """Whether the engine may be using what is registered, so that it stays so."""
        return self._grows and self._in_background and self._range.count > 0

    def _fail(self, error: BaseException) -> None:
        """Become Failed or Cancelled."""
        if self.error is None:
            self._report_failure(error)
        self._range.release()
        self._tracker.end("Cancelled" if isinstance(error, CancelledError) else "Failed")

    def _report_failure(self, error: BaseException) -> None:
        """Keep why it failed, and report it to the other ranks, and where that is lasting."""
        if isinstance(error, HostprepError):
            self.error = error
        else:
            self.error = FailedError(
                f"{self._part.name}: {type(error).__name__}: {error}", reason="RegistrationFailed"
            )
            self.error.__cause__ = error
        self._tracker.failed(str(self.error))
        if self._keeps and not isinstance(error, CancelledError):
            _warn(f"{self.error}; what is registered by now stays so")

    def _undo(self) -> HostprepError | None:
        """Unregister what a finished registration holds; return why that failed, if it did."""
        error = None
        if self._range.count:
            try:
                with self._cuda.use() as driver:
                    error = self._unregister_all(driver)
            except HostprepError as lost:
                if not (isinstance(lost, DriverError) and lost.is_gone):
                    return lost
                self._range.forget()
        self._tracker.took_back()
        self._range.release()
        return error

    @contextlib.contextmanager
    def _turn_to_undo(self) -> Iterator[None]:
        """Hold a turn for one call, and leave the engine its gap after it if it goes on to serve.

        Where no turn is to be had it is for all that follow, too: what was registered must not stay
        so for want of turns, and there may be thousands.
        """
        with contextlib.ExitStack() as turn:
            if self._turnstile is not None:
                try:
                    turn.enter_context(self._turnstile.turn(timeout_s=_UNDO_TURN_S))
                except BusyError:
                    self._turnstile = None
            began_s = time.monotonic()
            yield
        if not self._closing.locked():
            self._pace.wait(began_s, time.monotonic() - began_s, _NEVER)

    def _unregister_all(self, driver: Driver) -> HostprepError | None:
        """Unregister all chunks, the last one first; return why one of them could not be."""
        error = self._range.undo(driver, self._turn_to_undo)
        self._tracker.took_back()
        if error is not None:
            self._tracker.note = (
                f"{self._range.count} chunks could not be unregistered and stay mapped until the "
                f"process ends: {error.message}"
            )
        return error


def _warn(text: str) -> None:
    import logging

    logging.getLogger("hostprep.register").warning(text)


def register(
    attachment: Attachment, *, mode: str = "background", **options: Unpack[Options]
) -> Registration:
    """Register an attachment, or a slice of it, with CUDA; return the Registration at work on it.

    `mode="background"` returns within a millisecond of having the driver, `mode="sync"` once all
    is registered, and raises what went wrong, as engines do by themselves. The options are those
    of Registration; without `turnstile` it takes turns at the node's, with None at none. Close
    the Registration before the engine lets go of the memory.
    """
    if mode not in ("background", "sync"):
        raise BadInputError(
            f"mode {mode!r} is unknown", reason="BadMode", remedy="give background or sync"
        )
    if "turnstile" not in options:
        # No chunk ends inside a row: a row that is all of a rank's part is one long call.
        patience = patience_for(options.get("row_bytes", 0))
        options["turnstile"] = Turnstile(
            pool_of(attachment).root, patience_s=patience, engine=attachment.lease_id
        )
    registration = Registration(attachment, **options)
    return registration.run() if mode == "sync" else registration.start()
