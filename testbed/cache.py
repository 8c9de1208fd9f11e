"""Where built programs are kept: one folder each, complete or not there at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

Say = Callable[[str], None]
"""Takes a line for the person who waits."""

_UNFINISHED = ".building-"
_REMIND_SECONDS = 15.0


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/hostprep/testbed`, below ~/.cache when that is not set."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "hostprep" / "testbed"


@contextmanager
def builder_lock(cache: Path, say: Say) -> Iterator[int]:
    """One builder at a time, in all processes; whoever waits says so. Removes unfinished builds.

    Yields the lock's descriptor: a child that inherits it holds the lock for as long as it works,
    should its builder be killed.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "builder.lock", "w", encoding="ascii") as file:
        _wait_for(file.fileno(), say)
        for folder in cache.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(folder, ignore_errors=True)
        yield file.fileno()


def _wait_for(fd: int, say: Say) -> None:
    start = time.monotonic()
    reminded = -_REMIND_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - start
            if waited - reminded >= _REMIND_SECONDS:
                say(f"another process builds the testbed's programs: waiting, {waited:.0f} s")
                reminded = waited
            time.sleep(0.2)
        else:
            return


@contextmanager
def install(cache: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder that becomes `cache/name` when the body ends well, else vanishes."""
    unfinished = cache / f"{_UNFINISHED}{name}"
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        os.rename(unfinished, cache / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
