"""What all measurements share: processes, sizes, the time that is left, and what came out."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.measure import Sample
from benchmarks.register.crew import Crew, MeasureError
from benchmarks.register.memory import NotHereError, resident
from hostprep.backing import GIB, MIB, Backing

Row = dict[str, object]
"""One figure with what it is of; `measurement` names the table that it belongs to."""


class TimeIsUp(Exception):  # noqa: N818 - an outcome, not an error
    """The time of this measurement is spent."""


@dataclass
class Clock:
    """How long the measurement that runs may still take."""

    end_s: float = 0.0

    def allow(self, seconds: float) -> None:
        """Begin anew with so much."""
        self.end_s = time.monotonic() + seconds

    def check(self) -> None:
        """Raise TimeIsUp where nothing is left."""
        if time.monotonic() > self.end_s:
            raise TimeIsUp


@dataclass
class Scene:
    """One run."""

    crew: Crew
    size_bytes: int
    is_short: bool = False
    """Only whether it works: no figure means anything."""
    clock: Clock = field(default_factory=Clock)
    rows: list[Row] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    samples: dict[str, Sample] = field(default_factory=dict)
    """Seconds that ratios are made of, by name."""

    def add(self, measurement: str, **figures: object) -> None:
        """Keep a row."""
        self.rows.append({"measurement": measurement, **figures})

    def leave_out(self, measurement: str, what: str, why: str) -> None:
        """Keep that something was not measured, and tell it at once."""
        print(f"benchmarks: {measurement}: {what} left out: {why}", file=sys.stderr)
        self.left_out.append({"measurement": measurement, "what": what, "why": why})

    @contextlib.contextmanager
    def trying(self, measurement: str, what: str) -> Iterator[None]:
        """Let one figure fail without the others; TimeIsUp passes, and ends the measurement."""
        try:
            self.clock.check()
            yield
        except (MeasureError, NotHereError) as error:
            self.leave_out(measurement, what, str(error))

    @contextlib.contextmanager
    def memory(self, backing: Backing, size_bytes: int | None = None) -> Iterator[str]:
        """Give the path of a resident file of this kind, in whole pages."""
        size = size_bytes or self.size_bytes
        with resident(backing, size) as path:
            yield path

    def repeat(self, rounds: int, measure: Callable[[], float], *, warm: bool = True) -> Sample:
        """Return the values of the rounds, after one that does not count; fewer where time is up.

        Raises TimeIsUp where not even one was made.
        """
        values: list[float] = []
        if self.is_short:
            rounds, warm = 1, False
        for turn in range(rounds + warm):
            if values and time.monotonic() > self.clock.end_s:
                break
            self.clock.check()
            value = measure()
            if turn >= warm:
                values.append(value)
        return Sample(tuple(values))


def slice_bytes(size_bytes: int, count: int) -> int:
    """Return one process's share, in pages of 2 MiB."""
    return size_bytes // count // (2 * MIB) * (2 * MIB)


def rate(size_bytes: int, sample: Sample) -> float:
    """Return GiB/s of the median."""
    return size_bytes / GIB / statistics.median(sample.values)
