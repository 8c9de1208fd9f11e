"""Which keys are to be reconciled next: each once, the urgent first, failures later.

A key stands for "reconcile again", whatever happened and however often. Adding it twice is one
reconcile; adding it while a worker has it is one more afterwards. All times are of the event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from hostprep.kube.backoff import Backoff

K = TypeVar("K", bound=Hashable)

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 120.0


class QueueClosed(Exception):  # noqa: N818 - an end, not an error
    """No more keys are handed out."""


class KeyedQueue(Generic[K]):
    """A queue of keys for several workers; made and used inside one event loop."""

    def __init__(self, *, jitter: Callable[[], float] = random.random) -> None:
        self._loop = asyncio.get_running_loop()
        self._jitter = jitter
        self._ready: dict[K, float] = {}
        """Key to since when it is ready."""
        self._urgent: deque[K] = deque()
        self._normal: deque[K] = deque()
        self._busy: set[K] = set()
        self._again: dict[K, bool] = {}
        """Keys added while a worker has them; whether urgently."""
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._backoffs: dict[K, Backoff] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._ready)

    def has_urgent(self) -> bool:
        """Whether an urgent key waits for a worker."""
        return any(key in self._ready for key in self._urgent)

    def oldest_s(self) -> float:
        """Return for how many seconds the longest waiting ready key has waited."""
        oldest = min(self._ready.values(), default=None)
        return 0.0 if oldest is None else self._loop.time() - oldest

    def add(self, key: K, *, urgent: bool = False) -> None:
        """Have the key reconciled as soon as a worker is free; the urgent ones first."""
        if key in self._busy:
            self._again[key] = urgent or self._again.get(key, False)
            return
        if key not in self._ready:
            self._ready[key] = self._loop.time()
            (self._urgent if urgent else self._normal).append(key)
            self._wake()
        elif urgent:
            self._urgent.append(key)  # its place among the others is skipped later

    def add_after(self, key: K, delay_s: float) -> None:
        """Have the key reconciled in so many seconds; an earlier timer of it stays."""
        if delay_s <= 0:
            self.add(key)
            return
        when = self._loop.time() + delay_s
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = self._loop.call_at(when, self._fire, key)

    def retry(self, key: K, *, at_least_s: float = 0.0) -> float:
        """Have a failed key reconciled again, later each time; returns in how many seconds."""
        if key not in self._backoffs:
            self._backoffs[key] = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S, self._jitter)
        delay_s = max(self._backoffs[key].next_s(), at_least_s)
        self.add_after(key, delay_s)
        return delay_s

    def forget_failures(self, key: K) -> None:
        """Let the next failure start with the shortest backoff again."""
        self._backoffs.pop(key, None)

    def close(self) -> None:
        """Hand out no more keys: get() raises QueueClosed, for waiting callers too."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        while self._waiters:
            self._wake()

    async def get(self) -> K:
        """Wait for a key; it is the caller's until done(). Raises QueueClosed."""
        while self._closed or (key := self._pop()) is None:
            if self._closed:
                raise QueueClosed
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._pass_on(waiter)
                raise
        self._busy.add(key)
        return key

    def done(self, key: K) -> None:
        """Take the key back from a worker."""
        self._busy.discard(key)
        urgent = self._again.pop(key, None)
        if urgent is not None:
            self.add(key, urgent=urgent)

    def _pop(self) -> K | None:
        for keys in (self._urgent, self._normal):
            while keys:
                key = keys.popleft()
                if self._ready.pop(key, None) is not None:
                    self._cancel_timer(key)
                    return key
        return None

    def _cancel_timer(self, key: K) -> None:
        """Drop the timer of a key: the reconcile that comes now will say when next."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _fire(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _pass_on(self, waiter: asyncio.Future[None]) -> None:
        """Hand the turn of a waiter that was woken and cancelled at once to the next."""
        if waiter.done() and not waiter.cancelled():
            self._wake()
