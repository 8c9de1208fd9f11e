"""The rivals: small C programs that do what engines and QEMU do, compiled when first needed."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.machine import BenchmarkError

_SOURCES = Path(__file__).with_name("rivals")


def run_rival(program: str, *arguments: str | int) -> float:
    """Run a rival in a fresh process; return the seconds that it measured itself.

    Raises BenchmarkError where there is no C compiler, or with the rival's own message.
    """
    command = [f"{_build()}/{program}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{program} {arguments[0]}: {done.stderr.strip()}")
    return float(json.loads(done.stdout)["took_s"])


@functools.cache
def _build() -> str:
    names = (os.environ.get("CC", "cc"), "gcc", "clang")
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise BenchmarkError("no C compiler: install gcc or clang, or name one in CC")
    folder = tempfile.TemporaryDirectory(prefix="hostprep-bench-")
    _keep.append(folder)
    for source in _SOURCES.glob("*.c"):
        command = [compiler, "-O2", "-pthread", "-o", f"{folder.name}/{source.stem}", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchmarkError(f"{source.name} does not compile: {done.stderr.strip()}")
    return folder.name


_keep: list[tempfile.TemporaryDirectory[str]] = []
"""The compiled programs, until the end of this process."""
