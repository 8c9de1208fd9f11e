"""Command line of the engine half; also the zipapp's. argparse: engines bring no click."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence

from hostprep.errors import BadInputError, HostprepError
from hostprep.linux.output import with_output
from hostprep.paths import canonical_root, check_pool_name, default_root
from hostprep.units import format_bytes, parse_quantity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

COMMANDS = {
    "exec": "Claim a region, put it where an engine looks, become it.",
    "wait": "Wait until a pool is prepared and verified for this boot.",
    "attach": "Try out an attach as an engine does it; say what it took.",
    "engines": "List the engines that exec knows, and how each attaches.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 not ready or failed, 2 bad input."""
    if argv is None:
        return with_output(lambda: main(sys.argv[1:]))  # here, since the zipapp begins here
    arguments = list(argv)
    ours, command = _split(arguments)
    try:
        options = _parse(ours, command)
        if os.getpid() == 1:
            # Process 1 of a container only gets signals that it handles (pid_namespaces(7)). The
            # command that `exec` becomes has the default again (execve(2)).
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        return int(options.run(options))
    except HostprepError as error:
        if "json" in ours:
            print(json.dumps(error.to_json()))
        print(f"hostprep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hostprep: interrupted", file=sys.stderr)
        return 130


_OTHER_NAMES = {"--timeout": "--wait", "--percent": "--size"}
"""What options are called elsewhere: in other programs, and in a pool's file."""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for a mistyped word; empty where nothing is like it."""
    from difflib import get_close_matches  # late: only where something was mistyped

    known = list(candidates)
    other = _OTHER_NAMES.get(word)
    close = [other] if other in known else get_close_matches(word, known, 1, 0.7)
    return f" (did you mean '{close[0]}'?)" if close else ""


def pool_named(argument: str | None, option: str | None) -> str | None:
    """Return the pool's name, by whichever spelling it was given; None where it was not.

    Raises BadInputError where the two differ.
    """
    if argument is not None and option is not None and argument != option:
        raise BadInputError(
            f"which pool, '{argument}' or '{option}'?",
            remedy="name one: --pool and --name are other spellings of the argument POOL",
        )
    return argument if argument is not None else option


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return exec's own arguments and the command that follows `--`; nothing follows elsewhere."""
    if arguments[:1] != ["exec"] or "--" not in arguments:
        return arguments, []
    end = arguments.index("--")
    return arguments[:end], arguments[end + 1 :]


def _parse(arguments: list[str], command: list[str]) -> argparse.Namespace:
    """Read the arguments. Raises BadInputError with what was probably meant."""
    name = arguments[0] if arguments else ""
    if name and not name.startswith("-") and name not in COMMANDS:
        raise BadInputError(
            f"no such command '{name}'{did_you_mean(name, COMMANDS)}",
            remedy="see `hostprep --help`: the zipapp has "
            f"{', '.join(COMMANDS)}, the installed package has all commands",
        )
    parser, commands = _parser()
    options, unknown = parser.parse_known_args(arguments)
    see = f"see `hostprep {name} --help`"
    for word in unknown:
        if word.startswith("-"):
            option = word.partition("=")[0]
            known = [name for action in commands[name].actions for name in action.option_strings]
            raise BadInputError(
                f"no such option '{option}'{did_you_mean(option, known)}", remedy=see
            )
    if unknown:
        remedy = (
            "give the command after --, as in `hostprep exec POOL -- CMD`"
            if name == "exec"
            else see
        )
        raise BadInputError(f"unexpected argument '{unknown[0]}'", remedy=remedy)
    if name != "engines":
        options.pool = _pool_of(options, name)
    options.command = command
    return options


