"""What runs the cases of a part: what is done, the time that is left, memory and processes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.journal import Journal, Outcome, Row
from benchmarks.gpu_day.sizes import Sizes
from benchmarks.register.crew import Crew, MeasureError
from benchmarks.register.cuda import CudaError
from benchmarks.register.memory import NotHereError, resident
from hostprep.backing import GIB, Backing
from hostprep.errors import HostprepError
from hostprep.units import format_bytes

Figures = dict[str, Any]
"""What one case found; names end in their unit."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be."""

    name: str
    about_s: float
    """How long it should take on a GPU; it is not begun where less is left."""
    measure: Callable[[], Figures]


@dataclass(frozen=True, slots=True)
class Part:
    """Cases that are asked for by one name."""

    name: str
    what: str
    about_s: float
    """All of them, processes included."""
    cases: Callable[[Day], Iterable[Case]]


class Shelf:
    """The resident memory of the last case that asked for some: the next one often wants the same.

    Memory that could not be had is not asked for twice.
    """

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._what: tuple[Backing, int] | None = None
        self._path = ""
        self._refused: dict[tuple[Backing, int], str] = {}

    def memory(self, backing: Backing, size_bytes: int) -> str:
        """Return the path of a resident file. Raises NotHereError."""
        what = (backing, size_bytes)
        if what == self._what:
            return self._path
        if what in self._refused:
            raise NotHereError(self._refused[what])
        self.clear()
        try:
            self._path = self._held.enter_context(resident(backing, size_bytes))
        except NotHereError as error:
            self._refused[what] = str(error)
            raise
        self._what = what
        return self._path

    def clear(self) -> None:
        """Give the memory back."""
        self._what = None
        self._held.close()


@dataclass
class Day:
    """One run of the program."""

    journal: Journal
    crew: Crew
    sizes: Sizes
    machine: Figures
    """What each row says of where it comes from."""
    folder: Path
    """For files beside the rows: what a test printed."""
    end_s: float
    """When to stop, by the monotonic clock."""
    again: bool = False
    is_short: bool = False
    """Only whether it works: no figure means anything."""
    shelf: Shelf = field(default_factory=Shelf)
    left_for_later: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds until this run has to stop."""
        return self.end_s - time.monotonic()

    @property
    def rounds(self) -> int:
        """How often a figure is taken."""
        return 1 if self.is_short else 3

    def seconds(self, size_bytes: int, passes: int = 1) -> float:
        """Return about how long it takes to register so much so often, and to take it back."""
        return 2.0 + passes * size_bytes / (4 * GIB)

    def memory(self, backing: Backing, size_bytes: int | None = None) -> str:
        """Return the path of a resident file of this kind; the next case may still use it.

        Raises NotHereError.
        """
        size = size_bytes or self.sizes.region_bytes
        if size % backing.page_bytes:
            page = format_bytes(backing.page_bytes)
            raise NotHereError(f"{format_bytes(size)} hold no whole number of pages of {page}")
        return self.shelf.memory(backing, size)

    def best_memory(self, size_bytes: int | None = None) -> tuple[str, Backing]:
        """Return a resident file of 2 MiB pages, or of base pages where there are none."""
        try:
            return self.memory(Backing.HUGETLB_2MI, size_bytes), Backing.HUGETLB_2MI
        except NotHereError:
            return self.memory(Backing.BASE, size_bytes), Backing.BASE

    def run(self, part: Part) -> None:
        """Run what is left to do of a part, as far as the time goes; nothing of it ends the day."""
        try:
            for case in part.cases(self):
                self._run(part.name, case)
        except (OSError, ValueError) as error:  # of making up the cases
            row = Row(part.name, "its cases", "failed", machine=self.machine)
            self._end(row, "failed", why=str(error))
        except BaseException:
            self.crew.close()  # first: huge pages that a process maps are not given back at once
            raise
        finally:
            self.shelf.clear()
            for action in self.crew.watched:
                self.crew.dismiss(action)

    def _run(self, part: str, case: Case) -> None:
        if self.journal.has(part, case.name) and not self.again:
            return
        row = Row(part, case.name, "begun", machine=self.machine | {"at_s": round(time.time())})
        if self.journal.is_deadly(part, case.name) and not self.again:
            why = "begun twice, and the program was ended each time before it was over"
            self._end(row, "failed", why=why)
        elif self.left_s < (0 if self.is_short else case.about_s):
            self.left_for_later.append(f"{part}: {case.name}")
        else:
            print(f"{part}: {case.name}", file=sys.stderr, flush=True)
            self.journal.add(row)
            self._measure(row, case)

    def _measure(self, row: Row, case: Case) -> None:
        begin_s = time.monotonic()
        outcome: Outcome = "measured"
        why, figures = "", {}
        try:
            figures = case.measure()
        except NotHereError as error:
            outcome, why = "left out", str(error)
        except (CudaError, MeasureError, HostprepError, OSError) as error:
            outcome, why = "failed", str(error)
        except Exception as error:  # whatever it is, the next case may work
            outcome, why = "failed", f"{type(error).__name__}: {error}"
        if outcome == "failed" and self.left_s <= 0:
            outcome = "stopped"  # it may have failed for want of time: a later run tries again
            self.left_for_later.append(f"{row.part}: {row.case}")
        if outcome == "failed":
            self.crew.close()  # a context may be broken: the next case gets new processes
        took_s = round(time.monotonic() - begin_s, 3)
        self._end(row, outcome, why=why, figures=figures, took_s=took_s)

    def _end(self, row: Row, outcome: Outcome, *, why: str = "", **more: Any) -> None:
        if why:
            print(f"{row.part}: {row.case}: {outcome}: {why}", file=sys.stderr, flush=True)
        self.journal.add(replace(row, outcome=outcome, why=why, **more))
