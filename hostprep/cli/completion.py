"""What a shell completes: pools, engines, and the options of commands that argparse reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from hostprep.errors import HostprepError
from hostprep.paths import canonical_root, default_root

if TYPE_CHECKING:
    import argparse


def complete_pool(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the pools below the root that begin so; none where the root cannot be read."""
    from hostprep.node.observe.pools import pool_names  # late: all commands import this module

    try:
        names = pool_names(canonical_root(context.params.get("root") or default_root()))
    except (HostprepError, OSError):
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class EngineCommand(click.Command):
    """A command of the engine half: click only completes and describes it, argparse reads it."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options that the command's parser has, made when they are asked for."""
        from hostprep.engines.main import parsers

        actions = parsers()[self.name or ""].actions
        options = [_option(action) for action in actions if action.option_strings]
        return [*super().get_params(ctx), *options]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave the arguments to `invoke`; for completion, read them."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.meta[__name__] = args
        return []

    def invoke(self, ctx: click.Context) -> int:
        """Run the command in its own half. Returns the exit code."""
        from hostprep.engines.main import main

        return main([str(self.name), *ctx.meta[__name__]])


def _option(action: argparse.Action) -> click.Option:
    """Return an option of argparse as click has it."""
    text = (action.help or "") % vars(action)
    settings: dict[str, Any] = {"help": text, "is_flag": action.nargs == 0}
    if action.choices:
        settings["type"] = click.Choice([str(choice) for choice in action.choices])
    elif action.nargs != 0:
        settings["metavar"] = action.metavar or action.dest.upper()
    if action.dest == "pool_option":
        settings["shell_complete"] = complete_pool
    if action.dest == "engine":
        settings["shell_complete"] = complete_engine
    return click.Option([*action.option_strings, action.dest], **settings)


def complete_engine(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names that `exec --engine` takes and that begin so."""
    from hostprep.engines.catalogue import INTEGRATIONS

    names = (integration.name for integration in INTEGRATIONS)
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def engine_command(name: str, text: str) -> click.Command:
    """Return one for the help and for completion; `hostprep.__main__` runs it without click."""
    words: list[click.Parameter] = [
        click.Argument(["name"], required=False, shell_complete=complete_engine)
        if name == "engines"
        else click.Argument(["pool"], required=False, shell_complete=complete_pool)
    ]
    if name == "exec":
        words.append(click.Argument(["command"], nargs=-1, metavar="-- CMD"))
    return EngineCommand(name, help=text, params=words, add_help_option=False)