def _pool_of(options: argparse.Namespace, command: str) -> str:
    """Return the pool's name: the argument's, --pool's or HOSTPREP_POOL's. Raises BadInputError."""
    given = pool_named(options.pool_argument, options.pool_option)
    if given is None:
        given = os.environ.get("HOSTPREP_POOL") or None
    if given is None:
        usage = _USAGE[command].replace(" [OPTIONS]", "")
        remedy = f"name it, as in `{usage}`, or set HOSTPREP_POOL"
        raise BadInputError("no pool is named", remedy=remedy)
    return check_pool_name(given)


class _Parser(argparse.ArgumentParser):
    """Reports what it cannot read as every other bad input is, and knows what was added to it."""

    def __init__(self, **given: Any) -> None:
        self.actions: list[argparse.Action] = []
        # No abbreviations, as in the other commands: a new option must not break a script.
        super().__init__(formatter_class=_Formatter, add_help=False, allow_abbrev=False, **given)

    def add_argument(self, *names: str, **given: Any) -> argparse.Action:
        self.actions.append(super().add_argument(*names, **given))
        return self.actions[-1]

    def error(self, message: str) -> NoReturn:
        raise BadInputError(message, remedy=f"see `{self.prog} --help`")


class _OnePool(argparse.Action):
    """Takes --pool and --name, given together or twice, only where they name one pool."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's interface
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002 - argparse's interface
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, pool_named(before, str(values)))


class _Formatter(argparse.HelpFormatter):
    """Help that looks as the other commands' does, which click writes."""

    def __init__(self, prog: str) -> None:
        # Given a width, it does not import shutil for it (4 ms).
        super().__init__(prog, width=80, max_help_position=26)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        super().add_usage(usage, actions, groups, "Usage: " if prefix is None else prefix)

    def start_section(self, heading: str | None) -> None:
        named = {"options": "Options", "optional arguments": "Options"}
        super().start_section(named.get(heading or "", heading))


def parsers() -> dict[str, _Parser]:
    """Return each command's parser, by name: what completion and the manual pages read."""
    return _parser()[1]


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="hostprep", description="Use memory that was prepared on this node.")
    _add_help(parser)
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", prog="hostprep", title="Commands"
    )
    made: dict[str, _Parser] = {}
    for name, description, run, options in (
        ("exec", _EXEC, _run_exec, (_add_common, _add_choice, _add_exec)),
        ("wait", _WAIT, _run_wait, (_add_common, _add_wait, _add_output)),
        ("attach", _ATTACH, _run_attach, (_add_common, _add_choice, _add_output)),
        ("engines", _ENGINES, _run_engines, (_add_engines, _add_output)),
    ):
        made[name] = command = commands.add_parser(
            name, help=COMMANDS[name], description=description, usage=_USAGE[name]
        )
        for add in options:
            add(command)
        _add_help(command)
        command.set_defaults(run=run)
    return parser, made


def _add_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action="help", help="Show this message and exit.")


_USAGE = {
    "exec": "hostprep exec [OPTIONS] POOL -- CMD",
    "wait": "hostprep wait [OPTIONS] POOL",
    "attach": "hostprep attach [OPTIONS] POOL",
    "engines": "hostprep engines [OPTIONS] [NAME]",
}
_EXEC = (
    "Claims regions of a pool and becomes the command, which holds them until it and all its "
    "children end. It learns of them by HOSTPREP_PATH, HOSTPREP_PATHS, HOSTPREP_SIZE_BYTES, "
    "HOSTPREP_LEASE and HOSTPREP_FDS, by hostprep.join() in Python, or by a link at a path of "
    "your choice. An engine that we know needs none of that: --engine completes its command line, "
    "as in hostprep exec kv --engine vllm-offloading -- vllm serve MODEL"
)
_WAIT = (
    "Returns once the pool's handoff is there, is of this boot, and every region of it has been "
    "checked against the kernel; for init containers. It claims nothing."
)
_ATTACH = (
    "Claims a region, maps it with every page present, says how long that took, and lets it go. "
    "The region counts as used then: it is scrubbed before the next owner gets it."
)
_ENGINES = (
    "Lists what `hostprep exec --engine` takes; with a NAME, how to start that one. For trtllm, "
    "--connector prints the configuration that leads it to an LMCache server or a Mooncake store."
)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool_argument", nargs="?", metavar="POOL", help=argparse.SUPPRESS)
    parser.add_argument(
        "--pool",
        "--name",
        dest="pool_option",
        action=_OnePool,
        metavar="POOL",
        help="Another way to write the argument POOL. [env: HOSTPREP_POOL]",
    )
    parser.add_argument(
        "--root", type=_root, default="", help="Parent folder of all pools. [env: HOSTPREP_ROOT]"
    )
    parser.add_argument(
        "--size",
        type=_size_bytes,
        default="",
        dest="size_bytes",
        metavar="SIZE",
        help="The least that a region must have, such as 64Gi.",
    )
    parser.add_argument("--count", type=int, default=1, help="Number of regions, all or none.")
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="Seconds to wait for the pool and for a free region. [default: %(default)g]",
    )


