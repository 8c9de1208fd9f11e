"""Options that several commands share, and the pools that they describe."""

from __future__ import annotations

import contextlib
import grp
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from hostprep.api.pool_resource import load_pools, spec_from_options
from hostprep.api.pool_spec import PoolSpec
from hostprep.cli.completion import complete_pool
from hostprep.console import Seconds
from hostprep.engines.main import pool_named
from hostprep.errors import BadInputError
from hostprep.paths import DEFAULT_ROOT, canonical_root

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


F = TypeVar("F", bound=Callable[..., Any])


def options_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator for several options, listed in that order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


pool_argument = click.argument("pool", required=False, shell_complete=complete_pool)


def _one_pool(
    _context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]
) -> str | None:
    return reduce(pool_named, names, None)


pool_alias_option = click.option(
    "--pool",
    "--name",
    "pool_option",
    metavar="POOL",
    multiple=True,
    callback=_one_pool,
    shell_complete=complete_pool,
    help="Another way to write POOL.",
)


class _Group(click.types.IntParamType):
    """A group of this machine by its name, or any by its number."""

    name = "group"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raises BadInputError for a name that is none."""
        with contextlib.suppress(click.BadParameter):
            return int(super().convert(value, param, ctx))
        try:
            return grp.getgrnam(value).gr_gid
        except (KeyError, ValueError) as error:
            raise BadInputError(
                f"--gid: there is no group {value!r} on this machine",
                reason="NoSuchGroup",
                remedy="give one that `getent group` shows, or a number, such as the one that"
                " containers have in supplementalGroups",
            ) from error


pool_options = options_of(
    click.option(
        "-f",
        "--file",
        "file",
        type=click.Path(path_type=Path, allow_dash=True),
        help="HostMemoryPool resources (YAML), the same as in a cluster; - is standard input.",
    ),
    pool_argument,
    pool_alias_option,
    click.option("--size", help="Without a file: how much, such as 8Gi or 50%."),
    click.option(
        "--backing",
        "backings",
        help="Without a file: kinds of pages in order of preference, such as HugeTLB2Mi,Base.",
    ),
    click.option(
        "--regions",
        help="Without a file: PerNUMANode, PerGPU, Single or a number.",
    ),
    click.option("--reserve", help="Without a file: what the node must keep free."),
    click.option(
        "--gid",
        type=_Group(),
        help="Without a file: the group that may attach, by number or name.",
    ),
    click.option("--mode", help="Without a file: mode of the region files, such as 0660."),
)
"""The ways to say which pool: a file, or its fields one by one."""


def specs_from(options: dict[str, Any]) -> tuple[PoolSpec, ...]:
    """Return the pools that the options ask for. Raises BadInputError."""
    fields = ("size", "backings", "regions", "reserve", "gid", "mode")
    given = {key: options[key] for key in fields if options.get(key) is not None}
    file, name = options.get("file"), pool_named(options["pool"], options["pool_option"])
    if file is not None and (name is not None or given):
        raise BadInputError(
            "give either --file or POOL with its options, not both",
            remedy="put all of it into the file",
        )
    if file is not None:
        return load_pools(_read(file), source=str(file))
    if name is None:
        raise BadInputError(
            "no pool is named", remedy="give -f pool.yaml, or a name and a size: kv --size 8Gi"
        )
    if "size" not in given:
        raise BadInputError(f"the size of pool {name} is missing", remedy="give it as --size 8Gi")
    return (spec_from_options(name=name, **given),)


def _read(file: Path) -> str:
    try:
        if str(file) == "-":
            return sys.stdin.read(2 << 20)
        with file.open(encoding="utf-8") as stream:
            return stream.read(2 << 20)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadInputError(
            f"cannot read {file}: {why}",
            remedy="name a file with a HostMemoryPool, such as examples/pool.yaml",
        ) from error
