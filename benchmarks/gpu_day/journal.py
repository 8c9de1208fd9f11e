"""The file of rows: a line of JSON for each, safe on disk before the next one is measured.

A case writes `begun` and then how it ended. A line that was torn by a kill is cut off when the file
is opened again; a case that was begun twice and never ended is not tried a third time, since it may
be what the machine does not survive.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["begun", "measured", "left out", "failed", "stopped"]
_ENDS = ("measured", "left out", "failed")
_MOST_BEGINS = 2


class JournalError(Exception):
    """The file of rows cannot be used; in words."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one case."""

    part: str
    case: str
    outcome: Outcome
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    """Of what was left out, and of what failed."""
    took_s: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    """Which GPU, which boot, when, and whether the driver is the stand-in."""

    @property
    def is_standin(self) -> bool:
        """Whether the driver was the stand-in of the tests."""
        return bool(self.machine.get("standin"))

    @property
    def is_rehearsal(self) -> bool:
        """Whether it shows nothing but that the program works."""
        return self.is_standin or bool(self.machine.get("short"))

    @property
    def has_ended(self) -> bool:
        """Whether the case need not run again."""
        return self.outcome in _ENDS


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Return the rows of several files in order; what is torn or of another program is no row."""
    rows = []
    for path in paths:
        for line in path.read_bytes().split(b"\n"):
            try:
                rows.append(Row(**json.loads(line)))
            except (ValueError, TypeError):
                continue
    return rows


def last_rows(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each case that has ended, the latest, in the order of the first ones."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.has_ended:
            found[row.part, row.case] = row
    return list(found.values())


class Journal:
    """Rows of earlier runs, and the file that further ones are appended to."""

    def __init__(
        self, path: Path, earlier: Sequence[Path] = (), *, is_rehearsal: bool = False
    ) -> None:
        """Open the file. What a rehearsal measured counts for rehearsals only.

        Raises JournalError where another run writes to it, OSError where it cannot be written.
        """
        self._ended: set[tuple[str, str]] = set()
        self._begins: dict[tuple[str, str], int] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise JournalError(f"another run writes to {path}") from error
        self._cut_torn_line(path)
        for row in read_rows([*earlier, path]):
            if row.is_rehearsal == is_rehearsal:
                self._note(row)

    def close(self) -> None:
        """Let another run write."""
        os.close(self._fd)

    def add(self, row: Row) -> None:
        """Have a row on disk before this returns."""
        self._note(row)
        os.write(self._fd, json.dumps(asdict(row)).encode() + b"\n")
        os.fsync(self._fd)

    def has(self, part: str, case: str) -> bool:
        """Tell whether a case has ended, measured or not."""
        return (part, case) in self._ended

    def is_deadly(self, part: str, case: str) -> bool:
        """Tell whether a case has been begun twice and was never heard of again."""
        return self._begins.get((part, case), 0) >= _MOST_BEGINS

    def _note(self, row: Row) -> None:
        key = (row.part, row.case)
        if row.outcome == "begun":
            self._begins[key] = self._begins.get(key, 0) + 1
        else:
            self._begins.pop(key, None)
        if row.has_ended:
            self._ended.add(key)

    def _cut_torn_line(self, path: Path) -> None:
        text = path.read_bytes()
        if text and not text.endswith(b"\n"):
            os.ftruncate(self._fd, text.rfind(b"\n") + 1)
