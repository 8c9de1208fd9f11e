"""Whether the work goes on: paused, cancelled, out of time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hostprep.errors import FailedError

__all__ = ["CancelledError", "Control"]


class CancelledError(FailedError):
    """Somebody cancelled the registration, or closed it before it was done."""

    default_reason = "Cancelled"


class Control:
    """Told by any thread, asked by the one that works, between two calls to the driver."""

    def __init__(self, deadline_s: float | None) -> None:
        self.lock = threading.Condition()
        """Held while the outcome is decided: a cancellation comes before it, or too late."""
        self.interrupt = threading.Event()
        """Set while there is a reason to stop waiting for whatever is waited for."""
        self._deadline_s = deadline_s
        self._ends_at_s: float | None = None
        self._is_paused = False
        self._is_cancelled = False

    def start_clock(self) -> None:
        """Count the deadline from now."""
        if self._deadline_s is not None:
            self._ends_at_s = time.monotonic() + self._deadline_s

    def pause(self) -> None:
        """Stop before the next chunk."""
        with self.lock:
            self._is_paused = True
            self.interrupt.set()

    def resume(self) -> None:
        """Go on after a pause."""
        with self.lock:
            self._is_paused = False
            if not self._is_cancelled:
                self.interrupt.clear()
            self.lock.notify_all()

    def cancel(self) -> None:
        """Stop before the next chunk, for good."""
        with self.lock:
            self._is_cancelled = True
            self.interrupt.set()
            self.lock.notify_all()

    def left_s(self) -> float | None:
        """Return the time until the deadline; None without one."""
        if self._ends_at_s is None:
            return None
        return max(0.0, self._ends_at_s - time.monotonic())

    def is_set(self) -> bool:
        """Tell whether to look up from the work and ask `go_on`: interrupted, or out of time."""
        return self.interrupt.is_set() or self.left_s() == 0.0

    def go_on(self, on_pause: Callable[[], None]) -> None:
        """Return once the work may go on; `on_pause` is called before waiting for that.

        Raises CancelledError, or FailedError when the deadline is over: a pause counts too.
        """
        with self.lock:
            while True:
                self.check()
                if not self._is_paused:
                    return
                on_pause()
                self.lock.wait(self.left_s())

    def check(self) -> None:
        """Raise CancelledError or FailedError if the work is not to go on; with the lock held."""
        if self._is_cancelled:
            raise CancelledError("the registration was cancelled")
        if self.left_s() == 0.0:
            raise FailedError(
                f"memory was not registered within {self._deadline_s:g} s",
                reason="DeadlineExceeded",
                remedy="give it more time, or a turnstile that is wider",
            )
