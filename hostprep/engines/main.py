"""Command line of the engine half; also the zipapp's. argparse: engines bring no click."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
from collections.abc import Sequence

from hostprep.errors import BadInputError, HostprepError
from hostprep.paths import canonical_root, check_pool_name, default_root
from hostprep.units import format_bytes, parse_quantity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

COMMANDS = {
    "exec": "Claim a region, put it where an engine looks, become it.",
    "wait": "Wait until a pool is prepared and verified for this boot.",
    "attach": "Try out an attach as an engine does it; say what it took.",
    "engines": "List the engines that exec knows, and how each attaches.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 not ready or failed, 2 bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments)
        if os.getpid() == 1:
            # Process 1 of a container only gets signals that it handles (pid_namespaces(7)). The
            # command that `exec` becomes has the default again (execve(2)).
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        return int(options.run(options))
    except HostprepError as error:
        if "json" in arguments:
            print(json.dumps(error.to_json()))
        print(f"hostprep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hostprep: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Reports what it cannot read as every other bad input is."""

    def error(self, message: str) -> NoReturn:
        raise BadInputError(message, remedy=f"see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    # Given a width, the formatter does not import shutil for it (4 ms).
    formatter = functools.partial(argparse.HelpFormatter, width=98)
    parser = _Parser(
        prog="hostprep",
        description="Use memory that was prepared on this node.",
        formatter_class=formatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="hostprep")
    for name, description, run, options in (
        ("exec", _EXEC, _run_exec, (_add_common, _add_choice, _add_exec)),
        ("wait", _WAIT, _run_wait, (_add_common, _add_wait, _add_output)),
        ("attach", _ATTACH, _run_attach, (_add_common, _add_choice, _add_output)),
        ("engines", _ENGINES, _run_engines, (_add_engines, _add_output)),
    ):
        command = commands.add_parser(
            name, help=COMMANDS[name], description=description, formatter_class=formatter
        )
        for add in options:
            add(command)
        command.set_defaults(run=run)
    return parser


_EXEC = (
    "Claims regions of a pool and becomes the command, which holds them until it and all its "
    "children end. It learns of them by HOSTPREP_PATH, HOSTPREP_PATHS, HOSTPREP_SIZE_BYTES, "
    "HOSTPREP_LEASE and HOSTPREP_FDS, by hostprep.join() in Python, or by a link at a path of "
    "your choice. An engine that we know needs none of that: --engine completes its command line, "
    "as in hostprep exec --pool kv --engine vllm -- vllm serve MODEL"
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
    given = os.environ.get("HOSTPREP_POOL") or None
    parser.add_argument(
        "--pool",
        type=check_pool_name,
        required=given is None,
        default=given,
        help="the pool's name (HOSTPREP_POOL)",
    )
    parser.add_argument(
        "--root", type=_root, default="", help="parent folder of all pools (HOSTPREP_ROOT)"
    )
    parser.add_argument(
        "--size",
        type=_size_bytes,
        default="",
        dest="size_bytes",
        metavar="SIZE",
        help="the least that a region must have, such as 64Gi",
    )
    parser.add_argument("--count", type=int, default=1, help="number of regions, all or none")
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for the pool and for a free region (default %(default)g)",
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
        help="complete this engine's command line for the memory: see `hostprep engines`",
    )
    parser.add_argument(
        "--link",
        metavar="PATH",
        help="symbolic link to make; may hold {pool}, {lease}, {region} and {index}",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD")
    parser.set_defaults(count=None)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", action="append", default=[], help="take this very region")
    parser.add_argument("--numa-node", type=int, help="only regions on this node")


def _add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--handoff-only",
        action="store_true",
        help="do not open the regions: where they cannot be seen yet (user namespaces)",
    )
    parser.set_defaults(wait=300.0)


def _add_engines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="this engine alone")
    parser.add_argument("--connector", choices=("lmcache", "mooncake"), help="for trtllm")
    parser.add_argument("--server", metavar="ADDRESS", help="of the connector's server or master")
    parser.add_argument("--model-key", metavar="KEY", help="names the checkpoint to Mooncake")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")


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
