"""Options that several commands share, and what they mean."""

from __future__ import annotations

import click

from hostprep.console import Seconds
from hostprep.paths import DEFAULT_ROOT, canonical_root

__all__ = [
    "output_option",
    "progress_option",
    "root_option",
    "wait_option",
]


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="For people or for programs.",
)


def _absolute(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    return canonical_root(value)


root_option = click.option(
    "--root",
    envvar="HOSTPREP_ROOT",
    default=DEFAULT_ROOT,
    show_default=True,
    callback=_absolute,
    help="Parent folder of all pools. [env: HOSTPREP_ROOT]",
)
progress_option = click.option(
    "--progress",
    type=click.Choice(["auto", "bar", "plain", "json", "none"]),
    default="auto",
    show_default=True,
    help="How to show the work, on standard error.",
)
wait_option = click.option(
    "--wait",
    "wait_s",
    type=Seconds(min=0),
    default=600.0,
    show_default=True,
    help="Seconds to wait for another prepare or release to end.",
)
