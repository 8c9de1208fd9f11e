"""Showing long work: bars on a terminal, lines elsewhere, JSON lines on request."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from hostprep.node.apply.runner import ProgressReporter
from hostprep.node.plan.actions import Action, CreateRegion, ScrubRegion
from hostprep.units import format_bytes, format_rate, format_seconds

_LINE_EVERY_S = 5.0
_RATE_AFTER_S = 0.3


@contextmanager
def showing(style: str) -> Iterator[ProgressReporter]:
    """Yield the progress in that style, on standard error; `auto` is a bar on a terminal."""
    if style == "auto":
        style = "bar" if sys.stderr.isatty() else "plain"
    if style == "bar":
        bars = _Bars()
        with bars.rich:
            yield bars
    else:
        yield {"json": _JsonLines, "plain": _PlainLines}.get(style, ProgressReporter)()


def _is_long(action: Action) -> bool:
    return isinstance(action, CreateRegion | ScrubRegion)


class _GibPerSecond(ProgressColumn):
    """The task's rate so far, in the unit of this trade; none before it means something.

    rich's own is of the last samples: hundreds of GiB/s, where two pieces end in one instant.
    """

    def render(self, task: Task) -> Text:
        took_s = task.finished_time or task.elapsed or 0.0
        known = task.finished or took_s >= _RATE_AFTER_S
        rate = format_rate(task.completed / took_s) if known and task.completed and took_s else ""
        return Text(rate, style="progress.data.speed")


class _Bars(ProgressReporter):
    """One bar for each region that is populated or scrubbed; a line for all else."""

    def __init__(self) -> None:
        self.rich = RichProgress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            _GibPerSecond(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[Action, TaskID] = {}

    def begin(self, action: Action) -> None:
        if _is_long(action):
            verb = "populate" if isinstance(action, CreateRegion) else "scrub"
            title = f"{verb} {action.pool}/{getattr(action, 'region', '')}"
            self._tasks[action] = self.rich.add_task(title, total=action.expected_bytes)

    def advance(self, action: Action, size_bytes: int) -> None:
        self.rich.advance(self._tasks[action], size_bytes)

    def end(self, action: Action, *, took_s: float) -> None:
        if action not in self._tasks:
            self.rich.console.print(
                f"[dim]{action.pool}: {action.describe()} ({format_seconds(took_s)})"
            )


class _PlainLines(ProgressReporter):
    """A line for each action, and for long ones another every few seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[Action, tuple[int, float, float]] = {}

    def begin(self, action: Action) -> None:
        now = time.monotonic()
        self._done[action] = (0, now, now)

    def advance(self, action: Action, size_bytes: int) -> None:
        now = time.monotonic()
        with self._lock:
            done, begun, said = self._done[action]
            done += size_bytes
            due = now - said >= _LINE_EVERY_S
            self._done[action] = (done, begun, now if due else said)
        if due:
            rate = done / (now - begun)
            left_s = (action.expected_bytes - done) / rate
            percent = 100 * done // max(1, action.expected_bytes)
            self._say(
                action,
                f"{percent} % done, {format_rate(rate)}, {format_seconds(max(0.0, left_s))} left",
            )

    def end(self, action: Action, *, took_s: float) -> None:
        rate = ""
        if _is_long(action) and took_s > 0:
            rate = f", {format_rate(action.expected_bytes / took_s)}"
        self._say(action, f"{format_seconds(took_s)}{rate}")

    def _say(self, action: Action, outcome: str) -> None:
        line = f"hostprep: {action.pool}: {action.describe()} ({outcome})"
        print(line, file=sys.stderr, flush=True)


class _JsonLines(ProgressReporter):
    """One JSON object a line: begin, advance (at most ten a second), end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[Action, int] = {}
        self._said_s = 0.0

    def begin(self, action: Action) -> None:
        self._done[action] = 0
        self._say(action, "begin", expected_bytes=action.expected_bytes)

    def advance(self, action: Action, size_bytes: int) -> None:
        with self._lock:
            self._done[action] += size_bytes
            due = time.monotonic() - self._said_s >= 0.1
            if due:
                self._said_s = time.monotonic()
        if due:
            self._say(action, "advance", done_bytes=self._done[action])

    def end(self, action: Action, *, took_s: float) -> None:
        self._say(action, "end", took_s=round(took_s, 6))

    def _say(self, action: Action, event: str, **values: float) -> None:
        line = {
            "event": event,
            "pool": action.pool,
            "action": type(action).__name__,
            "region": getattr(action, "region", None),
            "what": action.describe(),
            "size": format_bytes(action.expected_bytes),
            **values,
        }
        with self._lock:
            print(json.dumps(line), file=sys.stderr, flush=True)
