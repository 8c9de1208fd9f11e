"""Reading the long options of an engine's command line, for launchers that add their own."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

__all__ = ["read_options"]


def read_options(
    words: Sequence[str], known: Callable[[str], str | None], *, flags: Collection[str]
) -> list[tuple[str, str]]:
    """Return options and their values in order; what is no option is passed over.

    `known` returns an option's name for a word as it may be written, or None. `flags` take no
    value; where one is missing, or is none, it is "".
    """
    found = []
    rest = list(words)
    while rest:
        name, equals, given = rest.pop(0).partition("=")
        option = known(name)
        if option is None:
            continue
        if not equals and option not in flags and rest:
            given = rest.pop(0)
        found.append((option, given))
    return found
