"""`hostprep`: every command's options, errors turned into exit codes."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

import hostprep
from hostprep.cli.completion import engine_command
from hostprep.console import report
from hostprep.engines.main import COMMANDS as ENGINE_COMMANDS
from hostprep.engines.main import did_you_mean
from hostprep.errors import BadInputError, HostprepError
from hostprep.linux.threads import Stopped

_MODULES = {
    "plan": "prepare",
    "prepare": "prepare",
    "status": "status",
    "verify": "status",
    "release": "prepare",
    "doctor": "doctor",
    "demo": "demo",
    "agent": "agent",
    "boot": "prepare",
    "size": "size",
    "purge": "purge",
}
"""Each command's module below hostprep.cli."""


class _Commands(click.Group):
    """Reads the module of the command that is run and of no other: half a second, in the agent."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_MODULES])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"hostprep.cli.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if sys.stderr.isatty():
                raise  # click ends the line in which the terminal shows ^C
            raise Stopped from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hostprep.__version__, prog_name="hostprep")
def cli() -> None:
    """Prepare this node's host memory once, hand it to every inference engine.

    \b
    A first try, on any Linux machine:
      hostprep plan kv --size 4Gi           what would be done
      hostprep prepare kv --size 4Gi        do it
      hostprep status                       see it
      hostprep exec kv -- vllm serve ...    use it
      hostprep release kv                   give it back

    \b
    Exit codes: 0 done, 1 not ready or failed, 2 bad input (nothing was changed).
    """


for _name, _text in ENGINE_COMMANDS.items():
    cli.add_command(engine_command(_name, _text))


_AFTER_CTRL_C = {
    "prepare": "; what was populated, if anything, is kept: run it again to go on, or release the"
    " pool",
    "release": ": run it again to go on",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0 done, 1 not ready or failed, 2 bad input, 130 Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        result: Any = cli.main(arguments, prog_name="hostprep", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except HostprepError as error:
        report(error, as_json="json" in arguments)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        refused = _usage_error(error)
        report(refused, as_json="json" in arguments)
        return refused.exit_code
    except (KeyboardInterrupt, click.Abort, Stopped):
        return _interrupted(arguments)
    except Exception as error:
        # What a library raises as it tidies up after Ctrl-C hides it: zipfile, for one, refuses to
        # close an archive in the middle of an entry.
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return _interrupted(arguments)


def _interrupted(arguments: list[str]) -> int:
    command = next((word for word in arguments if not word.startswith("-")), "")
    click.echo(f"hostprep: interrupted{_AFTER_CTRL_C.get(command, '')}", err=True)
    return 130


def _usage_error(error: click.UsageError) -> BadInputError:
    """Return click's error in the form of ours."""
    if isinstance(error, click.exceptions.NoSuchOption | click.exceptions.NoSuchCommand):
        message = error.message.rstrip(".") + _suggestion(error)
    else:
        message = error.format_message().rstrip(".?")
    command = error.ctx.command_path if error.ctx else "hostprep"
    return BadInputError(message[:1].lower() + message[1:], remedy=f"see `{command} --help`")


def _suggestion(error: click.exceptions.NoSuchOption | click.exceptions.NoSuchCommand) -> str:
    if error.ctx is None:
        return ""
    if isinstance(error, click.exceptions.NoSuchOption):
        known = [name for parameter in error.ctx.command.params for name in parameter.opts]
        return did_you_mean(error.option_name, known)
    return did_you_mean(error.command_name, cli.list_commands(error.ctx))