def _root(text: str) -> str:
    return canonical_root(text or default_root())


def _size_bytes(text: str) -> int:
    return parse_quantity(text) if text else 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError("give seconds, 0 or more")
    return seconds


def _add_exec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="Complete this engine's command line for the memory: see `hostprep engines`.",
    )
    parser.add_argument(
        "--link",
        metavar="PATH",
        help="Symbolic link to make; may hold {pool}, {lease}, {region} and {index}.",
    )
    parser.add_argument(
        "--warm",
        metavar="NAME",
        help="Keep the memory's contents under this name for the next start. They may hold "
        "personal data: prompts.",
    )
    parser.add_argument(
        "--owner-file",
        metavar="FILE",
        help="With --warm: the secret token of whom they are kept for; made where missing.",
    )
    parser.set_defaults(count=None)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--region", action="append", default=[], help="Take this very region; may be repeated."
    )
    parser.add_argument(
        "--numa-node", type=int, metavar="NODE", help="Only regions on this NUMA node."
    )


def _add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--handoff-only",
        action="store_true",
        help="Do not open the regions: where they cannot be seen yet (user namespaces).",
    )
    parser.set_defaults(wait=300.0)


def _add_engines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument(
        "--connector",
        choices=("lmcache", "mooncake"),
        metavar="[lmcache|mooncake]",
        help="For trtllm: print this connector's configuration.",
    )
    parser.add_argument("--server", metavar="ADDRESS", help="Of the connector's server or master.")
    parser.add_argument("--model-key", metavar="KEY", help="Names the checkpoint to Mooncake.")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json"),
        default="table",
        metavar="[table|json]",
        help="For people or for programs. [default: table]",
    )


def _run_exec(options: argparse.Namespace) -> NoReturn:
    from hostprep.engines.exec import run_exec

    run_exec(options)


def _run_engines(options: argparse.Namespace) -> int:
    from hostprep.engines.listing import run_engines

    return run_engines(options)


def _run_wait(options: argparse.Namespace) -> int:
    from hostprep.client.attach import wait

    handoff = wait(
        options.pool,
        timeout_s=options.wait,
        size_bytes=options.size_bytes,
        count=options.count,
        handoff_only=options.handoff_only,
        on_wait=lambda why: print(f"waiting: {why.message}", file=sys.stderr, flush=True),
        root=options.root,
    )
    total_bytes = sum(region.size_bytes for region in handoff.regions)
    if options.output == "json":
        answer = {"pool": handoff.pool, "generation": handoff.generation}
        print(json.dumps({**answer, "size_bytes": total_bytes}))
    else:
        print(
            f"pool {handoff.pool} is ready: {len(handoff.regions)} region(s), "
            f"{format_bytes(total_bytes)}, generation {handoff.generation}"
        )
    return 0


def _run_attach(options: argparse.Namespace) -> int:
    from hostprep.engines.attach import run_attach

    return run_attach(options)


if __name__ == "__main__":
    sys.exit(main())
