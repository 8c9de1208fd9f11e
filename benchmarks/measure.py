"""Ours and its rivals in turns, and what comes out: medians, spreads and a ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one contender, a round each."""

    values: tuple[float, ...]
    unit: str = "s"

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile; the extremes where there are fewer than four rounds."""
        if len(self.values) < 4:
            return min(self.values), max(self.values)
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The ratio must not be less than this."""

    bound: float

    def __str__(self) -> str:
        return f"≥ {self.bound:.3g}×"


@dataclass(frozen=True, slots=True)
class Below:
    """Our own value must be less than this."""

    bound: float
    text: str

    def __str__(self) -> str:
        return f"< {self.text}"


Reach = AtLeast | Below


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table. `ratio` is how many times better we are than the rival."""

    number: str
    ours: Sample
    rival_name: str
    rival: Sample
    ratio: Sample
    reach: Reach | None = None
    size_bytes: int = 0
    """Bytes that both made ready, for a rate; 0 where a rate makes no sense."""
    judged: float | None = None
    """What a `Below` is about, where it is not the median of ours."""
    notes: tuple[str, ...] = field(default=())

    @property
    def met(self) -> bool | None:
        """Whether the reach is met; None for a row that only informs."""
        if isinstance(self.reach, AtLeast):
            return self.ratio.median >= self.reach.bound
        if isinstance(self.reach, Below):
            return (self.ours.median if self.judged is None else self.judged) < self.reach.bound
        return None


def alternate(
    contenders: Sequence[Callable[[], float]],
    *,
    rounds: int,
    before_each: Callable[[], object] = lambda: None,
) -> list[Sample]:
    """Run the contenders in turns, after one discarded turn of each; a Sample for each.

    Every other round goes backwards, so that nobody always comes first. `before_each` runs
    before every single measurement and is not measured.
    """
    values: list[list[float]] = [[] for _ in contenders]
    for turn in range(rounds + 1):
        order = range(len(contenders))
        for index in order if turn % 2 else reversed(order):
            before_each()
            value = contenders[index]()
            if turn > 0:
                values[index].append(value)
    return [Sample(tuple(column)) for column in values]


def compare(
    number: str,
    ours: Sample,
    rival_name: str,
    rival: Sample,
    *,
    reach: Reach | None = None,
    size_bytes: int = 0,
    judged: float | None = None,
    notes: tuple[str, ...] = (),
) -> Result:
    """Return the row for two samples of one run: the ratio is taken round by round."""
    ratio = tuple(theirs / mine for mine, theirs in zip(ours.values, rival.values, strict=True))
    return Result(
        number, ours, rival_name, rival, Sample(ratio, "×"), reach, size_bytes, judged, notes
    )


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that the call took."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s
