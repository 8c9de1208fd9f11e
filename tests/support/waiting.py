"""Waiting for what must come true elsewhere: by looking again, never by sleeping long enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_for"]

Found = TypeVar("Found")


def wait_for(
    look: Callable[[], Found | None],
    timeout_s: float = 10.0,
    *,
    every_s: float = 0.05,
    why: str = "it never came true",
) -> Found:
    """Call `look` until it returns something true, and return that.

    Raises AssertionError with `why` and the last thing seen, or the last exception, in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        failure: Exception | None = None
        try:
            seen = look()
        except Exception as error:
            failure = error
        else:
            if seen:
                return seen
        if time.monotonic() > deadline:
            last = repr(failure) if failure else repr(seen)
            raise AssertionError(f"{why} in {timeout_s:.0f} s; last seen: {last}") from failure
        time.sleep(every_s)
