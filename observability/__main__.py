"""Write the generated files, or say which are not current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from observability.files import generated

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when every file is as it should be, now or after writing it."""
    parser = argparse.ArgumentParser(prog="python -m observability", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write what is not current")
    write = parser.parse_args(arguments).write
    stale = [path for path, text in generated().items() if _text_of(path) != text]
    for path in stale:
        sys.stdout.write(f"{'written' if write else 'not current'}: {path}\n")
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(generated()[path], encoding="utf-8")
    return 0 if write or not stale else 1


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
