"""Make the chart's README.md from the comments of its values.yaml.

    python scripts/chart_readme.py [--check]

A line `# -- text` above a key, and the comment lines that follow it, explain the key. Every key
without keys of its own below it must have one, or be inside of one that has.
"""

# ruff: noqa: INP001  scripts are no package
from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Value", "main", "readme", "values_of"]

CHART = Path(__file__).resolve().parent.parent / "charts" / "hostprep"
_MARK = "# -- "
_BEGIN, _END = "<!-- values: made by scripts/chart_readme.py -->\n", "<!-- end of values -->"


@dataclass(frozen=True, slots=True)
class Value:
    """One row: a key with dots, its default as JSON, and what it does."""

    key: str
    default: str
    meaning: str


def values_of(text: str) -> tuple[Value, ...]:
    """Return the explained values of a values.yaml. Raises ValueError naming a bare key."""
    root = yaml.compose(text)
    return tuple(_walk(root, text.splitlines(), "")) if isinstance(root, yaml.MappingNode) else ()


def _walk(node: yaml.MappingNode, lines: Sequence[str], prefix: str) -> Iterator[Value]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        meaning = _comment_above(lines, key.start_mark.line)
        if meaning:
            yield Value(name, json.dumps(_constructed(value)), meaning)
        elif isinstance(value, yaml.MappingNode) and value.value:
            yield from _walk(value, lines, f"{name}.")
        else:
            raise ValueError(f"{name} in values.yaml has no comment that begins with {_MARK!r}")


def _constructed(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node))


def _comment_above(lines: Sequence[str], line: int) -> str:
    found: list[str] = []
    for above in reversed(lines[:line]):
        text = above.strip()
        if not text.startswith("#"):
            return ""
        found.insert(0, text.removeprefix(_MARK) if text.startswith(_MARK) else text[1:].strip())
        if text.startswith(_MARK):
            return " ".join(found)
    return ""


def readme(old: str, values: Sequence[Value]) -> str:
    """Return the README with its table of values replaced. Raises ValueError without the marks."""
    head, begin, rest = old.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the lines {_BEGIN.strip()!r} and {_END!r}")
    rows = ["| value | default | |", "|---|---|---|"]
    rows += [f"| `{v.key}` | `{v.default}` | {v.meaning.replace('|', '&#124;')} |" for v in values]
    return head + begin + "\n".join(rows) + "\n" + end + tail


def main(arguments: Sequence[str]) -> int:
    """Write README.md, or with `--check` only tell whether it is current: 0 if so, else 1."""
    path = CHART / "README.md"
    old = path.read_text(encoding="utf-8")
    new = readme(old, values_of((CHART / "values.yaml").read_text(encoding="utf-8")))
    if "--check" in arguments:
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
