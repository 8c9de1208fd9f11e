"""What `hostprep exec --engine NAME` asks of an engine's launcher, before and after the claim.

The catalogue names one launcher module for each integration. It has two functions, `requirements`
and `complete`, which change nothing: `hostprep exec` claims, links and becomes the engine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hostprep.engines.catalogue import Integration
from hostprep.errors import BadInputError

_FILE_LIMIT_BYTES = 1 << 20

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from hostprep.client.lease import Lease

    class Launcher(Protocol):
        """The two functions of a launcher module."""

        def requirements(self, start: EngineStart) -> Requirements:
            """Read the command. Raises BadInputError; nothing is claimed yet."""

        def complete(self, start: EngineStart, leases: Sequence[Lease]) -> Launch:
            """Return the command as it is to run over these leases."""


@dataclass(frozen=True)
class Options:
    """The options of `hostprep exec` that concern the engine."""

    count: int | None = None
    size_bytes: int = 1
    regions: tuple[str, ...] = ()
    warm: bool = False
    """Whether the engine's contents are kept for its next process."""

    @property
    def region_count(self) -> int:
        """How many regions are asked for, 1 by default."""
        return len(self.regions) or self.count or 1


@dataclass(frozen=True)
class EngineStart:
    """The command that is to start an engine, as it was given to `hostprep exec`."""

    integration: Integration
    command: tuple[str, ...]
    environ: Mapping[str, str]
    options: Options = Options()


@dataclass(frozen=True)
class Requirements:
    """What an engine's command needs of the pool."""

    count: int = 1
    """Regions, all or none."""
    size_bytes: int = 1
    """The least that each must have."""
    because: str = ""
    """Which option of the command asks for that size, for the error; empty: none does."""
    link_paths: tuple[str, ...] = ()
    """Paths that are known before the claim and must be free: links will be made there."""


@dataclass(frozen=True)
class Launch:
    """How the engine is started over its leases."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    """To be added to the environment."""
    links: tuple[tuple[str, int], ...] = ()
    """Paths, and which lease each leads to."""
    notes: tuple[str, ...] = ()
    """For people, on standard error."""
    used_bytes: int | None = None
    """What the command has the engine use of all regions together; None: all, or not known."""


def launcher_of(integration: Integration) -> Launcher:
    """Import an integration's launcher, and with it no other engine's."""
    from importlib import import_module

    launcher: Launcher = import_module(integration.launcher)
    return launcher


def reconcile_options(options: Options, required: Requirements) -> Requirements:
    """Return what to claim, where the command and `hostprep exec` may both ask for something.

    Raises BadInputError with both numbers where the two contradict each other.
    """
    given = len(options.regions) or options.count
    if given is not None and given != required.count:
        option = "--region" if options.regions else "--count"
        raise BadInputError(
            f"the engine needs {required.count} region(s), {option} gives it {given}",
            reason="WrongCount",
            remedy=f"name {required.count} region(s)" if options.regions else f"leave {option} out",
        )
    if options.size_bytes > required.size_bytes:
        required = replace(required, size_bytes=options.size_bytes, because="")
    return required


@dataclass(frozen=True)
class CommandSyntax:
    """How an engine's server is started, and its long options that matter to a launcher.

    Also those that begin alike: argparse takes any unambiguous beginning of a name.
    """

    starts: tuple[tuple[str, ...], ...]
    """Words that start it, the first one by any path; `-m MODULE` follows a Python."""
    otherwise: str
    """What is wrong with a command that starts no server."""
    remedy: str
    values: tuple[str, ...]
    """Options with a value."""
    flags: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of the above."""
    shortest: int = 2
    """A name of at most this many characters is no beginning of another one."""

    def read(self, words: Sequence[str]) -> ServerCommand:
        """Read a command that ends in the server's, after `numactl` or alone.

        Raises BadInputError for what starts no server.
        """
        for index, word in enumerate(words):
            for start in self.starts:
                end = index + len(start)
                if word == "-m" and index == 0:
                    continue  # no Python stands before it
                if (os.path.basename(word), *words[index + 1 : end]) == start:
                    program = words[index - 1] if word == "-m" else word
                    return ServerCommand(program, self._options(words[end:]))
        raise BadInputError(self.otherwise, reason="BadCommand", remedy=self.remedy)

    def _options(self, words: Sequence[str]) -> dict[str, str]:
        found = {}
        rest = list(words)
        while rest:
            name, equals, value = rest.pop(0).partition("=")
            option = self._resolve(name)
            if option is None:
                continue
            if not equals and option not in self.flags and rest:
                value = rest.pop(0)
            found[option] = value
        return found

    def _resolve(self, name: str) -> str | None:
        names = {*self.values, *self.flags, *self.aliases}
        if name not in names:
            if len(name) <= self.shortest or not name.startswith("--"):
                return None
            matching = [option for option in names if option.startswith(name)]
            if len(matching) != 1:
                return None
            (name,) = matching
        return self.aliases.get(name, name)


@dataclass(frozen=True)
class ServerCommand:
    """A command that starts an engine's server."""

    program: str
    """The script, or the Python that runs the module."""
    options: Mapping[str, str]
    """Those that are given, by long names: the last value, which counts; empty for a flag."""

    def last(self, name: str) -> str | None:
        """Return an option's value; None where it is not given."""
        return self.options.get(name)

    def number(self, name: str, default: int, *, least: int, what: str, remedy: str) -> int:
        """Return an option's whole number. Raises BadInputError for what is no `what`."""
        text = self.last(name)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise BadInputError(f"{name} {text!r} is no {what}", reason="BadCommand", remedy=remedy)
        return int(text)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse options that cannot go with prepared memory. Raises BadInputError for the first.

        `reasons`: by option, what it does instead.
        """
        for option, why in reasons.items():
            if option in self.options:
                raise BadInputError(
                    f"{option} {why}", reason="BadCommand", remedy=f"leave {option} out"
                )


def key_in_file(path: str | None, keys: str) -> str | None:
    """Return the first key that a YAML file sets of those that match `keys`, a regular expression.

    Found by its text, for want of a parser. None where it sets none, and for a file that cannot
    be read: the engine itself reports that.
    """
    if not path:
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_FILE_LIMIT_BYTES)
    except OSError:
        return None
    found = re.search(rf"^[ \t]*['\"]?({keys})['\"]?[ \t]*:", text, re.MULTILINE | re.ASCII)
    return found[1] if found else None


def refuse_in_file(path: str | None, keys: str, *, engine: str) -> None:
    """Raise BadInputError where an engine's file, which is not read, sets one of `keys`."""
    key = key_in_file(path, keys)
    if key is not None:
        raise BadInputError(
            f"{path} sets {key}, which --engine {engine} has to see and complete",
            reason="BadCommand",
            remedy="move it from the file to the command line",
        )
