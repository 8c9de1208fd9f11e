"""An engine's options: on its command line, and in a YAML file of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_FILE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class OptionTable:
    """The long options of an engine that matter to a launcher.

    Also those that begin alike: argparse takes any unambiguous beginning of a name.
    """

    values: tuple[str, ...]
    """Options with a value."""
    flags: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of the above."""
    shortest: int = 2
    """A name of at most this many characters is no beginning of another one."""

    def read(self, words: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return options and their values in order, and pass over all other words.

        The value of a flag, or one that is missing, is "".
        """
        found = []
        rest = list(words)
        while rest:
            name, equals, value = rest.pop(0).partition("=")
            option = self._resolve(name)
            if option is None:
                continue
            if not equals and option not in self.flags and rest:
                value = rest.pop(0)
            found.append((option, value))
        return tuple(found)

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

    words: tuple[str, ...]
    program: str
    """The script, or the Python that runs the module."""
    options: tuple[tuple[str, str], ...]
    """Long names and values, in order; the empty string for a flag."""

    def last(self, name: str) -> str | None:
        """Return the last value of an option, which is the one that counts; None: not given."""
        values = [value for option, value in self.options if option == name]
        return values[-1] if values else None

    @property
    def names(self) -> tuple[str, ...]:
        """The options that are given."""
        return tuple(option for option, _ in self.options)


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
