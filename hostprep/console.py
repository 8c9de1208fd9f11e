"""What commands share: results as tables for people or JSON for programs, errors, and options."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import click

from hostprep.errors import HostprepError

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: Any) -> None:
    """Write one JSON document to standard output."""
    print(json.dumps(value, default=_plain, indent=2))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset | set):
        return sorted(value)
    return str(value)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to standard output; in a pipe, as wide as its content needs."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # As text: what others wrote (a command line, say) is neither markup nor escape codes.
        table.add_row(*(Text(_printable(cell)) for cell in row))
    _console().print(table)


def _printable(cell: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in cell)


def say(text: str) -> None:
    """Write a line to standard output."""
    _console().print(text, markup=False, highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """Write a line to standard error."""
    print(f"hostprep: {text}", file=sys.stderr)


def report(error: HostprepError, *, as_json: bool) -> None:
    """Print an error: one line for people, and an object for programs that asked for JSON."""
    if as_json:
        print_json(error.to_json())
    warn(str(error))


def _console() -> Console:
    from rich.console import Console  # not above: the agent prints nothing

    return Console(width=None if sys.stdout.isatty() else 200)


class Seconds(click.FloatRange):
    """An option in seconds, within a range. `nan`, which no comparison excludes, is refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number. Raises click.BadParameter."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number", param, ctx)
        return seconds
