"""How long to wait before the next try, unless an event comes first."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Pauses that double from `first_s` to `most_s`, each shortened at random by up to a half."""

    first_s: float
    most_s: float
    jitter: Callable[[], float] = random.random
    failures: int = 0

    def next_s(self) -> float:
        """Count a failure; return how long to wait."""
        pause_s = min(self.most_s, self.first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return pause_s * (1.0 + self.jitter()) / 2.0

    def reset(self) -> None:
        """Start with the shortest pause again: it worked."""
        self.failures = 0


async def wait_for_event(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait until the event is set or the time is over; None waits without an end."""
    # Not wait_for: Python 3.11's loses a cancellation that comes with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
