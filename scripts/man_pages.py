"""Make the manual pages, docs/man/*.1, from the commands' own help.

    python scripts/man_pages.py [--check]

Every option's text stands once, beside the option; what needs more room is in docs/commands.
"""

# ruff: noqa: INP001  scripts are no package
from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

import hostprep
from hostprep.cli.main import cli
from hostprep.engines.main import parsers

__all__ = ["main", "pages"]

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "man"
_EXIT = (
    "0 where it is done, 1 where memory is not ready or a step failed, 2 for bad input (nothing "
    "was changed), 130 after Ctrl-C"
)


def pages() -> dict[str, str]:
    """Return each page by its file's name: one of the program, and one of each command."""
    context = click.Context(cli, info_name="hostprep", help_option_names=["-h", "--help"])
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    made = {
        f"hostprep-{name}.1": _page(name, command, context)
        for name, command in commands.items()
        if command is not None
    }
    made["hostprep.1"] = "".join(
        [
            _head("hostprep", "prepare a node's host memory once, for every inference engine"),
            ".SH SYNOPSIS\n.B hostprep\n\\fICOMMAND\\fR [\\fIOPTIONS\\fR] ...\n",
            ".SH DESCRIPTION\n",
            *_paragraphs(cli.help or ""),
            ".SH COMMANDS\n",
            *(
                f".TP\n.BR hostprep\\-{_text(name)} (1)\n{_text(command.get_short_help_str(200))}\n"
                for name, command in commands.items()
                if command is not None
            ),
            ".SH OPTIONS\n",
            *_options(cli, context),
            f".SH EXIT STATUS\n{_text(_EXIT)}.\n",
        ]
    )
    return made


def _page(name: str, command: click.Command, parent: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=parent)
    parser = parsers().get(name)
    if parser is None:
        usage = " ".join(command.collect_usage_pieces(context))
        description = command.help or ""
    else:
        usage = (parser.usage or "").removeprefix(f"hostprep {name} ")
        description = parser.description or ""
    exit_status = f"{_EXIT}; the command's own once it runs" if name == "exec" else _EXIT
    return "".join(
        [
            _head(f"hostprep-{name}", command.get_short_help_str(200).rstrip(".")),
            f".SH SYNOPSIS\n.B hostprep {_text(name)}\n{_text(usage)}\n",
            ".SH DESCRIPTION\n",
            *_paragraphs(description),
            ".SH OPTIONS\n",
            *_options(command, context),
            f".SH EXIT STATUS\n{_text(exit_status)}.\n",
            ".SH SEE ALSO\n.BR hostprep (1)\n",
        ]
    )


def _head(title: str, what: str) -> str:
    version = hostprep.__version__
    return (
        f'.TH {_text(title.upper())} 1 "" "hostprep {version}" "Hostprep"\n'
        f".SH NAME\n{_text(title)} \\- {_text(what)}\n"
    )


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and isinstance(parameter, click.Option):
            names, text = record
            yield f".TP\n.B {_text(names)}\n{_text(text)}\n"


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs; those with an indented line are examples or lists, and stay as they are."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text).replace("\b\n", "")):
        body = _text(paragraph)
        is_kept = "\n  " in body
        yield f".PP\n.nf\n{body}\n.fi\n" if is_kept else f".PP\n{body}\n"


def _text(text: str) -> str:
    """Return text that roff prints as it is: no request at a line's start, hyphens to copy."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return re.sub(r"^\.", "\\\\&.", escaped, flags=re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` only tell whether they are current: 0 if so, else 1."""
    made = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.1")}
    if "--check" in arguments:
        return int(made != there)
    FOLDER.mkdir(exist_ok=True)
    for name in there.keys() - made.keys():
        (FOLDER / name).unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
