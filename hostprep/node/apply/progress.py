"""Progress of apply: what reporters receive, and the tracker of one pool's part of a plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hostprep.backing import Backing
from hostprep.node.plan.actions import Action, AdoptRegion, CreateRegion, ScrubRegion

OnProgress = Callable[[str, int, int], None]
"""Takes the pool, the bytes done and the bytes to be done; called from several threads."""


class ProgressReporter:
    """Reports nothing by itself. Called from several threads."""

    def begin(self, action: Action) -> None:
        """Report that an action starts."""

    def advance(self, action: Action, size_bytes: int) -> None:
        """Report that so many more bytes of the action are done."""

    def end(self, action: Action, *, took_s: float) -> None:
        """Report that the action is done, after so many seconds."""


class ProgressTracker(ProgressReporter):
    """Tracks one pool's part of a plan: seconds by kind of step, bytes populated, bytes done.

    Keeps `scrubbing` at the (pool, region) pairs that are being zeroed now.
    """

    def __init__(self, pool: str, on_progress: OnProgress, scrubbing: set[tuple[str, str]]) -> None:
        self._pool = pool
        self._on_progress = on_progress
        self._scrubbing = scrubbing
        self._lock = threading.Lock()
        self._total_bytes = 0
        self._done_bytes = 0
        self._seconds: dict[str, float] = {}
        self._populating: tuple[float, float] | None = None
        self._populated: dict[Backing, int] = {}

    def expect(self, actions: tuple[Action, ...]) -> None:
        """Begin to count towards the bytes of these actions."""
        long = [a for a in actions if isinstance(a, CreateRegion | ScrubRegion)]
        self._total_bytes = sum(action.expected_bytes for action in long)
        self._done_bytes = 0

    @property
    def steps(self) -> tuple[tuple[str, float], ...]:
        """Seconds by kind of step, in the order in which they began.

        Regions are populated at the same time on several nodes: theirs is the time from the
        first one's begin to the last one's end.
        """
        seconds = dict(self._seconds)
        if self._populating is not None:
            seconds["Populate"] = self._populating[1] - self._populating[0]
        return tuple((kind, round(took_s, 3)) for kind, took_s in seconds.items())

    @property
    def populated(self) -> tuple[tuple[Backing, int], ...]:
        """Bytes made resident, by backing."""
        return tuple(self._populated.items())

    def begin(self, action: Action) -> None:
        """Note when an action starts."""
        if isinstance(action, ScrubRegion):
            self._scrubbing.add((action.pool, action.region))
        if isinstance(action, CreateRegion):
            with self._lock:
                now_s = time.monotonic()
                self._populating = self._populating or (now_s, now_s)
                self._seconds.setdefault("Populate", 0.0)
            self._on_progress(self._pool, self._done_bytes, self._total_bytes)

    def advance(self, action: Action, size_bytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done_bytes += size_bytes
            if isinstance(action, CreateRegion):
                done = self._populated.get(action.backing, 0)
                self._populated[action.backing] = done + size_bytes
                began_s = self._populating[0] if self._populating else time.monotonic()
                self._populating = (began_s, time.monotonic())
        self._on_progress(self._pool, self._done_bytes, self._total_bytes)

    def end(self, action: Action, *, took_s: float) -> None:
        """Add the seconds of an action, other than populating and adopting."""
        if isinstance(action, AdoptRegion | CreateRegion):
            return
        if isinstance(action, ScrubRegion):
            self._scrubbing.discard((action.pool, action.region))
        with self._lock:
            self._seconds[action.kind] = self._seconds.get(action.kind, 0.0) + took_s
