"""Whether an engine's own YAML file sets something: found by its key, for want of a parser."""

from __future__ import annotations

import re

__all__ = ["key_in_file"]

_LIMIT_BYTES = 1 << 20


def key_in_file(path: str | None, keys: str) -> str | None:
    """Return the first key that a file sets of those that match `keys`, a regular expression.

    None where it sets none, and for a file that cannot be read: the engine says it better.
    """
    if not path:
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_LIMIT_BYTES)
    except OSError:
        return None
    found = re.search(rf"^[ \t]*['\"]?({keys})['\"]?[ \t]*:", text, re.MULTILINE | re.ASCII)
    return found[1] if found else None
