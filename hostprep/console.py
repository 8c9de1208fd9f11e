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

from hostprep.client.untrusted import printable
from hostprep.errors import HostprepError

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: Any) -> None:
    """Write one JSON document to standard output."""
    print(json.dumps(_finite(value), default=_plain, indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """Return the value with null for NaN and infinities, which are no JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return _finite(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset | set):
        return sorted(value)
    return str(value)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    flexible: Sequence[str] = (),
    elided: str | None = None,
) -> None:
    """Write a table to standard output; in a pipe, as wide as its content needs.

    On a terminal that is too narrow, heads are broken between words, then `flexible` columns, and
    the `elided` one is cut, with an ellipsis.
    """
    from rich.table import Table
    from rich.text import Text

    console = _console()
    cells = [[_lines(cell) for cell in row] for row in rows]
    widths, gap = _column_widths(columns, cells, {*flexible, elided}, console.width)
    if not sys.stdout.isatty():  # else rich takes what is lacking from whole columns
        console.width = max(console.width, sum(widths) + gap * (len(widths) - 1))
    table = Table(
        title=title or None,
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, gap, 0, 0),
    )
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, overflow="fold", width=width)
    for row in cells:
        # As text: what others wrote (a command line, say) is neither markup nor escape codes.
        table.add_row(
            *(
                Text(elide(cell, width) if column == elided else cell)
                for column, width, cell in zip(columns, widths, row, strict=True)
            )
        )
    console.print(table)


def _column_widths(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    flexible: set[str | None],
    width: int,
) -> tuple[list[int], int]:
    """Return each column's width, and the gap between two, so that the table fits if it can."""
    data = [max((_width(row[i]) for row in rows), default=0) for i in range(len(columns))]
    full = [max(size, len(name)) for size, name in zip(data, columns, strict=True)]
    tight = [
        max(size, *map(len, name.split()), 0) if name else size
        for size, name in zip(data, columns, strict=True)
    ]
    for widths, gap in ((full, 2), (tight, 2), (tight, 1)):
        if sum(widths) + gap * (len(columns) - 1) <= width:
            return widths, gap
    # The narrow ones of the flexible columns keep their width; the others share what is left.
    left = width - 2 * (len(columns) - 1)
    left -= sum(size for size, name in zip(tight, columns, strict=True) if name not in flexible)
    narrowest = sorted((size, i) for i, size in enumerate(tight) if columns[i] in flexible)
    widths = list(tight)
    for done, (size, index) in enumerate(narrowest):
        widths[index] = min(size, max(len(columns[index]), left // (len(narrowest) - done)))
        left -= widths[index]
    return widths, 2


def _width(cell: str) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, cell.split("\n")))


def terminal_width() -> int:
    """Return how many characters a line of standard output has; 200 in a pipe."""
    return _console().width


def wrapped(text: str, *, begin: str, then: str) -> str:
    """Return a text in lines that fit the terminal; words, such as paths, are left whole."""
    from textwrap import fill

    return fill(
        _lines(text),
        terminal_width(),
        initial_indent=begin,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def elide(text: str, width: int) -> str:
    """Return a text cut to a width by an ellipsis, which leaves ` (...)` at its end in place."""
    if len(text) <= width:
        return text
    head, bracket, tail = text.rpartition(" (")
    end = bracket + tail if bracket and text.endswith(")") and len(bracket + tail) < width else ""
    return f"{(head if end else text)[: max(0, width - len(end) - 1)]}…{end}"


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def say(text: str) -> None:
    """Write a line to standard output."""
    _console().print(_lines(text), markup=False, highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """Write a line to standard error."""
    print(f"hostprep: {_lines(text)}", file=sys.stderr)


def report(error: HostprepError, *, as_json: bool) -> None:
    """Print an error: one line for people, and an object for programs that asked for JSON."""
    if as_json:
        print_json(error.to_json())
    warn(str(error))


def _console() -> Console:
    from rich.console import Console  # not above: the agent prints nothing

    return Console(width=None if sys.stdout.isatty() else 200)


class Seconds(click.FloatRange):
    """An option in seconds, within a range; no more than people wait for.

    `nan`, which no comparison excludes, and `inf`, for which no deadline can be computed, are
    refused.
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number. Raises click.BadParameter."""
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds) or seconds >= _MOST_S:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


_MOST_S = 1e9
