"""The work of one registration: page tables, then chunk by chunk, each in a turn of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from hostprep.client.attachment import make_present
from hostprep.cuda.chunks import ChunkPolicy, next_chunk_bytes
from hostprep.cuda.control import Control
from hostprep.cuda.driver import Driver, DriverError
from hostprep.cuda.issue_warnings import warn_once
from hostprep.cuda.progress import Tally
from hostprep.cuda.registered_ranges import Pins
from hostprep.cuda.slices import Slice
from hostprep.errors import BusyError, HostprepError
from hostprep.linux.threads import Stopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Turns(Protocol):
        """What a registration asks of a turnstile (hostprep.cuda.turnstile)."""

        def turn(
            self, timeout_s: float | None = None, stop: threading.Event | None = None
        ) -> contextlib.AbstractContextManager[None]: ...


__all__ = ["Job"]

_SKIPPED = (
    "not registered: the device uses the host's page tables (ATS) and would gain nothing; the "
    "memory stays resident because the pool is pinned"
)


class Job:
    """Done by one thread, with the context current and the thread's capture mode relaxed."""

    def __init__(
        self,
        part: Slice,
        *,
        policy: ChunkPolicy,
        pins: Pins,
        control: Control,
        turnstile: Turns | None,
        tally: Tally,
        on_chunk: Callable[[], None],
    ) -> None:
        self._part = part
        self._policy = policy
        self._pins = pins
        self._control = control
        self._turnstile = turnstile
        self._tally = tally
        self._on_chunk = on_chunk

    def register(self, driver: Driver, context: int) -> str:
        """Register the slice; return the outcome's word. Raises HostprepError: undo then."""
        traits = driver.attributes(driver.device_of(context))
        if traits.uses_host_page_tables:
            self._tally.note = _SKIPPED
            return "Skipped"
        flags = traits.registration_flags(read_only=self._part.read_only)
        most_bytes = max(self._policy.most_bytes, self._policy.step_bytes)
        warn_once(self._part.size_bytes, most_bytes, self._part.region)
        self._make_present()
        self._register_chunks(driver, flags)
        return "Registered"

    def undo(self, driver: Driver) -> HostprepError | None:
        """Take all chunks back, the last one first; return why one of them could not be."""
        error = self._pins.undo(driver)
        self._tally.done_bytes = 0
        if error is not None:
            self._tally.note = (
                f"{self._pins.count} chunks could not be unregistered and stay mapped until the "
                f"process ends: {error.message}"
            )
        return error

    def go_on(self) -> None:
        """Return once the work may go on; raises as Control does."""
        self._control.go_on(self._show_pause)
        self._tally.state = "Registering"

    def _show_pause(self) -> None:
        self._tally.state = "Paused"

    def _make_present(self) -> None:
        """Build the page tables that are missing, where the driver would do it page by page."""
        part = self._part
        while True:
            self.go_on()
            try:
                make_present(part.region, part.address, part.size_bytes, stop=self._control)
            except Stopped:
                continue
            return

    def _register_chunks(self, driver: Driver, flags: int) -> None:
        offset = last = 0
        last_s = 0.0
        while True:
            last = next_chunk_bytes(
                self._policy,
                offset_bytes=offset,
                end_bytes=self._part.size_bytes,
                last_bytes=last,
                last_s=last_s,
            )
            if last == 0:
                return
            with contextlib.ExitStack() as turn:
                while not self._enter_turn(turn):
                    pass
                last_s = self._register_chunk(driver, offset, last, flags)
            offset += last
            self._tally.add(last, last_s)
            self._on_chunk()

    def _register_chunk(self, driver: Driver, offset: int, size: int, flags: int) -> float:
        """Register one chunk; return the seconds that the call took."""
        self._tally.calls += 1
        began_s = time.monotonic()
        try:
            self._pins.register(driver, offset, size, flags)
        except DriverError as error:
            error.message = (
                f"{self._part.name}: bytes [{offset}, {offset + size}) of it at "
                f"{self._part.address + offset:#x}: {error.message}"
            )
            raise
        return time.monotonic() - began_s

    def _enter_turn(self, turn: contextlib.ExitStack) -> bool:
        """Wait for our turn; False where the wait was cut short: ask again whether to go on."""
        self.go_on()
        if self._turnstile is None:
            return True
        self._tally.state = "Waiting"
        left_s, stop = self._control.left_s(), self._control.interrupt
        try:
            turn.enter_context(self._turnstile.turn(timeout_s=left_s, stop=stop))
        except BusyError:
            return False
        if stop.is_set():  # paused or cancelled at the moment we were let in: let the next one in
            turn.close()
            return False
        self._tally.state = "Registering"
        return True
