"""Runs statements and commands in one fresh process and reports, as JSON, what became of each.

Started by path, in any Python >= 3.9; imports nothing of ours by itself. Reads from standard input
a JSON object: `path` (put first on sys.path, unless empty), `statements` and `commands` (lists of
words, `-m MODULE ...` or a file to run). Prints an object with `statements` and `commands`, each by
its text, and `files`: where each of our modules came from.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from typing import Any


def main() -> None:
    asked = json.load(sys.stdin)
    if asked["path"]:
        sys.path.insert(0, asked["path"])
    report: dict[str, Any] = {
        "statements": {text: _run_statement(text) for text in asked["statements"]},
        "commands": {" ".join(words): _run_command(words) for words in asked["commands"]},
        "files": {
            name: str(getattr(module, "__file__", ""))
            for name, module in sys.modules.items()
            if name.partition(".")[0] == "hostprep"
        },
    }
    print(json.dumps(report))


def _run_statement(text: str) -> str:
    """Return "" where it succeeds, else the error, with the module that is missing if one is."""
    try:
        exec(text, {})
    except ModuleNotFoundError as error:
        return f"no module {error.name}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run_command(words: list[str]) -> tuple[object, str]:
    """Return the exit code and what was printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words[:]
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            return end.code, output.getvalue()
        except Exception as error:
            return f"{type(error).__name__}: {error}", output.getvalue()
    return 0, output.getvalue()


if __name__ == "__main__":
    main()
