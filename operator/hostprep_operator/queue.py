"""Which keys are to be reconciled next: each once, the urgent first, failures later.

A key stands for "reconcile again", whatever happened and however often. Adding it twice is one
reconcile; adding it while a worker has it is one more afterwards. All times are of the event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
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
        self._urgent: OrderedDict[K, float] = OrderedDict()
        """Ready keys, and since when they are ready."""
        self._normal: OrderedDict[K, float] = OrderedDict()
        self._ready = asyncio.Semaphore(0)
        """One permit a ready key; one too many once the queue is closed."""
        self._busy: set[K] = set()
        self._again: dict[K, bool] = {}
        """Keys added while a worker has them; whether urgently."""
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._backoffs: dict[K, Backoff] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._urgent) + len(self._normal)

    def has_urgent(self) -> bool:
        """Whether an urgent key waits for a worker."""
        return bool(self._urgent)

    def oldest_s(self) -> float:
        """Return for how many seconds the longest waiting ready key has waited."""
        now_s = self._loop.time()
        return now_s - min([*self._urgent.values(), *self._normal.values()], default=now_s)

    def add(self, key: K, *, urgent: bool = False) -> None:
        """Have the key reconciled as soon as a worker is free; the urgent ones first."""
        if key in self._busy:
            self._again[key] = urgent or self._again.get(key, False)
            return
        if key not in self._urgent and key not in self._normal:
            (self._urgent if urgent else self._normal)[key] = self._loop.time()
            self._ready.release()
        elif urgent and key in self._normal:
            self._urgent[key] = self._normal.pop(key)

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
        self._ready.release()

    async def get(self) -> K:
        """Wait for a key; it is the caller's until done(). Raises QueueClosed."""
        await self._ready.acquire()
        if self._closed:
            self._ready.release()  # for the next who waits
            raise QueueClosed
        key, _ = (self._urgent or self._normal).popitem(last=False)
        timer = self._timers.pop(key, None)
        if timer is not None:  # the reconcile that comes now will say when next
            timer.cancel()
        self._busy.add(key)
        return key

    def done(self, key: K) -> None:
        """Take the key back from a worker."""
        self._busy.discard(key)
        urgent = self._again.pop(key, None)
        if urgent is not None:
            self.add(key, urgent=urgent)

    def _fire(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)
