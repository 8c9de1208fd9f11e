"""`hostprep boot --script`: what must precede kubelet."""

from __future__ import annotations

from typing import Any

import click

from hostprep.cli.options import root_option
from hostprep.cli.pool_options import pool_options, specs_from
from hostprep.errors import BadInputError
from hostprep.node.boot import boot_script

__all__ = ["boot"]


@click.command(short_help="Print the script that reserves pages before kubelet.")
@click.option("--script", is_flag=True, help="Print the script.")
@pool_options
@root_option
def boot(root: str, script: bool, **options: Any) -> None:
    """Print the POSIX sh script that reserves huge pages before kubelet starts.

    It needs coreutils and mount only: put it into user data, Ignition or a machine image.
    """
    if not script:
        raise BadInputError("what is to be done?", remedy="give --script to print the script")
    for spec in specs_from(options):
        click.echo(boot_script(spec, root=root), nl=False)
